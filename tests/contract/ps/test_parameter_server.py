"""Every RPC of protos/ps.proto over a real gRPC server on port 0."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stratagem.errors import (
    CheckpointError,
    ConfigurationError,
    FencedError,
    FrameError,
    LimitError,
    ProtocolError,
    SequenceError,
    StaleStoreError,
    StratagemError,
    UnsupportedOptimizerError,
    VariableError,
)
from stratagem.ps.published import FRAME_BYTES
from stratagem.ps.servicer import SERVICE
from stratagem.ps.specs import Limits
from stratagem.ps.store import Store
from stratagem.rpc.codec import encode_frame
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.generated import common_pb2, frame_pb2, ps_pb2
from stratagem.rpc.server import RunningServer
from tests.contract.ps.raw_client import TIMEOUT_S, RawClient
from tests.contract.ps.serving import serving
from tests.unit.ps.driver import complete

torch.set_num_threads(1)

CHIEF = common_pb2.Sender(task="chief:0", incarnation=1)
SIZE = 10


@pytest.fixture
def store() -> Store:
    return Store(limits=Limits(max_store_bytes=64 << 20), frames_timeout_s=5.0)


@pytest.fixture
def server(store: Store) -> Iterator[RunningServer]:
    with serving(store) as running:
        yield running


@pytest.fixture
def connect(server: RunningServer) -> Iterator[Callable[..., RawClient]]:
    clients: list[RawClient] = []

    def connect(task: str = "worker:0", incarnation: int = 1) -> RawClient:
        clients.append(RawClient(server.address, task, incarnation))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def refusal(call: Callable[[], object]) -> StratagemError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return error_from_rpc(caught.value, "ps:0")


def test_train_one_unit_and_close_it(store: Store, connect: Callable[..., RawClient]) -> None:
    worker = connect()
    assert (worker.hello.store_epoch, worker.hello.next_sequence) == (store.state.store_epoch, 1)
    assert worker.hello.max_message_bytes == 8 << 20
    assert list(worker.create(torch.zeros(SIZE)).initialize) == [1]
    ref = worker.stage(2, torch.ones(SIZE))
    request = worker.commit_request(2, ref, 0)
    prepare = ps_pb2.PrepareUpdateRequest(
        sender=worker.sender(0), update=request.update, gradients=ref, groups=request.groups, want_facts=True
    )
    facts = worker.stub.PrepareUpdate(prepare, timeout=TIMEOUT_S)
    assert facts.squared_norm == pytest.approx(SIZE) and facts.finite and not facts.not_finite
    reply = worker.stub.CommitUpdate(request, timeout=TIMEOUT_S)
    assert reply.applied and not reply.left_out
    assert torch.equal(worker.receive(SIZE, reply.versions[0].num_frames), torch.full((SIZE,), -0.5))
    again = worker.stub.CommitUpdate(request, timeout=TIMEOUT_S)
    assert not again.applied and torch.equal(worker.receive(SIZE, 1), torch.full((SIZE,), -0.5))
    pulled = worker.pull(9, again.versions[0].version)
    assert pulled.versions[0].num_frames == 0 and list(pulled.step_counts) == [1]
    close = ps_pb2.UnitClose(unit=request.update.units[0], num_updates=1)
    worker.stub.CloseUnits(ps_pb2.CloseUnitsRequest(sender=worker.sender(), closes=[close]), timeout=TIMEOUT_S)
    described = worker.stub.DescribeUnits(ps_pb2.DescribeUnitsRequest(sender=CHIEF), timeout=TIMEOUT_S)
    assert described.closed == [common_pb2.UnitSet(dataset=1, epoch=0, bitmap=b"\x01")]
    assert described.step == 1 and described.initialized and not described.open


def test_values_larger_than_a_frame(store: Store, connect: Callable[..., RawClient]) -> None:
    size = 3 * FRAME_BYTES // 4 + 17
    worker = connect()
    worker.create(torch.zeros(size))
    gradient = torch.randn(size)
    request = worker.commit_request(2, worker.stage(2, gradient, pieces=7), 0)
    reply = worker.stub.CommitUpdate(request, timeout=TIMEOUT_S)
    assert reply.versions[0].num_frames == 4
    torch.testing.assert_close(worker.receive(size, 4), -0.5 * gradient)


def test_two_workers_at_staleness_0(store: Store, connect: Callable[..., RawClient]) -> None:
    workers = [connect(f"worker:{index}") for index in range(2)]
    for worker in workers:
        worker.create(torch.zeros(SIZE))
    units = [common_pb2.Unit(dataset=1, epoch=0, index=index) for index in range(2)]
    calls = []
    for index, (worker, weight) in enumerate(zip(workers, (3.0, 1.0), strict=True)):
        part = ps_pb2.StepSlice(step=1, units=units, weight=weight, merge=ps_pb2.MEAN)
        ref = worker.stage(2, torch.full((SIZE,), float(index)))
        request = worker.commit_request(2, ref, index, slice=part)
        prepare = ps_pb2.PrepareUpdateRequest(
            sender=worker.sender(), update=request.update, gradients=ref, groups=request.groups, slice=part
        )
        worker.stub.PrepareUpdate(prepare, timeout=TIMEOUT_S)
        calls.append(worker.stub.CommitUpdate.future(request, timeout=TIMEOUT_S))
    for worker, call in zip(workers, calls, strict=True):
        assert call.result().applied
        torch.testing.assert_close(worker.receive(SIZE, 1), torch.full((SIZE,), -0.125))
    assert store.state.step == 1


def test_chief_closes_a_step_and_fences(store: Store, connect: Callable[..., RawClient]) -> None:
    worker, dead = connect("worker:0"), connect("worker:1")
    worker.create(torch.zeros(SIZE))
    units = [common_pb2.Unit(dataset=1, epoch=0, index=index) for index in range(2)]
    part = ps_pb2.StepSlice(step=1, units=units, weight=1)
    call = worker.stub.CommitUpdate.future(
        worker.commit_request(2, worker.stage(2, torch.ones(SIZE)), 0, slice=part), timeout=TIMEOUT_S
    )
    waiting = dead.stub.CommitUpdate.future(
        dead.commit_request(2, ps_pb2.TransferRef(transfer=2, num_frames=4), 1, slice=part), timeout=TIMEOUT_S
    )
    fence = ps_pb2.FenceRequest(sender=CHIEF, task="worker:1", incarnation=1)
    assert not worker.stub.Fence(fence, timeout=TIMEOUT_S).committed
    assert isinstance(refusal(waiting.result), FencedError)
    assert isinstance(error_from_rpc(dead.lane_end(), "ps:0"), FencedError)
    assert isinstance(refusal(lambda: dead.pull(5)), FencedError)
    dead.open_lane()
    assert isinstance(error_from_rpc(dead.lane_end(), "ps:0"), FencedError)
    close = ps_pb2.CloseStepRequest(sender=CHIEF, step=1, included=units[:1])
    worker.stub.CloseStep(close, timeout=TIMEOUT_S)
    assert call.result().applied
    mark = ps_pb2.MarkLostRequest(sender=CHIEF, units=[common_pb2.UnitSet(dataset=1, bitmap=b"\x07")])
    worker.stub.MarkLost(mark, timeout=TIMEOUT_S)
    described = worker.stub.DescribeUnits(ps_pb2.DescribeUnitsRequest(sender=CHIEF), timeout=TIMEOUT_S)
    assert [(each.dataset, each.epoch, each.bitmap) for each in described.closed] == [(1, 0, b"\x07")]


def test_hold_admit_save_release_restore(
    store: Store, connect: Callable[..., RawClient], tmp_path: pathlib.Path
) -> None:
    worker = connect()
    worker.create(torch.zeros(SIZE))
    stub = worker.stub
    hold = ps_pb2.HoldCommitsRequest(sender=CHIEF, token=5, hold_s=60)
    assert stub.HoldCommits(hold, timeout=TIMEOUT_S).initialized
    request = worker.commit_request(2, worker.stage(2, torch.ones(SIZE)), 0)
    call = stub.CommitUpdate.future(request, timeout=TIMEOUT_S)
    admit = ps_pb2.AdmitUpdatesRequest(sender=CHIEF, token=5, updates=[request.update], wait_s=10)
    assert stub.AdmitUpdates(admit, timeout=TIMEOUT_S).complete and call.result().applied
    worker.receive(SIZE, 1)
    save = ps_pb2.SaveShardsRequest(sender=CHIEF, token=5, directory=str(tmp_path), nonce="n")
    assert isinstance(refusal(lambda: stub.SaveShards(save, timeout=TIMEOUT_S)), CheckpointError)
    (tmp_path / "nonce").write_text("n")
    saved = stub.SaveShards(save, timeout=TIMEOUT_S)
    assert [file.name for file in saved.files] == ["ps-0.safetensors", "ps-0.json"] and saved.step == 1
    stub.ReleaseCommits(ps_pb2.ReleaseCommitsRequest(sender=CHIEF, token=5), timeout=TIMEOUT_S)
    reply = stub.CommitUpdate(worker.commit_request(4, worker.stage(4, torch.ones(SIZE)), 1), timeout=TIMEOUT_S)
    worker.receive(SIZE, 1)
    restore = ps_pb2.RestoreShardsRequest(sender=CHIEF, directory=str(tmp_path))
    assert isinstance(refusal(lambda: stub.RestoreShards(restore, timeout=TIMEOUT_S)), CheckpointError)
    complete(tmp_path)
    stub.RestoreShards(restore, timeout=TIMEOUT_S)
    assert store.state.store_epoch > worker.hello.store_epoch
    assert isinstance(error_from_rpc(worker.lane_end(), "ps:0"), StaleStoreError)
    assert isinstance(
        refusal(lambda: stub.CommitUpdate(worker.commit_request(6, None, 2), timeout=TIMEOUT_S)), StaleStoreError
    )
    hello = stub.Hello(ps_pb2.HelloRequest(sender=worker.sender(0), next_sequence=40), timeout=TIMEOUT_S)
    assert (hello.store_epoch, hello.next_sequence) == (store.state.store_epoch, 40)
    worker.open_lane()
    assert worker.pull(8, have=reply.versions[0].version).versions[0].version.epoch != reply.versions[0].version.epoch
    assert torch.equal(worker.receive(SIZE, 1), torch.full((SIZE,), -0.5))


def test_a_broken_lane_is_opened_again(store: Store, connect: Callable[..., RawClient]) -> None:
    worker = connect()
    worker.create(torch.zeros(SIZE))
    worker.outbox.put(encode_frame(frame_pb2.GRADIENT, 2, 1, 8, torch.ones(5)))
    assert isinstance(error_from_rpc(worker.lane_end(), "ps:0"), FrameError)
    worker.stub.Hello(ps_pb2.HelloRequest(sender=worker.sender(0)), timeout=TIMEOUT_S)
    worker.open_lane()
    reply = worker.stub.CommitUpdate(worker.commit_request(3, worker.stage(3, torch.ones(SIZE)), 0), timeout=TIMEOUT_S)
    assert reply.applied
    worker.receive(SIZE, 1)
    worker.outbox.put(b"\x0d\xff\xff\xff\xff not a frame")
    assert isinstance(error_from_rpc(worker.lane_end(), "ps:0"), FrameError)


def test_hostile_control_messages_are_refused_with_a_reason(store: Store, connect: Callable[..., RawClient]) -> None:
    worker = connect()
    stub = worker.stub

    def create(**shard: object) -> Callable[[], object]:
        spec = ps_pb2.ShardSpec(**{"variable": "x", **shard})  # type: ignore[arg-type]
        group = ps_pb2.GroupSpec(group=1, optimizer="SGD", dtype=frame_pb2.FLOAT32, shards=[spec])
        request = ps_pb2.CreateVariablesRequest(sender=worker.sender(), groups=[group])
        return lambda: stub.CreateVariables(request, timeout=TIMEOUT_S)

    huge = (1 << 63) - 1
    assert isinstance(refusal(create(shape=[huge, huge], num_rows=huge)), LimitError)
    assert isinstance(refusal(create(shape=[4], num_rows=huge)), VariableError)
    assert isinstance(refusal(create(shape=[4], num_rows=4, offset=1)), VariableError)
    group = ps_pb2.GroupSpec(group=1, optimizer="LBFGS", dtype=frame_pb2.FLOAT32)
    request = ps_pb2.CreateVariablesRequest(sender=worker.sender(), groups=[group])
    assert isinstance(refusal(lambda: stub.CreateVariables(request, timeout=TIMEOUT_S)), UnsupportedOptimizerError)
    group = ps_pb2.GroupSpec(group=1, optimizer="SGD")
    request = ps_pb2.CreateVariablesRequest(sender=worker.sender(), groups=[group])
    assert isinstance(refusal(lambda: stub.CreateVariables(request, timeout=TIMEOUT_S)), VariableError)
    assert not store.state.locked_groups
    nobody = ps_pb2.HelloRequest(next_sequence=1)
    assert isinstance(refusal(lambda: stub.Hello(nobody, timeout=TIMEOUT_S)), ProtocolError)
    worker.create(torch.zeros(SIZE))

    def commit(change: Callable[[ps_pb2.CommitUpdateRequest], None]) -> StratagemError:
        request = worker.commit_request(2, worker.stage(worker.sequence + 10, torch.ones(SIZE)), 0)
        change(request)
        return refusal(lambda: stub.CommitUpdate(request, timeout=TIMEOUT_S))

    def far(request: ps_pb2.CommitUpdateRequest) -> None:
        request.sender.sequence += 1000

    def no_action(request: ps_pb2.CommitUpdateRequest) -> None:
        request.ClearField("action")

    def infinite(request: ps_pb2.CommitUpdateRequest) -> None:
        request.scale = float("inf")

    def beyond(request: ps_pb2.CommitUpdateRequest) -> None:
        request.update.units[0].index = 1 << 40

    def close_beyond(request: ps_pb2.CommitUpdateRequest) -> None:
        request.closes.add().unit.index = 1 << 60

    def unknown(request: ps_pb2.CommitUpdateRequest) -> None:
        request.groups[0].group = 77

    def no_rate(request: ps_pb2.CommitUpdateRequest) -> None:
        request.groups[0].hyper_parameters[0].update({"lr": "x"})

    def too_many(request: ps_pb2.CommitUpdateRequest) -> None:
        request.gradients.num_frames = 1 << 60

    for change, error in (
        (far, SequenceError),
        (no_action, ProtocolError),
        (infinite, ProtocolError),
        (beyond, LimitError),
        (close_beyond, LimitError),
        (unknown, VariableError),
        (no_rate, ConfigurationError),
        (too_many, ProtocolError),
    ):
        assert type(commit(change)) is error, change
    assert store.state.step == 0
    big = ps_pb2.CreateVariablesRequest(sender=worker.sender())
    big.groups.add().shards.add(variable="x" * (9 << 20))
    assert isinstance(refusal(lambda: stub.CreateVariables(big, timeout=TIMEOUT_S)), LimitError)


def test_health_tells_ready_from_live(server: RunningServer, connect: Callable[..., RawClient]) -> None:
    health: Any = health_pb2_grpc.HealthStub(connect().control)

    def status(service: str) -> int:
        return health.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S).status  # type: ignore[no-any-return]

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert (status(""), status(SERVICE.full_name)) == (serving, not_serving)
    server.set_serving(True)
    assert status(SERVICE.full_name) == serving
