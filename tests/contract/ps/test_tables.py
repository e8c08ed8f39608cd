"""Tables over real servers and every lane: the layers of ``sg.nn``, their optimizers, and two ps, in this process."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import itertools
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import stratagem as sg
from stratagem.checkpoint.server_state import SavedRows
from stratagem.cluster.communication import Transport
from stratagem.cluster.config import WorkerConfig
from stratagem.cluster.membership import Member, Membership
from stratagem.cluster.units import Unit, Update
from stratagem.errors import (
    ConfigurationError,
    JobStoppedError,
    NonFiniteGradientError,
    PeerUnavailableError,
    StaleStoreError,
    StratagemError,
    UnsupportedOptimizerError,
    VariableError,
)
from stratagem.nn.remote_rows import RemoteRows
from stratagem.ps import table_group
from stratagem.ps.row_values import fill_rows
from stratagem.ps.state import StoreState
from stratagem.ps.store import Store
from stratagem.rpc.generated import ps_pb2
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.security import OPEN
from stratagem.rpc.tcp_lane import TcpLane
from stratagem.strategy.base import Strategy
from stratagem.strategy.default import DefaultStrategy
from stratagem.strategy.ps.variables import VariableGroups
from stratagem.worker.gradient_guard import GradientPolicy
from stratagem.worker.push import gradient_push, remote_table, row_reads
from stratagem.worker.push.close_reports import CloseReports
from stratagem.worker.push.gradient_push import GradientPush
from stratagem.worker.push.ps_client import PsClient
from stratagem.worker.push.row_frames import rows_in
from stratagem.worker.push.variables import RemoteVariables
from stratagem.worker.step_meter import StepMeter
from tests.contract.ps.serving import serving
from tests.polling import until
from tests.unit.nn.test_embedding import Remote
from tests.unit.ps.driver import save_all

torch.set_num_threads(1)

ROWS, WIDTH = 23, 3
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
    "sums from 0.5": lambda parameters: torch.optim.Adagrad(parameters, 0.1, initial_accumulator_value=0.5),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, 0.01),
}


class Net(nn.Module):
    """A table with padding, bags of another, and what is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.table = sg.nn.Embedding(ROWS, WIDTH, padding_idx=2, seed=1)
        self.bags = sg.nn.EmbeddingBag(ROWS, WIDTH, mode="mean", seed=2)
        self.head = nn.Linear(WIDTH, 2, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.arange(2.0 * WIDTH).view(2, WIDTH) / 7 - 0.3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.table(ids).sum(1) + self.bags(ids + 1))
        return found


