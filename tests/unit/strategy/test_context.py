"""What a step can ask and do in its replica: values of all replicas, a function that runs once, where it is."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.data.values import PerReplica
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.strategy.default import DefaultStrategy, get_strategy
from stratagem.strategy.replicas.context import ReplicaContext, get_replica_context, in_cross_replica_context
from stratagem.strategy.replicas.cross_device_ops import HierarchicalCopyAllReduce
from stratagem.strategy.replicas.replica_threads import ReplicaThreads, current_replica
from stratagem.strategy.scope import Scope, strategy_in_scope
from stratagem.worker.ring.communicator import Communicator
from tests.unit.ring.thread_group import run_ranks

Pair = namedtuple("Pair", ["first", "second"])


class Several(DefaultStrategy):
    """A strategy of CPU replicas; with ``num_local=0`` one replica in the calling thread."""

    def __init__(self, num_local: int, workers: Communicator | None = None) -> None:
        self.communicator = workers
        self.num_workers = 1 if workers is None else workers.size
        self.devices = (torch.device("cpu"),) * max(1, num_local)
        self.replica_threads = ReplicaThreads(self.devices, self.first_replica_id) if num_local else None

    @property
    def local_devices(self) -> tuple[torch.device, ...]:
        return self.devices

    @property
    def num_replicas_in_sync(self) -> int:
        return self.num_workers * (self.replica_threads.size if self.replica_threads else 1)

    def each(self, fn: Callable[[ReplicaContext], Any]) -> list[Any]:
        """Calls ``fn`` in the context of each local replica."""

        def work(context: ReplicaContext) -> Any:
            return context.call(lambda: fn(context))

        if self.replica_threads is None:
            return [work(ReplicaContext(self))]
        ops = HierarchicalCopyAllReduce()
        contexts = [
            ReplicaContext(self, self.replica_threads, replica, ops) for replica in range(self.replica_threads.size)
        ]
        return self.replica_threads.run([functools.partial(work, context) for context in contexts])


@contextlib.contextmanager
def strategy_of(num_local: int, workers: Communicator | None = None) -> Iterator[Several]:
    strategy = Several(num_local, workers)
    try:
        yield strategy
    finally:
        if strategy.replica_threads is not None:
            strategy.replica_threads.close()


@pytest.fixture(params=[1, 2, 3])
def strategy(request: pytest.FixtureRequest) -> Iterator[Several]:
    with strategy_of(request.param) as made:
        yield made


@pytest.fixture
def two() -> Iterator[Several]:
    with strategy_of(2) as made:
        yield made


def on_layout(num_workers: int, num_local: int, fn: Callable[[ReplicaContext], Any]) -> list[Any]:
    """What ``fn`` returns on every replica, worker by worker."""

    def work(worker: Communicator) -> list[Any]:
        with strategy_of(num_local, worker) as made:
            return made.each(fn)

    if num_workers == 1:
        with strategy_of(num_local) as made:
            return made.each(fn)
    return [result for results in run_ranks(num_workers, work) for result in results]


LAYOUTS = [(1, 1), (1, 2), (1, 3), (2, 2), (2, 0), (3, 1)]
layouts = pytest.mark.parametrize(("num_workers", "num_local"), LAYOUTS)


# -- where code is --------------------------------------------------------------------------------------------------


def test_outside_of_any_scope_there_is_one_replica() -> None:
    context = get_replica_context()
    assert context is not None and not in_cross_replica_context()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    assert context.strategy is get_strategy()
    assert context.all_reduce(ReduceOp.SUM, {"loss": 2.5})["loss"].item() == 2.5
    assert context.all_gather(torch.arange(3), 0).tolist() == [0, 1, 2]

    def merged(strategy: Strategy, value: PerReplica[int]) -> PerReplica[int]:
        assert strategy is get_strategy() and get_replica_context() is None
        return PerReplica((value.values[0] + 1,))

    assert context.merge_call(merged, (4,)) == 5
    assert get_replica_context() is not None


def test_in_a_scope_code_is_for_all_replicas() -> None:
    with DefaultStrategy().scope():
        assert get_replica_context() is None
        assert in_cross_replica_context()
    assert not in_cross_replica_context()


def test_a_step_knows_its_replica(strategy: Several) -> None:
    def step(expected: ReplicaContext) -> tuple[int, int]:
        context = get_replica_context()
        assert context is expected and not in_cross_replica_context()
        assert get_strategy() is context.strategy is strategy
        return context.replica_id_in_sync_group, context.num_replicas_in_sync

    size = strategy.num_replicas_in_sync
    assert strategy.each(step) == [(replica, size) for replica in range(size)]
    with strategy.scope():
        assert strategy.each(step) == [(replica, size) for replica in range(size)]
        assert get_replica_context() is None
    assert get_strategy() is not strategy


@layouts
def test_replicas_are_numbered_worker_by_worker(num_workers: int, num_local: int) -> None:
    size = num_workers * max(num_local, 1)
    found = on_layout(num_workers, num_local, lambda c: (c.replica_id_in_sync_group, c.num_replicas_in_sync))
    assert found == [(replica, size) for replica in range(size)]


def test_an_interrupt_at_any_line_leaves_the_context_of_the_step() -> None:
    """Where it came beside the ``with`` block, every later step was refused as one inside of this one."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in (inspect.getfile(ReplicaContext), inspect.getfile(Scope)):
            return None
        if event == "line" and next(left, None) is None:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    strategy, before = Several(0), sys.gettrace()
    for number in itertools.count():
        left = iter(range(number))
        sys.settrace(trace)
        try:
            strategy.each(lambda replica: replica.merge_call(lambda _: None))
        except KeyboardInterrupt:
            assert not in_cross_replica_context()
            assert strategy_in_scope() is None
            assert strategy.each(lambda replica: replica.num_replicas_in_sync) == [1]
        else:
            break
        finally:
            sys.settrace(before)
    assert number > 20


