"""What a worker asks once a step, over every lane: the same answers and errors as the RPCs of those names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from stratagem.cluster.communication import Transport
from stratagem.cluster.config import WorkerConfig
from stratagem.cluster.membership import Member, Membership
from stratagem.errors import LimitError, PeerUnavailableError, ProtocolError, SequenceError, StaleStoreError
from stratagem.ps import waiting
from stratagem.ps.sequences import WINDOW
from stratagem.ps.snapshot import Content
from stratagem.ps.specs import Limits
from stratagem.ps.store import Store
from stratagem.ps.units import UnitLedger
from stratagem.rpc.codec import Frame
from stratagem.rpc.generated import common_pb2, frame_pb2, ps_pb2, ps_pb2_grpc
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.security import OPEN
from stratagem.worker.push.ps_client import PsClient
from tests.contract.ps.serving import serving
from tests.polling import until
from tests.unit.ps.driver import CALL, CHIEF, staged_bytes

SIZE = 6
MAX_IDS = 100


class Worker:
    """A worker with one group of one variable, whose value is zero."""

    def __init__(self, address: str, transport: Transport, name: str = "worker:0") -> None:
        self.ps = Member("ps:0", address, 0, True)
        session: Any = SimpleNamespace(
            task=name,
            incarnation=1,
            security=OPEN,
            membership=Membership(True, (self.ps,)),
            raise_if_stopped=lambda: None,
            wait_stopped=lambda timeout_s: None,
        )
        self.session = session
        config = WorkerConfig(task="worker:0", peer_timeout_s=30.0, frame_bytes=1 << 20, transport=transport)
        self.client = PsClient(session, 0, BytesMeter(), config)
        self.client.connect()

    def create(self) -> Worker:
        shard = ps_pb2.ShardSpec(variable="w", shape=[SIZE], num_rows=SIZE)
        group = ps_pb2.GroupSpec(group=1, optimizer="SGD", dtype=frame_pb2.FLOAT32, shards=[shard])
        self.client.call("CreateVariables", ps_pb2.CreateVariablesRequest(groups=[group], can_initialize=True))
        values = self.stage(torch.zeros(SIZE), frame_pb2.VALUES)
        self.client.call("AssignValues", ps_pb2.AssignValuesRequest(values=values, groups=[1]), sequenced=True)
        return self

    def stage(self, flat: torch.Tensor, kind: int = frame_pb2.GRADIENT) -> ps_pb2.TransferRef:
        """Sends a flat tensor."""
        transfer = self.client.new_transfer()
        self.client.lane.send(kind, transfer, 1, 0, lambda: [flat], flat.numel())
        return ps_pb2.TransferRef(transfer=transfer, num_frames=1)

    def request(self, index: int, **fields: Any) -> ps_pb2.CommitUpdateRequest:
        """A commit of ones."""
        group = ps_pb2.GroupCommit(group=1)
        group.hyper_parameters.add().update({"lr": 0.5})
        update = common_pb2.Update(units=[common_pb2.Unit(dataset=1, index=index)])
        parts: dict[str, Any] = {
            "update": update,
            "gradients": self.stage(torch.ones(SIZE)),
            "groups": [group],
            "action": ps_pb2.APPLY,
            "scale": 1.0,
            "reply_transfer": self.client.new_transfer(),
            "num_servers": 1,
        }
        return ps_pb2.CommitUpdateRequest(**{**parts, **fields})


@pytest.fixture
def store() -> Store:
    return Store(limits=Limits(max_ids_per_request=MAX_IDS), frames_timeout_s=5.0)


@pytest.fixture(params=["shm", "tcp", "grpc"])
def worker(store: Store, request: pytest.FixtureRequest) -> Iterator[Worker]:
    with serving(store) as running:
        made = Worker(running.address, request.param).create()
        yield made
        made.client.close("the test is over")


def test_an_update_is_applied_once_and_brings_the_weights(worker: Worker) -> None:
    weights = torch.zeros(SIZE)

    def write(frame: Frame) -> None:
        weights.copy_(frame.tensor)

    request = worker.request(0)
    call = worker.client.start("CommitUpdate", request, sequenced=True)
    until(lambda: call.done)
    reply = call.result(write)
    assert reply.applied and torch.equal(weights, torch.full((SIZE,), -0.5))
    request.reply_transfer = worker.client.new_transfer()
    again = worker.client.restart("CommitUpdate", request)
    assert not again.result().applied
    kept: list[torch.Tensor] = []
    again.result(lambda frame: kept.append(frame.tensor.clone()))
    assert [torch.equal(one, weights) for one in kept] == [True]
    want = ps_pb2.PullWeightsRequest.Want(group=1, have=reply.versions[0].version)
    pull = ps_pb2.PullWeightsRequest(groups=[want], reply_transfer=worker.client.new_transfer())
    assert worker.client.start("PullWeights", pull).result().versions[0].num_frames == 0


def test_a_call_that_never_came_keeps_no_later_ones_out(worker: Worker) -> None:
    client = worker.client
    there, client._stub = client._stub, ps_pb2_grpc.ParameterServerStub(grpc.insecure_channel("unix:nobody"))
    with pytest.raises(PeerUnavailableError):
        client.call("AssignValues", ps_pb2.AssignValuesRequest(groups=[1]), sequenced=True)
    client._stub = there
    client.connect()
    for index in range(WINDOW + 1):
        assert client.start("CommitUpdate", worker.request(index), sequenced=True).result().applied


def test_facts_of_a_gradient(worker: Worker) -> None:
    commit = worker.request(0)
    prepare = ps_pb2.PrepareUpdateRequest(
        update=commit.update, gradients=commit.gradients, groups=commit.groups, want_facts=True
    )
    facts = worker.client.start("PrepareUpdate", prepare, sequenced=True).result()
    assert facts.finite and facts.squared_norm == pytest.approx(SIZE)


def test_refusals_are_the_errors_of_the_rpc_and_the_lane_goes_on(worker: Worker) -> None:
    def refused(change: Callable[[ps_pb2.CommitUpdateRequest], None]) -> None:
        request = worker.request(0)
        change(request)
        worker.client.start("CommitUpdate", request, sequenced=True).result()

    with pytest.raises(ProtocolError, match="finite scale"):
        refused(lambda request: setattr(request, "scale", float("inf")))
    with pytest.raises(ProtocolError, match="APPLY or SKIP"):
        refused(lambda request: setattr(request, "action", 7))
    far = worker.request(0)
    far.sender.CopyFrom(common_pb2.Sender(task="worker:0", incarnation=1, sequence=900))
    with pytest.raises(SequenceError, match="send Hello"):
        worker.client.restart("CommitUpdate", far).result()
    with pytest.raises(LimitError, match="units"):
        refused(lambda request: setattr(request.update.units[0], "index", 1 << 60))
    assert worker.client.start("CommitUpdate", worker.request(1), sequenced=True).result().applied


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_what_is_too_much_is_told_to_the_request_that_waits_for_it(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker heard of a lane that broke, and opened another, for a minute."""
    monkeypatch.setattr(waiting, "LANE_S", 0.01)
    with serving(Store(limits=Limits(max_peer_bytes=8))) as running:
        worker = Worker(running.address, transport)
        with pytest.raises(LimitError, match="over max_peer_bytes of 8;"):
            worker.create()
        worker.client.close("the test is over")