@dataclasses.dataclass
class Job:
    """One worker and the stores of its ps."""

    stores: list[Store]
    clients: list[PsClient]
    groups: VariableGroups
    units: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    pushes: list[GradientPush] = dataclasses.field(default_factory=list)

    def prepare(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """As the strategy does."""
        self.pushes += self.groups.create([model], optimizers, GradientPolicy(), lambda: None)

    def step(self) -> None:
        """As ``optimizer.step()`` of every optimizer."""
        unit = Unit(1, 0, next(self.units))
        for ordinal, push in enumerate(self.pushes):
            push.push(Update((unit,), ordinal), None)

    def num_updates(self) -> set[int]:
        """Of all groups of all ps."""
        return {locked.group.num_updates for store in self.stores for locked in store.state.locked_groups.values()}


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    closing = contextlib.ExitStack()

    def job(
        transport: Transport = "tcp",
        num_ps: int = 2,
        frame_bytes: int = 1 << 20,
        host: str = "127.0.0.1",
        peer_timeout_s: float = 30.0,
    ) -> Job:
        stores, tasks = [], []
        for index in range(num_ps):
            store = Store(f"ps:{index}", frames_timeout_s=5.0)
            server = closing.enter_context(serving(store, host=host))
            stores.append(store)
            tasks.append(Member(f"ps:{index}", server.address, 0, True))
        session: Any = SimpleNamespace(
            task="worker:0",
            incarnation=1,
            security=OPEN,
            membership=Membership(True, tuple(tasks)),
            raise_if_stopped=lambda: None,
            wait_stopped=lambda timeout_s: None,
        )
        config: Any = WorkerConfig.model_construct(
            task="worker:0",
            peer_timeout_s=peer_timeout_s,
            start_timeout_s=30.0,
            frame_bytes=frame_bytes,
            transport=transport,
        )
        clients = [PsClient(session, index, BytesMeter(), config) for index in range(num_ps)]
        for client in clients:
            closing.callback(client.close, "the test is over")
            client.connect()
        runtime: Any = SimpleNamespace(
            clients=clients,
            config=config,
            meter=StepMeter(),
            is_lead=lambda: True,
            gives_values=lambda: True,
            may_assign=lambda: True,
            is_loading=lambda: True,
        )
        return Job(stores, clients, VariableGroups(runtime, None))

    with closing:
        yield job


def build(optimizer: str, strategy: Strategy | None = None) -> tuple[Net, list[torch.optim.Optimizer]]:
    with (strategy or DefaultStrategy()).scope():
        model = Net()
    tables = [*model.table.parameters(), *model.bags.parameters()]
    return model, [OPTIMIZERS[optimizer](tables), torch.optim.SGD(model.head.parameters(), 0.1)]


@pytest.mark.thorough
def test_a_ps_whose_lanes_break_many_times_in_a_row_is_waited_for(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After five times a worker gave up, in prepare and where it asks for rows."""
    job = start()
    num_left = 0

    def breaking(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal num_left
            # A lane that is open here may not be in the books of its ps yet.
            until = time.monotonic() + 0.3
            while not all(store.state.senders.lanes for store in job.stores) and time.monotonic() < until:
                time.sleep(0.001)
            num_left -= 1
            if num_left >= 0:
                for store in job.stores:
                    store.state.close_lanes(PeerUnavailableError("this ps went back to a checkpoint"))
            return function(*arguments)

        return call

    monkeypatch.setattr(RemoteVariables, "has_values", breaking(RemoteVariables.has_values))
    monkeypatch.setattr(row_reads, "rows_in", breaking(rows_in))
    model, optimizers = build("SGD", Remote())
    num_left = 8
    job.prepare(model, *optimizers)
    assert num_left < 0
    num_left = 8
    assert torch.isfinite(model.table(torch.arange(ROWS - 1))).all() and num_left < 0


def backward(model: nn.Module, step: int) -> None:
    ids = torch.randint(0, ROWS - 1, (4, 3), generator=torch.Generator().manual_seed(step))
    model(ids).square().sum().backward()


def update(job: Job | None, optimizer: torch.optim.Optimizer) -> None:
    """On parameter servers, or in this process alone."""
    if job is not None:
        job.step()
        return
    with torch.sparse.check_sparse_tensor_invariants(False):
        optimizer.step()


def train_alone(optimizer: str, num_steps: int, backwards: int = 1) -> Net:
    model, optimizers = build(optimizer)
    for step in range(num_steps):
        for one in optimizers:
            one.zero_grad()
        for part in range(backwards):
            backward(model, 10 * step + part)
        with torch.sparse.check_sparse_tensor_invariants(False):
            for one in optimizers:
                one.step()
    return model


def check_equal(model: Net, expected: Net) -> None:
    for name in ("table", "bags"):
        plain = getattr(model, name).export_form()
        assert type(plain) in (nn.Embedding, nn.EmbeddingBag)
        torch.testing.assert_close(plain.weight, getattr(expected, name).weight, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(model.head.weight, expected.head.weight, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_equals_one_process(start: Callable[..., Job], transport: Transport, optimizer: str) -> None:
    # Frames of five rows: pulls and gradients take several.
    job = start(transport, frame_bytes=64)
    model, optimizers = build(optimizer, Remote())
    job.prepare(model, *optimizers)
    for step in range(5):
        for one in optimizers:
            one.zero_grad()
        for part in range(2):
            backward(model, 10 * step + part)
        job.step()
    check_equal(model, train_alone(optimizer, 5, backwards=2))
    assert job.num_updates() == {5}


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_thread_reads_a_table_while_another_trains(start: Callable[..., Job], transport: Transport) -> None:
    """Each waited for frames that the other had taken from the lane, until the lane was given up."""
    job = start(transport)
    model, optimizers = build("Adagrad", Remote())
    job.prepare(model, *optimizers)
    is_over, failed = threading.Event(), []

    def read() -> None:
        try:
            while not is_over.is_set():
                with torch.no_grad():
                    model.table(torch.arange(ROWS - 1))
        except StratagemError as error:
            failed.append(error)

    readers = [threading.Thread(target=read, daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(10):
        backward(model, 10 * step)
        job.step()
        for one in optimizers:
            one.zero_grad()
    is_over.set()
    for reader in readers:
        reader.join()
    check_equal(model, train_alone("Adagrad", 10))
    assert not failed


def test_a_ps_is_complete_only_with_all_that_is_prepared_together(start: Callable[..., Job]) -> None:
    """A checkpoint is taken as soon as it is: it had the table, and not the rest of the model."""
    job = start()
    seen: list[tuple[bool, int]] = []

    def note(call: Callable[..., Any], state: StoreState) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            found = call(*arguments)
            seen.append((state.complete, len(state.locked_groups)))
            return found

        return noted

    for store in job.stores:
        variables: Any = store.variables
        variables.create_variables = note(variables.create_variables, store.state)
        variables.assign_values = note(variables.assign_values, store.state)
    model, optimizers = build("SGD", Remote())
    model.register_buffer("average", torch.zeros(2))
    job.prepare(model, *optimizers)
    held = [len(store.state.locked_groups) for store in job.stores]
    assert sum(held) > 3 and all(not complete or num in held for complete, num in seen)
    assert sum(complete for complete, _ in seen) == len(job.stores)


def test_over_ipv6_the_sockets_are_ipv6_too(start: Callable[..., Job]) -> None:
    job = start("tcp", host="[::1]")
    assert [type(client.lane) for client in job.clients] == [TcpLane, TcpLane]
    model, optimizers = build("SGD", Remote())
    job.prepare(model, *optimizers)
    backward(model, 0)
    job.step()
    check_equal(model, train_alone("SGD", 1))


def test_no_ps_holds_or_sends_more_than_its_rows(start: Callable[..., Job]) -> None:
    job = start("tcp")
    model, optimizers = build("SGD", Remote())
    job.prepare(model, *optimizers)
    shards = [
        shard for store in job.stores for locked in store.state.locked_groups.values() for shard in locked.spec.shards
    ]
    assert sorted((s.first_row, s.num_rows) for s in shards if s.variable == "table.weight") == [(0, 12), (12, 11)]
    assert sum(s.num_elements for s in shards) == 2 * ROWS * WIDTH + 2 * WIDTH


def test_all_ps_make_the_rows_of_a_table_at_the_same_time(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, meet = start("tcp"), threading.Barrier(2)

    def fill(*args: Any) -> None:
        meet.wait(10.0)  # which nobody but the other ps ends
        fill_rows(*args)

    monkeypatch.setattr(table_group, "fill_rows", fill)
    with Remote().scope():
        table = sg.nn.Embedding(ROWS, WIDTH, seed=1)
    job.prepare(table, torch.optim.SGD(table.parameters(), 0.1))
    assert torch.equal(table.whole_weight(), sg.nn.Embedding(ROWS, WIDTH, seed=1).weight)


def test_the_layers_give_what_torch_gives(start: Callable[..., Job]) -> None:
    job = start("tcp")
    remote, optimizers = build("SGD", Remote())
    job.prepare(remote, *optimizers)
    plain, _ = build("SGD")
    with torch.no_grad():
        for ids in (
            torch.tensor(3),
            torch.tensor([2, 2]),
            torch.tensor([[1], [1]]),
            torch.empty(0, 3, dtype=torch.int64),
        ):
            assert torch.equal(remote.table(ids), plain.table(ids))
        assert torch.equal(remote.table(torch.tensor([4], dtype=torch.int32)), plain.table(torch.tensor([4])))
        flat, offsets = torch.tensor([1, 5, 5, 9]), torch.tensor([0, 0, 3])
        torch.testing.assert_close(remote.bags(flat, offsets), plain.bags(flat, offsets))
        nothing = torch.empty(0, dtype=torch.int64)
        assert torch.equal(remote.bags(nothing, torch.tensor([0, 0])), torch.zeros(2, WIDTH))
    for wrong in (torch.tensor([ROWS]), torch.tensor([-1])):
        with pytest.raises(IndexError, match=f"table table.weight: expected ids from 0 to {ROWS - 1}, got"):
            remote.table(wrong)
    for no_ids, came in ((torch.tensor([1.0]), r"torch\.float32"), ([1, 2], "list")):
        with pytest.raises(ConfigurationError, match=f"int32 or int64, got {came}"):
            remote.table(no_ids)


@pytest.mark.parametrize("optimizer", ["Adagrad", "SparseAdam"])
def test_a_batch_of_empty_bags_is_an_update_of_the_table(start: Callable[..., Job], optimizer: str) -> None:
    """torch's optimizers count it: later rates are others."""

    def train(strategy: Strategy, job: Job | None = None) -> torch.Tensor:
        with strategy.scope():
            layer = sg.nn.EmbeddingBag(ROWS, WIDTH, seed=2)
        lazy = OPTIMIZERS[optimizer](layer.parameters())
        lazy.param_groups[0].update({"lr_decay": 0.5} if optimizer == "Adagrad" else {})
        if job is not None:
            job.prepare(layer, lazy)
        for num_ids in (4, 0, 3):
            lazy.zero_grad()
            layer(torch.arange(num_ids) * 2, torch.zeros(5, dtype=torch.int64)).square().sum().backward()
            update(job, lazy)
        return layer.whole_weight()

    torch.testing.assert_close(train(Remote(), start("tcp")), train(DefaultStrategy()), rtol=2e-6, atol=2e-6)


def test_offsets_of_no_bags_are_refused(start: Callable[..., Job]) -> None:
    """Torch computes with memory beyond its own."""
    with Remote().scope():
        bags = sg.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", include_last_offset=True)
        starts = sg.nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
    start().prepare(nn.ModuleList([bags, starts]))
    ids = torch.tensor([5, 0, 3])
    assert bags(ids, torch.tensor([0, 1, 3])).shape == (2, WIDTH)
    for offsets in ([0], [0, 2], []):
        with pytest.raises(ConfigurationError, match=r"offsets whose last one is the number of ids, 3 \(include_last"):
            bags(ids, torch.tensor(offsets, dtype=torch.int64), torch.ones(3, requires_grad=True))
    for layer, offsets in ((bags, [0, 2, 1, 3]), (starts, [0, 2, 1])):
        with pytest.raises(ConfigurationError, match=r"ascending order, where each bag begins, got \[2, 1\]"):
            layer(ids, torch.tensor(offsets))


@pytest.mark.parametrize("padding_idx", [None, 5])
def test_nested_ids_are_taken_as_by_torch(start: Callable[..., Job], padding_idx: int | None) -> None:
    """Ragged batches: bags of several lengths, one of them empty, and a batch of which all are."""
    ragged = [torch.tensor([1, 5, 5]), torch.empty(0, dtype=torch.int64), torch.tensor([7])]

    def nested(parts: list[torch.Tensor]) -> Any:
        return torch.nested.nested_tensor(parts, layout=torch.jagged)

    def train(strategy: Strategy, job: Job | None = None) -> list[torch.Tensor]:
        with strategy.scope():
            table = sg.nn.Embedding(ROWS, WIDTH, padding_idx, seed=1)
            bags = sg.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", padding_idx=padding_idx, seed=2)
        lazy = OPTIMIZERS["Adagrad"]([table.weight, bags.weight])
        if job is not None:
            job.prepare(nn.ModuleList([table, bags]), lazy)
        seen = []
        for parts in (ragged, ragged[1:2] * 2, ragged[::-1]):
            lazy.zero_grad()
            ids = nested(parts)
            weights = torch.nested.nested_tensor_from_jagged(ids.values() * 0.5, ids.offsets())
            found = [table(ids).values(), bags(ids), bags(ids, None, weights)]
            sum([one.square().sum() for one in found]).backward()
            seen += [one.detach() for one in found]
            update(job, lazy)
        return [*seen, table.whole_weight(), bags.whole_weight()]

    ours, expected = train(Remote(), start("tcp")), train(DefaultStrategy())
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)


def test_an_id_alone_may_be_the_padding(start: Callable[..., Job]) -> None:
    """torch has no sparse gradient of it: backward failed."""
    with Remote().scope():
        table = sg.nn.Embedding(ROWS, WIDTH, padding_idx=5, init=sg.nn.Constant(1.0), seed=1)
    job = start()
    job.prepare(table, OPTIMIZERS["SGD"](table.parameters()))
    found = [table(torch.tensor(number)) for number in (5, 3)]
    assert [one.shape for one in found] == [(WIDTH,)] * 2
    sum([one.sum() for one in found]).backward()
    job.step()
    rows = table.whole_weight()
    assert not rows[5].any() and rows[3].tolist() == pytest.approx([0.9] * WIDTH)


@pytest.mark.parametrize("optimizer", ["Adagrad with decay", "SparseAdam"])
def test_updates_by_a_gradient_that_was_set_to_zero_count(start: Callable[..., Job], optimizer: str) -> None:
    """They change no row, but the rate of those that follow."""

    def train(strategy: Strategy, job: Job | None = None) -> torch.Tensor:
        with strategy.scope():
            table = sg.nn.Embedding(ROWS, WIDTH, seed=1)
        decaying = torch.optim.Adagrad(table.parameters(), 0.1, lr_decay=0.5)
        lazy = OPTIMIZERS[optimizer](table.parameters()) if optimizer in OPTIMIZERS else decaying
        if job is not None:
            job.prepare(table, lazy)
        for is_used in (False, True, False, False, True):
            lazy.zero_grad(set_to_none=False)
            if is_used:
                table(torch.tensor([1, 4, 4])).square().sum().backward()
            update(job, lazy)
        return table.whole_weight()

    ours, expected = train(Remote(), start()), train(DefaultStrategy())
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("optimizer", ["Adagrad", "SparseAdam"])
def test_state_restored_before_prepare_goes_to_the_ps_with_the_rows(start: Callable[..., Job], optimizer: str) -> None:
    rows = torch.arange(1.0, ROWS * WIDTH + 1).view(ROWS, WIDTH)

    class Saved(SavedRows):
        """As a checkpoint of parameter servers has them."""

        def __init__(self, values: torch.Tensor) -> None:
            self.shape, self.dtype, self._values = values.shape, values.dtype, values

        def __getitem__(self, part: slice) -> torch.Tensor:
            return self._values[part]

    def step(table: Any) -> None:
        table(torch.tensor([1, 4, 22])).square().sum().backward()

    plain = sg.nn.Embedding(ROWS, WIDTH, _weight=rows.clone())
    expected = OPTIMIZERS[optimizer](plain.parameters())
    with torch.sparse.check_sparse_tensor_invariants(False):
        for number in range(3):
            expected.zero_grad()
            step(plain)
            expected.step()
            if not number:
                weight, state = plain.weight.detach().clone(), copy.deepcopy(expected.state_dict())

    def resumed(kind: Callable[[torch.Tensor], Any]) -> tuple[Any, torch.optim.Optimizer]:
        with Remote().scope():
            table = sg.nn.Embedding(ROWS, WIDTH)
        table.load_state_dict({"weight": weight})
        lazy = OPTIMIZERS[optimizer](table.parameters())
        slots = {name: value if name == "step" else kind(value) for name, value in state["state"][0].items()}
        lazy.load_state_dict({**state, "state": {0: slots}})
        return table, lazy

    job = start()
    with pytest.raises(ConfigurationError, match=r"has of table \S*weight was loaded before.*Load it after prepare"):
        job.prepare(*resumed(torch.Tensor.clone))
    table, lazy = resumed(Saved)
    job.prepare(table, lazy)
    for _ in range(2):
        lazy.zero_grad()
        step(table)
        job.step()
    torch.testing.assert_close(table.whole_weight(), plain.weight.detach(), rtol=2e-6, atol=2e-6)


def test_zero_grad_eval_and_frozen_tables_send_nothing(start: Callable[..., Job]) -> None:
    job = start("tcp")
    model, optimizers = build("SGD", Remote())
    job.prepare(model, *optimizers)
    before = model.table.whole_weight().clone()
    backward(model, 1)
    for one in optimizers:
        one.zero_grad()
    job.step()
    with torch.no_grad():
        assert not model(torch.tensor([[1, 2, 3]])).requires_grad
    model.table.requires_grad_(False)
    backward(model, 1)
    job.step()
    assert torch.equal(model.table.whole_weight(), before)
    model.table.requires_grad_(True)
    found = model.table(torch.tensor([1, 3])).sum()
    model.table.requires_grad_(False)  # which torch heeds at the end of backward
    found.backward()
    job.step()
    assert torch.equal(model.table.whole_weight(), before)
    assert not torch.equal(model.bags.whole_weight(), build("SGD")[0].bags.weight)


@pytest.mark.parametrize(
    "make", [torch.optim.Adam, lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)], ids=["Adam", "SGD"]
)
def test_a_frozen_table_may_be_among_the_parameters_of_any_optimizer(
    start: Callable[..., Job], make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    def frozen(strategy: Strategy) -> tuple[Net, torch.optim.Optimizer]:
        model, _ = build("SGD", strategy)
        model.table.requires_grad_(False)
        model.bags.requires_grad_(False)
        return model, make(model.parameters())

    job = start("tcp")
    (plain, optimizer), (model, remote) = frozen(DefaultStrategy()), frozen(Remote())
    job.prepare(model, remote)
    for step in range(3):
        backward(plain, step)
        backward(model, step)
        optimizer.step()
        job.step()
    torch.testing.assert_close(model.head.weight, plain.head.weight)
    exported = model.table.export_form()
    assert torch.equal(exported.weight, plain.table.weight) and not exported.weight.requires_grad
    model.table.requires_grad_(True)
    with pytest.raises(UnsupportedOptimizerError, match="every row"):
        backward(model, 4)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_lane_that_breaks_is_opened_again(start: Callable[..., Job], transport: Transport) -> None:
    job = start(transport)
    model, optimizers = build("SparseAdam", Remote())
    job.prepare(model, *optimizers)
    broken = 0
    for step in range(6):
        for one in optimizers:
            one.zero_grad()
        if step % 3 == 0:  # rows are asked for
            job.stores[1].state.close_lanes(PeerUnavailableError("a fault of the test"))
            broken += 1
        backward(model, 10 * step)
        if step % 3 == 1:  # the gradient leaves
            job.stores[0].state.close_lanes(PeerUnavailableError("a fault of the test"))
            if transport == "grpc":  # which hears of it in a thread of its own; the others when they send
                until(lambda: not job.clients[0].is_connected)
            broken += 1
        job.step()
    assert broken == 4 and job.num_updates() == {6}
    check_equal(model, train_alone("SparseAdam", 6))


def test_a_ps_that_came_back_at_its_address_is_greeted_first(start: Callable[..., Job]) -> None:
    # The control channel is whole again by itself, as after a restart at the same address; the lane is not.
    job = start("tcp", 1)
    (client,), (store,) = job.clients, job.stores
    until(lambda: bool(store.state.senders.lanes))  # the ps accepts in a thread of its own
    store.state.close_lanes(JobStoppedError("this life is over", 1))
    until(lambda: not store.state.senders.lanes)
    store.state.senders.forget_windows()
    model, optimizers = build("SparseAdam", Remote())
    with pytest.raises(StaleStoreError, match="send Hello first"):
        client.call("PullWeights", ps_pb2.PullWeightsRequest())
    job.prepare(model, *optimizers)
    client.call("PullWeights", ps_pb2.PullWeightsRequest())


def test_a_ps_that_restarts_gets_everything_back_whoever_meets_it_first(
    start: Callable[..., Job], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = start("grpc")
    store = job.stores[0]
    torch.manual_seed(1)
    models = [nn.Linear(5, 4) for _ in range(3)]
    for model in models[:2]:
        job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    save_all([store], tmp_path)
    job.prepare(models[2], torch.optim.SGD(models[2].parameters(), 0.1))
    table, optimizers = build("SGD", Remote())
    job.prepare(table, *optimizers)
    held = {locked.spec.group for locked in store.state.locked_groups.values()}
    before = models[2].weight.detach().clone()

    store.state.close_lanes(PeerUnavailableError("it restarts"))
    until(lambda: not job.clients[0].is_connected and not store.state.senders.lanes)
    store.checkpoints.restore_shards(str(tmp_path))
    assert held - store.state.locked_groups.keys(), "the checkpoint is older than some variables"
    for model in models:
        model(torch.ones(2, 5)).sum().backward()
    job.step()
    backward(table, 1)
    job.step()
    assert store.state.locked_groups.keys() == held
    gradient = models[2].weight.grad
    assert gradient is not None
    torch.testing.assert_close(models[2].weight, before - 0.2 * gradient)
    store.checkpoints.restore_shards(str(tmp_path))  # as at staleness 0, where all ps go back together
    job.groups.roll_back()
    job.step()
    assert store.state.locked_groups.keys() == held
    assert "ps:0 restarted without " in caplog.text and "its checkpoint is too old to have" in caplog.text
    store.checkpoints.restore_shards(str(tmp_path))
    job.groups._runtime.meter.in_step = True  # where what the third model was trained on comes again
    with pytest.raises(VariableError, match="ps:0 went back to a checkpoint without variables that were trained since"):
        job.groups.roll_back()


def test_a_ps_that_goes_when_the_lead_was_waited_for_longer_than_for_a_ps(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(peer_timeout_s=1.0)
    until = time.monotonic() + 1.2
    monkeypatch.setattr(job.groups._runtime, "gives_values", lambda: time.monotonic() > until)
    has_values, gone = RemoteVariables.has_values, [PeerUnavailableError("ps:0 cannot be reached")]

    def breaking(self: RemoteVariables, client: PsClient) -> bool:
        if time.monotonic() > until and gone:
            raise gone.pop()
        return has_values(self, client)

    monkeypatch.setattr(RemoteVariables, "has_values", breaking)
    model = nn.Linear(3, 2, bias=False)
    job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert not gone


def test_a_ps_that_refuses_is_not_asked_for_ever(start: Callable[..., Job]) -> None:
    job = start("tcp", peer_timeout_s=1.0)
    model, optimizers = build("SGD", Remote())
    job.prepare(model, *optimizers)
    for locked in job.stores[0].state.locked_groups.values():
        locked.group.initialized = False
    with pytest.raises(PeerUnavailableError):
        model.table(torch.tensor([1]))


def test_a_gradient_that_is_not_finite_is_named(start: Callable[..., Job]) -> None:
    job = start("tcp")
    model, optimizers = build("SGD", Remote())
    job.prepare(model, *optimizers)
    (model.bags(torch.tensor([[1, 2]])).sum() * torch.nan).backward()
    with pytest.raises(NonFiniteGradientError, match=r"bags\.weight"):
        job.step()
    assert job.num_updates() == {0}


def test_a_ps_that_takes_part_in_no_update_hears_of_closed_units_in_time(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_push, "MAX_WAITING", 4)
    job = start()
    model = nn.Linear(3, 2, bias=False)
    job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    [push] = job.pushes
    for index in range(10):
        model(torch.ones(1, 3)).sum().backward()
        push.push(Update((Unit(1, 0, index),), 0), None)
        job.groups.closes.add([Unit(1, 0, index)])
    assert sorted(len(store.state.locked_groups) for store in job.stores) == [0, 1]
    assert all(len(store.state.units.describe().closed[1, 0]) >= 8 for store in job.stores)


def test_large_tables_come_and_go_in_parts(start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_table, "MAX_BYTES", 5 * 4 * WIDTH)
    job = start("tcp", frame_bytes=30)
    model, optimizers = build("SGD", Remote())
    job.prepare(model, *optimizers)
    state = model.state_dict()
    state["table.weight"] = torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH)
    state["bags.weight"] = torch.ones(ROWS, WIDTH)
    model.load_state_dict(state)
    assert torch.equal(model.table.whole_weight(), state["table.weight"])
    assert torch.equal(model.bags.whole_weight(), state["bags.weight"])


class LargestCopy(TorchDispatchMode):
    """Notes the elements of the largest copy that this thread makes."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            self.num_elements = max(self.num_elements, out.numel())
        return out


def mapped(path: pathlib.Path) -> torch.Tensor:
    """Rows of a table in a file that is mapped."""
    rows = np.memmap(path, np.float16, "w+", shape=(ROWS, WIDTH))
    rows[:] = np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) / 8
    rows.flush()
    return torch.from_numpy(np.memmap(path, np.float16, "c", shape=(ROWS, WIDTH)))


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "from_pretrained": lambda rows: sg.nn.Embedding.from_pretrained(rows, freeze=False),
    "weight": lambda rows: sg.nn.EmbeddingBag(ROWS, WIDTH, _weight=rows, dtype=torch.float32),
    "state": lambda rows: loaded(sg.nn.Embedding(ROWS, WIDTH), rows),
}


def loaded(layer: nn.Module, rows: torch.Tensor) -> nn.Module:
    layer.load_state_dict({"weight": rows})
    return layer


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_are_given_go_in_parts_to_a_table_that_is_new(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, way: str
) -> None:
    monkeypatch.setattr(remote_table, "MAX_BYTES", 4 * 4 * WIDTH)
    job = start("tcp", frame_bytes=30)
    rows = mapped(tmp_path / "rows")

    def prepared(groups: VariableGroups) -> Any:
        with Remote().scope():
            model = WAYS[way](rows)
        with LargestCopy() as largest:  # type: ignore[no-untyped-call]
            groups.create([model], [torch.optim.SGD(model.parameters(), 0.1)], GradientPolicy(), lambda: None)
        return model, largest.num_elements

    model, largest = prepared(job.groups)
    assert torch.equal(model.whole_weight().float(), rows.float())
    assert largest == (0 if way == "from_pretrained" else 4 * WIDTH)  # which keeps the dtype: there is nothing to copy

    values = job.stores[0].state.locked_groups[0].group.weights  # as if it was trained
    values[0] = 99.0
    save_all(job.stores, tmp_path)
    again, largest = prepared(VariableGroups(job.groups._runtime, None))
    assert again.whole_weight()[0, 0] == 99.0 and largest == 0
    for store in job.stores:
        store.checkpoints.restore_shards(str(tmp_path))
    job.groups.reconnect()
    resumed, largest = prepared(VariableGroups(job.groups._runtime, None))
    assert resumed.whole_weight()[0, 0] == 99.0 and largest == 0
    rest = rows.float()
    rest[0, 0] = 99.0
    assert torch.equal(resumed.whole_weight().float(), rest)

    store = job.stores[0]  # one that lost everything gets the rows that were given
    store.state.close_lanes(PeerUnavailableError("it restarts"))
    until(lambda: not store.state.senders.lanes)
    store.state.senders.forget_windows()
    store.state.locked_groups.clear()
    store.state.store_epoch += 1
    assert torch.equal(model(torch.tensor([[0]])).flatten().float(), rows[0].float())


def test_the_state_of_the_optimizer_stays_on_the_ps_and_can_be_loaded(start: Callable[..., Job]) -> None:
    plain, (lazy, dense) = build("SparseAdam")
    for step in range(3):
        for one in (lazy, dense):
            one.zero_grad()
        backward(plain, 10 * step)
        with torch.sparse.check_sparse_tensor_invariants(False):
            lazy.step()
        dense.step()
    job = start("tcp")
    model, optimizers = build("SparseAdam", Remote())
    job.prepare(model, *optimizers)
    with pytest.raises(ConfigurationError, match=r"table\.weight.*sg\.Checkpoint"):
        optimizers[0].state_dict()
    model.load_state_dict(plain.state_dict())
    job.groups.push()
    state = copy.deepcopy(lazy.state_dict())
    optimizers[0].load_state_dict(state)
    assert state["state"].keys() == {0, 1} and not optimizers[0].state
    for one in (lazy, dense, *optimizers):
        one.zero_grad()
    backward(plain, 99)
    with torch.sparse.check_sparse_tensor_invariants(False):
        lazy.step()
    dense.step()
    backward(model, 99)
    job.step()
    check_equal(model, plain)
    tables = [one for store in job.stores for one in store.state.locked_groups.values() if one.spec.is_table]
    assert {one.group.counts[0] for one in tables} == {4}
    optimizers[0].load_state_dict({**state, "state": {}})
    assert {one.group.counts[0] for one in tables} == {0}
    assert not any(slot.any() for one in tables for slot in one.group.slots.values())


def test_what_an_optimizer_has_before_it_is_prepared_goes_with_the_weights(start: Callable[..., Job]) -> None:
    """A training that goes on began without momentum, without a word."""

    def trained(num_steps: int) -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        for step in range(num_steps):
            optimizer.zero_grad()
            model(torch.full((1, 3), 1.0 + step)).sum().backward()
            optimizer.step()
        return model, optimizer

    job = start()
    model, optimizer = trained(3)
    job.prepare(model, optimizer)
    assert not optimizer.state
    optimizer.zero_grad()
    model(torch.full((1, 3), 4.0)).sum().backward()
    job.step()
    expected, _ = trained(4)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=2e-6, atol=2e-6)


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, dampening=0.5),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, 0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, 0.1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_begins_anew(start: Callable[..., Job], kind: str) -> None:
    """It went on as it was, without a word."""
    job, (first, second) = start(), (nn.Linear(3, 2), nn.Linear(3, 2))
    second.load_state_dict(first.state_dict())
    own, plain = KINDS[kind](first.parameters()), KINDS[kind](second.parameters())
    job.prepare(first, own)
    for step in range(5):
        if step == 3:
            for optimizer in (own, plain):
                optimizer.load_state_dict(KINDS[kind](first.parameters()).state_dict())
        for model, optimizer in ((first, own), (second, plain)):
            optimizer.zero_grad()
            model(torch.tensor([[1.0, -step, 2.0]])).square().sum().backward()
        job.step()
        plain.step()
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=2e-6, atol=2e-6)
    with pytest.raises(ConfigurationError, match="state of a prepared optimizer is on the parameter servers"):
        own.state.clear()
    own.state_dict()
    own.step()
    own.state = collections.defaultdict(dict)
    with pytest.raises(ConfigurationError, match="state of a prepared optimizer is on the parameter servers"):
        own.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_of_tables_that_begins_anew(start: Callable[..., Job], optimizer: str) -> None:
    """As a checkpoint has it that was taken before the first update. Adagrad went on as it was, without a word."""
    job, (model, own), (expected, plain) = start(), build(optimizer, Remote()), build(optimizer)
    job.prepare(model, *own)
    for step in range(4):
        if step == 2:
            for one in (own[0], plain[0]):
                one.load_state_dict({**plain[0].state_dict(), "state": {}})
        for one in (*own, *plain):
            one.zero_grad()
        backward(model, step)
        backward(expected, step)
        job.step()
        with torch.sparse.check_sparse_tensor_invariants(False):
            for one in plain:
                one.step()
    check_equal(model, expected)


def test_parts_of_gradients_that_are_clipped_are_warned_of(
    start: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    """At staleness 0 clipping each worker's part gives other weights than one process, and nothing said so."""
    for is_part, changes in ((False, True), (True, False), (True, True)):
        job, model = start(), nn.Linear(3, 2)
        job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        [push] = job.pushes
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()  # adds to what is there
        if changes:
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
        push.staging.complete(push._servers, (), is_part)
        assert ("clipping the parts does not clip the whole" in caplog.text) == (is_part and changes)


def test_an_integer_parameter_is_kept_like_a_buffer(start: Callable[..., Job]) -> None:
    job = start()
    model = nn.Linear(3, 2)
    model.codes = nn.Parameter(torch.arange(4), requires_grad=False)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    job.prepare(model, optimizer)
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    job.step()
    specs = [locked.spec for store in job.stores for locked in store.state.locked_groups.values() if locked.spec.shards]
    assert {(spec.optimizer, spec.dtype) for spec in specs} == {("Adam", torch.float32), ("", torch.int64)}
    assert model.codes.tolist() == [0, 1, 2, 3]


def test_what_tables_cannot_do_is_refused_at_prepare(start: Callable[..., Job]) -> None:
    job = start("tcp")
    with Remote().scope():
        model = sg.nn.Embedding(ROWS, WIDTH)
    for optimizer, match in (
        (torch.optim.Adam(model.parameters(), 0.1), "cannot be changed by Adam"),
        (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), "momentum=0"),
        (torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1), "weight_decay=0"),
        (torch.optim.Adagrad(model.parameters(), 0.1, weight_decay=0.1), "weight_decay=0"),
    ):
        with pytest.raises(UnsupportedOptimizerError, match=match):
            job.prepare(model, optimizer)
    assert isinstance(model, RemoteRows) and model.remote_table._link is None
    linear = nn.Linear(2, 2)
    with pytest.raises(UnsupportedOptimizerError, match=r"SparseAdam: it works on rows of sg\.nn\.Embedding"):
        job.prepare(linear, torch.optim.SparseAdam(linear.parameters(), 0.1))