def test_a_step_inside_another_strategys_scope_is_refused(two: Several) -> None:
    with (
        DefaultStrategy().scope(),
        pytest.raises(ConfigurationError, match="of Several inside the scope of DefaultS"),
    ):
        two.each(lambda context: None)


# -- all_reduce -----------------------------------------------------------------------------------------------------


@layouts
def test_all_reduce_of_nested_values(num_workers: int, num_local: int) -> None:
    size = num_workers * max(num_local, 1)

    def step(context: ReplicaContext) -> Any:
        mine = context.replica_id_in_sync_group + 1.0
        value = {
            "loss": torch.full((2,), mine),
            "both": [mine, (torch.tensor(mine).double(),)],
            "pair": Pair(mine, 1.0),
        }
        return [context.all_reduce(op, value) for op in ReduceOp]

    everyone = torch.arange(1.0, size + 1)
    expected = {
        ReduceOp.SUM: (everyone.sum(), float(size)),
        ReduceOp.MEAN: (everyone.mean(), 1.0),
        ReduceOp.MIN: (everyone.min(), 1.0),
        ReduceOp.MAX: (everyone.max(), 1.0),
        ReduceOp.PRODUCT: (everyone.prod(), 1.0),
    }
    for results in on_layout(num_workers, num_local, step):
        for op, result in zip(ReduceOp, results, strict=True):
            total, ones = expected[op]
            assert result["loss"].tolist() == [total.item()] * 2
            assert result["both"][0].item() == total.item()
            assert isinstance(result["both"][1], tuple) and result["both"][1][0].dtype is torch.float64
            assert result["both"][1][0].item() == total.item()
            assert isinstance(result["pair"], Pair) and result["pair"].second.item() == ones


def test_results_of_replicas_share_no_memory(two: Several) -> None:
    def step(context: ReplicaContext) -> list[float]:
        total = context.all_reduce(ReduceOp.SUM, torch.ones(2))
        total += context.replica_id_in_sync_group
        whole = context.all_gather(torch.ones(1), 0)
        whole *= 10 + context.replica_id_in_sync_group
        context.merge_call(lambda strategy: None)
        return [*total.tolist(), *whole.tolist()]

    assert two.each(step) == [[2.0, 2.0, 10.0, 10.0], [3.0, 3.0, 11.0, 11.0]]