@pytest.mark.parametrize("case", ["another name", "no message", "too many entries"])
def test_what_cannot_be_ends_the_lane_and_changes_nothing(worker: Worker, store: Store, case: str) -> None:
    client = worker.client
    closes = [ps_pb2.UnitClose(unit=common_pb2.Unit(dataset=1, index=index)) for index in range(MAX_IDS)]
    request = worker.request(0, closes=closes if case == "too many entries" else [])
    if case == "another name":
        worker.session.incarnation = 2
    elif case == "no message":
        client.lane.send(frame_pb2.COMMIT_UPDATE, 5, 0, 0, lambda: [torch.full((9,), 255, dtype=torch.uint8)], 9)
    with pytest.raises((PeerUnavailableError, LimitError, ProtocolError)):
        client.start("CommitUpdate", request, sequenced=True).result()
    until(lambda: not store.state.senders.lanes)
    assert store.state.locked_groups[1].group.num_updates == 0


def test_what_came_behind_a_commit_that_a_restore_ended_is_no_fault(
    worker: Worker, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """As rows for the next batch. Of another number of ps, none has a group before workers say which."""
    store.checkpoints.hold_commits(CHIEF, 5, 60, CALL)
    with worker.client.lane.corked():
        call = worker.client.start("CommitUpdate", worker.request(0), sequenced=True)
        worker.stage(torch.ones(SIZE))
    until(lambda: staged_bytes(store))
    with store.state.changed:
        store.checkpoints.become(Content([], UnitLedger(), 0), store.state.store_epoch + 1)
    with pytest.raises((PeerUnavailableError, StaleStoreError)):
        call.result()
    until(lambda: not store.state.senders.lanes)
    assert not [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_a_worker_that_leaves_while_its_commit_waits_is_noticed(worker: Worker, store: Store) -> None:
    store.checkpoints.hold_commits(CHIEF, 5, 60, CALL)
    worker.client.start("CommitUpdate", worker.request(0), sequenced=True)
    worker.client.close("it leaves")
    until(lambda: not store.state.senders.lanes)
    assert store.state.locked_groups[1].group.num_updates == 0


def test_a_worker_does_not_wait_for_a_ps_that_the_chief_has_lost(worker: Worker, store: Store) -> None:
    store.checkpoints.hold_commits(CHIEF, 5, 60, CALL)
    call = worker.client.start("CommitUpdate", worker.request(0), sequenced=True)
    lost = dataclasses.replace(worker.ps, live=False)
    worker.session.membership = Membership(True, (lost,))
    with pytest.raises(PeerUnavailableError, match="the chief has lost ps:0"):
        call.result()
    store.checkpoints.release_commits(5)


def test_a_ps_is_another_one_when_its_process_is_or_when_it_began_anew_among_another_number(worker: Worker) -> None:
    client, now = worker.client, worker.session.membership
    assert not client.is_replaced
    for change in ({"routing_epoch": 1}, {"members": (dataclasses.replace(worker.ps, incarnation=1),)}):
        worker.session.membership = dataclasses.replace(now, **change)
        assert client.is_replaced, change
    away = dataclasses.replace(worker.ps, incarnation=1, live=False)
    worker.session.membership = dataclasses.replace(now, members=(away,))
    assert not client.is_replaced, "it is waited for first"
    worker.session.membership = dataclasses.replace(now, routing_epoch=2)
    client.connect()
    assert not client.is_replaced