def test_a_sparse_gradient_of_a_dense_variable_is_refused_with_the_way_out(start: Callable[..., Job]) -> None:
    """It was torch's "Cannot access data pointer of Tensor that doesn't have storage"."""
    model = nn.Linear(2, 5, bias=False)
    start("tcp").prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ConfigurationError, match=r"leave sparse=True out of functional\.embedding"):
        nn.functional.embedding(torch.tensor([1, 1]), model.weight, sparse=True).sum().backward()


def test_a_table_that_is_prepared_again_in_another_model_keeps_its_rows(start: Callable[..., Job]) -> None:
    """It began anew, and what its optimizer sent went to rows that nobody read."""
    job = start("tcp")
    with Remote().scope():
        table = sg.nn.Embedding(ROWS, WIDTH, init=sg.nn.Constant(1.0))
    job.prepare(table, torch.optim.SGD(table.parameters(), 0.25))
    for again in (nn.Sequential(table, nn.Linear(WIDTH, 1)), table):
        table(torch.tensor([1])).sum().backward()
        job.step()
        job.pushes[0].optimizer.zero_grad()
        before = table.whole_weight()
        job.prepare(again)
        assert torch.equal(table.whole_weight(), before)
    assert table.whole_weight()[1:3].tolist() == [[0.5] * WIDTH, [1.0] * WIDTH]
    with pytest.raises(ConfigurationError, match=r"table weight is already prepared.* to a single strategy\.prepare"):
        job.prepare(table, torch.optim.SGD(table.parameters(), 0.1))