@layouts
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_gradients_pass_through_all_reduce(num_workers: int, num_local: int, op: ReduceOp) -> None:
    """Against one graph over all replicas, whose losses differ and are added up."""
    size = num_workers * max(num_local, 1)

    def loss_of(replica: int, total: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return ((replica + 1) * total**2).sum() * counts

    def step(context: ReplicaContext) -> list[float]:
        replica = context.replica_id_in_sync_group
        x = torch.tensor([1.0 + replica, 2.0], requires_grad=True)
        total, counts = context.all_reduce(op, (x, torch.tensor(1.0)))
        loss_of(replica, total, counts).backward()
        assert x.grad is not None
        return x.grad.tolist()

    xs = [torch.tensor([1.0 + replica, 2.0], requires_grad=True) for replica in range(size)]
    total = torch.stack(xs).sum(0) if op is ReduceOp.SUM else torch.stack(xs).mean(0)
    counts = torch.tensor(float(size) if op is ReduceOp.SUM else 1.0)
    torch.stack([loss_of(replica, total, counts) for replica in range(size)]).sum().backward()
    for found, x in zip(on_layout(num_workers, num_local, step), xs, strict=True):
        assert x.grad is not None
        assert found == pytest.approx(x.grad.tolist(), rel=1e-6)


def test_a_maximum_carries_no_gradient(two: Several) -> None:
    def step(context: ReplicaContext) -> bool:
        largest: torch.Tensor = context.all_reduce(ReduceOp.MAX, torch.ones(1, requires_grad=True))
        whole, count = context.all_reduce(ReduceOp.SUM, (torch.ones(1, requires_grad=True), 3))
        return not largest.requires_grad and whole.requires_grad and not count.requires_grad

    assert two.each(step) == [True, True]


def test_what_cannot_be_reduced_is_refused(two: Several) -> None:
    with pytest.raises(ConfigurationError, match=r"replica 0 has \[1\] float32 and replica 1 has \[2\] float32"):
        two.each(lambda c: c.all_reduce(ReduceOp.SUM, torch.ones(c.replica_id_in_sync_group + 1)))
    assert [value.item() for value in two.each(lambda c: c.all_reduce(ReduceOp.SUM, 3))] == [6, 6]


@layouts
def test_the_sum_of_booleans_is_their_number(num_workers: int, num_local: int) -> None:
    results = on_layout(num_workers, num_local, lambda context: context.all_reduce(ReduceOp.SUM, torch.tensor(True)))
    assert [result.item() for result in results] == [num_workers * max(num_local, 1)] * len(results)
    assert all(result.dtype is torch.int64 for result in results)


@layouts
def test_the_mean_of_integers_is_of_the_default_dtype(num_workers: int, num_local: int) -> None:
    """It was as it came with one replica, and refused with several."""
    results = on_layout(num_workers, num_local, lambda c: c.all_reduce("MEAN", c.replica_id_in_sync_group))
    mean = (num_workers * max(num_local, 1) - 1) / 2
    assert [(result.item(), result.dtype) for result in results] == [(mean, torch.float32)] * len(results)


# -- all_gather -----------------------------------------------------------------------------------------------------


@layouts
def test_all_gather_of_uneven_lengths(num_workers: int, num_local: int) -> None:
    size = num_workers * max(num_local, 1)

    def rows(replica: int) -> torch.Tensor:
        return torch.arange(6.0 * replica).reshape(2, 3 * replica)

    def step(context: ReplicaContext) -> Any:
        mine = rows(context.replica_id_in_sync_group)
        across = context.all_gather({"a": mine, "b": [mine[0]]}, -1)
        return across["a"], across["b"][0], context.all_gather(mine.T, 0)

    expected = torch.cat([rows(replica) for replica in range(size)], 1)
    for columns, flat, down in on_layout(num_workers, num_local, step):
        assert torch.equal(columns, expected)
        assert torch.equal(flat, expected[0])
        assert torch.equal(down, expected.T)


@layouts
def test_gradients_pass_through_all_gather(num_workers: int, num_local: int) -> None:
    size = num_workers * max(num_local, 1)

    def step(context: ReplicaContext) -> list[float]:
        replica = context.replica_id_in_sync_group
        x = torch.ones(replica + 1, requires_grad=True)
        whole = context.all_gather(x, 0)
        ((replica + 1) * whole * torch.arange(1.0, len(whole) + 1)).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    found = on_layout(num_workers, num_local, step)
    weight = sum(range(1, size + 1))  # every replica's loss depends on every element
    places = iter(range(1, weight + 1))
    assert found == [[float(weight * next(places)) for _ in range(replica + 1)] for replica in range(size)]


def test_what_cannot_be_gathered_is_refused(two: Several) -> None:
    with pytest.raises(ConfigurationError, match="axis 0 expects tensors with that axis"):
        two.each(lambda c: c.all_gather(3.0, 0))
    with pytest.raises(ConfigurationError, match=r"replica 0 has \[2, 1\] torch.float32 and replica 1 has \[2, 2\]"):
        two.each(lambda c: c.all_gather(torch.ones(2, c.replica_id_in_sync_group + 1), 0))


# -- merge_call -----------------------------------------------------------------------------------------------------


def test_merge_call_runs_once_for_all_replicas(strategy: Several) -> None:
    calls: list[Any] = []
    size = strategy.num_replicas_in_sync

    def merged(its: Strategy, value: PerReplica[int], *, scale: PerReplica[float]) -> dict[str, Any]:
        assert its is get_strategy() is strategy
        assert get_replica_context() is None and in_cross_replica_context() and current_replica() is None
        calls.append((value.values, scale.values))
        dealt = PerReplica(tuple(f"for {replica}" for replica in range(size)))
        return {"all": sum(value.values), "each": [dealt]}

    def step(context: ReplicaContext) -> Any:
        replica = context.replica_id_in_sync_group
        result = context.merge_call(merged, (replica + 1,), {"scale": replica / 2})
        assert get_replica_context() is context and current_replica() == replica
        return result

    total = sum(range(1, size + 1))
    assert strategy.each(step) == [{"all": total, "each": [f"for {replica}"]} for replica in range(size)]
    assert calls == [(tuple(range(1, size + 1)), tuple(replica / 2 for replica in range(size)))]


def test_merge_call_meets_the_replicas_of_one_worker() -> None:
    def step(context: ReplicaContext) -> Any:
        return context.merge_call(lambda strategy, ids: ids.values, (context.replica_id_in_sync_group,))

    assert on_layout(2, 2, step) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_an_error_in_merge_call_is_raised_as_it_is(two: Several) -> None:
    def merged(strategy: Strategy) -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there") as raised:
        two.each(lambda context: context.merge_call(merged))
    assert "merged with 0 arguments, where all replicas had met" in raised.value.__notes__[0]


def test_replicas_that_merge_differently_are_named(two: Several) -> None:
    def step(context: ReplicaContext) -> None:
        if context.replica_id_in_sync_group == 0:
            context.all_reduce(ReduceOp.SUM, {"loss": 1.0})
        else:
            context.all_reduce(ReduceOp.SUM, {"losses": [1.0]})

    with pytest.raises(CollectiveError) as raised:
        two.each(step)
    assert str(raised.value) == (
        "replica 0 is at synchronization point 1 of this step (all_reduce sum of {'loss': value}), but replica 1 is "
        "at synchronization point 1 of this step (all_reduce sum of {'losses': list(value)}): every replica has "
        "to make the same calls in the same order"
    )


def test_a_replica_that_skips_a_merge_is_named(strategy: Several) -> None:
    last = strategy.num_replicas_in_sync - 1

    def step(context: ReplicaContext) -> None:
        if context.replica_id_in_sync_group < last:
            context.all_reduce(ReduceOp.SUM, 1.0)

    if last == 0:
        strategy.each(step)
        return
    with pytest.raises(CollectiveError, match=f"but replica {last} has ended its step after 0 synchronization points"):
        strategy.each(step)