def test_param_groups_are_each_their_own_and_the_first_accumulator_the_constructors(start: Callable[..., Job]) -> None:
    def trained(strategy: Strategy, job: Job | None = None) -> list[torch.Tensor]:
        with strategy.scope():
            table, head = sg.nn.Embedding(ROWS, WIDTH, seed=1), nn.Linear(WIDTH, 1, bias=False)
            nn.init.constant_(head.weight, 0.5)
        model = nn.Sequential(table, head)
        groups = [
            {"params": [table.weight], "initial_accumulator_value": 7.0},
            {"params": [head.weight], "weight_decay": 0.1, "initial_accumulator_value": 7.0},
        ]
        optimizer = torch.optim.Adagrad(groups, 0.1, initial_accumulator_value=0.5)
        if job is not None:
            job.prepare(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([1, 4])).square().sum().backward()
            update(job, optimizer)
        return [table.whole_weight(), head.weight.detach()]

    for found, expected in zip(trained(Remote(), start("tcp")), trained(DefaultStrategy()), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


def test_another_shape_of_the_same_table_is_refused(start: Callable[..., Job]) -> None:
    job = start("tcp", num_ps=1)
    with Remote().scope():
        first, second = sg.nn.Embedding(ROWS, WIDTH), sg.nn.Embedding(ROWS + 1, WIDTH)
    job.prepare(first, torch.optim.SGD(first.parameters(), 0.1))
    again = VariableGroups(job.groups._runtime, None)
    with pytest.raises(VariableError, match="shape"):
        again.create([second], [torch.optim.SGD(second.parameters(), 0.1)], GradientPolicy(), lambda: None)


def test_at_the_end_of_an_epoch_a_ps_that_was_lost_is_waited_for_and_told(start: Callable[..., Job]) -> None:
    job = start()
    reports = CloseReports(job.clients, job.groups.recover)
    reports.add([Unit(1, 0, 2)])
    job.clients[1].close("the connection broke")
    with pytest.raises(PeerUnavailableError):
        reports.flush(1)
    reports.deliver()
    for store in job.stores:
        assert store.state.units.to_json()["closed"] == [[1, 0, "04"]]
