"""Replicas of one process as ranks: what they compute, that nobody waits for ever, that it trains as one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.strategy.replicas.cross_device_ops import ReductionToOneDevice
from stratagem.strategy.replicas.local_group import LocalGroup
from stratagem.strategy.replicas.local_replicas import ReplicaCommunicator, WaitingMeter, reopen
from stratagem.strategy.replicas.replica_threads import Doing, ReplicaThreads
from stratagem.worker.reduction.reducer import GradientReducer
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.schedule import cut
from stratagem.worker.step_meter import StepMeter, WaitingOn
from tests.polling import until
from tests.unit.reduction.reducing import Net, batch, build, mean_loss, share_of, take_off, weight_of
from tests.unit.ring.thread_group import run_ranks, run_ranks_with_errors
from tests.unit.strategy.replica_crews import Replicas, replicas

DEADLINE_S = 60.0  # of any wait in a test; one that runs into it fails


@pytest.fixture(params=[2, 3])
def several(request: pytest.FixtureRequest) -> Iterator[Replicas]:
    with replicas(request.param) as made:
        yield made


@pytest.fixture
def two() -> Iterator[Replicas]:
    with replicas(2) as made:
        yield made


# -- what they compute ----------------------------------------------------------------------------------------------


def values(rank: int, length: int = 7) -> torch.Tensor:
    return torch.randint(1, 5, (length,), generator=torch.Generator().manual_seed(rank)).float()


def check_every_collective(communicator: Communicator) -> None:
    """Runs each kind of collective and compares with what the ranks' values say; the group's ranks all call it."""
    rank, size = communicator.rank, communicator.size
    every = torch.stack([values(each) for each in range(size)])
    reductions: dict[ReduceOp, Callable[[torch.Tensor], torch.Tensor]] = {
        ReduceOp.SUM: lambda rows: rows.sum(0),
        ReduceOp.MEAN: lambda rows: rows.mean(0),
        ReduceOp.MIN: lambda rows: rows.amin(0),
        ReduceOp.MAX: lambda rows: rows.amax(0),
        ReduceOp.PRODUCT: lambda rows: rows.prod(0),
    }
    for op, reduce in reductions.items():
        torch.testing.assert_close(communicator.all_reduce(values(rank), op), reduce(every))
    start, stop = cut(7, size)[rank]
    mine, scatter = torch.empty(stop - start), communicator.group.reduce_scatter
    communicator.collective("reduce_scatter", lambda tag: scatter(values(rank), mine, ReduceOp.SUM, tag))
    assert torch.equal(mine, every.sum(0)[start:stop])
    gathered = communicator.all_gather(values(rank, 3 * rank))
    assert all(torch.equal(part, values(each, 3 * each)) for each, part in enumerate(gathered))
    for root in range(size):
        assert torch.equal(communicator.broadcast(values(rank), root), every[root])
    sent = [torch.full(((rank + 2 * to) % 4,), 10 * rank + to) for to in range(size)]
    received = communicator.all_to_all(sent)
    assert [part.tolist() for part in received] == [
        [10 * source + rank] * ((source + 2 * rank) % 4) for source in range(size)
    ]
    arena = communicator.arena(64)
    assert arena.source.numel() == arena.result.numel() == 64
    assert arena.source.data_ptr() != arena.result.data_ptr()
    communicator.barrier()


def test_every_collective(several: Replicas) -> None:
    assert [communicator.rank for communicator in several.communicators] == list(range(several.replica_threads.size))
    several.run(check_every_collective)


@pytest.mark.parametrize(("num_workers", "num_local"), [(2, 2), (2, 3), (3, 1)])
def test_every_collective_of_several_workers(num_workers: int, num_local: int) -> None:
    """One rank a replica, one collective between workers for each of all replicas'."""

    def work(worker: Communicator) -> list[tuple[int, int]]:
        with replicas(num_local, worker) as made:
            made.run(check_every_collective)
            return [(communicator.rank, communicator.size) for communicator in made.communicators]

    ranks = [pair for pairs in run_ranks(num_workers, work) for pair in pairs]
    assert ranks == [(rank, num_workers * num_local) for rank in range(num_workers * num_local)]


def test_a_sum_crosses_between_workers_once() -> None:
    def work(worker: Communicator) -> int:
        with replicas(3, worker) as made:
            before = worker.position.ordinal
            made.run(lambda communicator: communicator.all_reduce(torch.ones(4)))
            return worker.position.ordinal - before

    assert run_ranks(2, work) == [1, 1]


def test_workers_need_equal_numbers_of_replicas() -> None:
    def work(worker: Communicator) -> None:
        size = worker.rank + 1
        replica_threads = ReplicaThreads([torch.device("cpu")] * size, worker.rank * size)
        with contextlib.closing(replica_threads):
            LocalGroup.make(replica_threads, ReductionToOneDevice(), worker)

    _, errors = run_ranks_with_errors(2, work)
    for rank, error in enumerate(errors):
        assert isinstance(error, ConfigurationError)
        assert f"worker {rank} has {rank + 1} and all have, in the order of their indices, [1, 2]" in str(error)


# -- nobody waits for ever ------------------------------------------------------------------------------------------


def test_a_collective_behind_queued_ones_lets_the_others_run(two: Replicas) -> None:
    """Called directly, it waits for its turn in the communicator's queue, and that for the other replica."""

    def work(communicator: ReplicaCommunicator) -> list[float]:
        ones = torch.ones(1)
        early = communicator.submit(lambda: communicator.all_reduce(ones))
        late = communicator.all_reduce(2 * ones)
        assert early.done()
        return [early.result().item(), late.item()]

    assert two.run(work) == [[2.0, 4.0]] * 2


def test_replicas_in_different_collectives_are_named_with_their_positions(two: Replicas) -> None:
    def work(communicator: ReplicaCommunicator) -> None:
        communicator.barrier()
        if communicator.rank == 0:
            communicator.all_reduce(torch.ones(3))
        else:
            communicator.broadcast(torch.ones(3))

    with pytest.raises(CollectiveError) as raised:
        two.run(work)
    positions = [
        "step 1, collective 2 (all_reduce sum of 3 float32)",
        "step 1, collective 2 (broadcast of 3 float32 from rank 0)",
    ]
    rank = 1 - (raised.value.rank or 0)
    assert str(raised.value) == (
        f"aborted at {positions[rank]}: replica {rank} is at {positions[rank]}, but replica {1 - rank} is at "
        f"{positions[1 - rank]}: every replica has to call the same collectives in the same order"
    )


@pytest.mark.parametrize("queued", [False, True])
def test_a_replica_that_ends_early_is_named(two: Replicas, queued: bool) -> None:
    def work(communicator: ReplicaCommunicator) -> None:
        communicator.barrier()
        if communicator.rank == 0 and queued:
            future = communicator.submit(communicator.barrier)
            with two.replica_threads.waiting():
                future.result()
        elif communicator.rank == 0:
            communicator.barrier()

    with pytest.raises(CollectiveError) as raised:
        two.run(work)
    assert str(raised.value) == (
        "aborted at step 1, collective 2 (barrier): replica 0 is at step 1, collective 2 (barrier) and waits for "
        "replica 1, which has ended its step; it was last at step 1, collective 1 (barrier)"
    )
    assert raised.value.rank == 1


@pytest.mark.parametrize("at_meeting", [0, 1])
def test_a_collective_does_not_wait_for_a_meeting(two: Replicas, at_meeting: int) -> None:
    def work(communicator: ReplicaCommunicator) -> None:
        if communicator.rank == at_meeting:
            two.replica_threads.meet("a meeting", None, lambda given: given)
        else:
            communicator.barrier()

    with pytest.raises(
        CollectiveError, match=rf"waits for replica {at_meeting}, which has reached a synchronization point"
    ):
        two.run(work)


def test_a_bucket_may_be_on_its_way_while_the_replicas_meet(two: Replicas) -> None:
    """One replica's bucket waits when both meet, and the other's leaves after that."""
    met = threading.Event()
    futures: list[Future[torch.Tensor]] = []

    def decide(given: list[Any]) -> list[Any]:
        met.set()
        until(lambda: two.communicators[0].group.waiting_on() == 1 or futures[0].done())
        return given

    def work(communicator: ReplicaCommunicator) -> float:
        def bucket() -> torch.Tensor:
            assert met.wait(DEADLINE_S)
            return communicator.all_reduce(torch.ones(1))

        if communicator.rank == 0:
            futures.append(communicator.submit(bucket))
        two.replica_threads.meet("a meeting", None, decide)
        if communicator.rank == 1:
            futures.append(communicator.submit(bucket))
        with two.replica_threads.waiting():
            return futures[communicator.rank].result(DEADLINE_S).item()

    assert two.run(work) == [2.0, 2.0]


def test_what_a_replica_has_queued_is_waited_for_while_it_meets(two: Replicas) -> None:
    def work(communicator: ReplicaCommunicator) -> float:
        def bucket() -> torch.Tensor:
            until(lambda: two.communicators[0].group.waiting_on() == 1)
            return communicator.all_reduce(torch.ones(1))

        if communicator.rank == 0:
            with two.replica_threads.waiting():
                until(lambda: two.replica_threads.doing(1) is Doing.MEETING)
            total = communicator.all_reduce(torch.ones(1))
            two.replica_threads.meet("a meeting", None, lambda given: given)
            return total.item()
        future = communicator.submit(bucket)
        two.replica_threads.meet("a meeting", None, lambda given: given)
        with two.replica_threads.waiting():
            return future.result(DEADLINE_S).item()

    assert two.run(work) == [2.0, 2.0]


def test_a_replica_that_computes_long_is_waited_for() -> None:
    replica_threads = ReplicaThreads([torch.device("cpu")] * 2)
    groups = LocalGroup.make(replica_threads, ReductionToOneDevice())
    groups[0].timeout_s = 0.001
    communicators = [ReplicaCommunicator(group) for group in groups]
    timed_out = threading.Event()  # nobody sets it

    def work(communicator: ReplicaCommunicator) -> float:
        if communicator.rank == 1:  # replica 0 waits here and runs into its timeout again and again
            until(lambda: groups[0].waiting_on() == 1)
            for _ in range(20):
                timed_out.wait(0.002)
                assert groups[0].waiting_on() == 1
        return communicator.all_reduce(torch.ones(1)).item()

    try:
        assert replica_threads.run([functools.partial(work, communicator) for communicator in communicators]) == [
            2.0,
            2.0,
        ]
        # Outside of a step nobody can be computing.
        with pytest.raises(CollectiveError, match=r"waits for replica 1, which did not come within 0.001 s"):
            communicators[0].barrier()
    finally:
        for communicator in communicators:
            communicator.close()
        replica_threads.close()


def test_an_error_while_the_last_one_works_reaches_all(two: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> list[torch.Tensor]:
        raise ArithmeticError("no sum today")

    monkeypatch.setattr(ReductionToOneDevice, "all_reduce", broken)
    ends: dict[int, str] = {}

    def work(communicator: ReplicaCommunicator) -> None:
        try:
            communicator.all_reduce(torch.ones(1))
        except Exception as error:
            ends[communicator.rank] = str(error)
            raise

    with pytest.raises(ArithmeticError, match="no sum today"):
        two.run(work)
    assert sorted(ends) == [0, 1]
    assert any("could not finish a collective: ArithmeticError('no sum today')" in text for text in ends.values())


def test_an_error_between_workers_reaches_all_replicas() -> None:
    def work(worker: Communicator) -> None:
        with replicas(2, worker) as made:
            made.run(lambda communicator: communicator.barrier())

    _, errors = run_ranks_with_errors(2, work, fail_at={1: [3]})  # two for the lengths and counts of make
    for error in errors:
        assert isinstance(error, CollectiveError)
        assert "rank 1 broke collective 3" in str(error)


# -- training -------------------------------------------------------------------------------------------------------


class Dropping(torch.nn.Module):
    """A net with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(self.dropout(x))
        assert isinstance(out, torch.Tensor)
        return out


SHARES = {2: [[3, 1], [2, 2], [4, 0], [1, 3]], 3: [[2, 1, 1], [0, 3, 1], [1, 1, 2], [2, 2, 0]]}
STEPS = 8


class Training:
    """One replica of a model by hand: a copy, its optimizer, its reducer."""

    def __init__(self, model: torch.nn.Module, communicator: ReplicaCommunicator, meter: StepMeter) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.shares: Sequence[int] = ()
        self.reducer = GradientReducer(
            model.parameters(),
            communicator,
            meter=meter,
            weight=lambda: weight_of(self.shares, communicator.rank)(),
            bucket_bytes=1024,
            first_bytes=256,
        )

    def step(self, rank: int, number: int, shares: Sequence[int]) -> None:
        self.shares = shares
        self.optimizer.zero_grad()
        x, y = share_of(batch(number), shares, rank)
        mean_loss(self.model, x, y).backward()
        self.optimizer.step()


@contextlib.contextmanager
def trained(
    made: Replicas, factory: Callable[[], torch.nn.Module], meter: StepMeter, seed: int = 0
) -> Iterator[list[Training]]:
    """The replicas after :data:`STEPS` steps."""
    original = build(factory)
    torch.manual_seed(seed)
    models = [original, *(copy.deepcopy(original) for _ in made.communicators[1:])]
    waiting = WaitingMeter(meter, made.replica_threads)
    # Reducers find out together whether all have the same parameters.
    trainings = made.run(lambda communicator: Training(models[communicator.rank], communicator, waiting))
    every = SHARES[made.replica_threads.size]
    try:
        for number in range(STEPS):
            step = functools.partial(take_step, trainings, number, every[number % len(every)])
            made.run(step)
        yield trainings
    finally:
        for training in trainings:
            take_off(training.reducer)


def take_step(
    trainings: Sequence[Training], number: int, shares: Sequence[int], communicator: ReplicaCommunicator
) -> None:
    trainings[communicator.rank % len(trainings)].step(communicator.rank, number, shares)


def one_process(num_steps: int) -> list[torch.Tensor]:
    """The weights after steps on whole batches."""
    model = build(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(num_steps):
        optimizer.zero_grad()
        mean_loss(model, *batch(number)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_equal_and_close(found: Sequence[Sequence[torch.Tensor]], expected: Sequence[torch.Tensor]) -> None:
    """All replicas have the same bits, and those are the expected weights up to rounding."""
    for mine in found:
        for value, first, reference in zip(mine, found[0], expected, strict=True):
            assert torch.equal(value, first)
            torch.testing.assert_close(value, reference, atol=1e-6, rtol=1e-6)


def weights(training: Training) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in training.model.parameters()]


def test_replicas_train_as_one_process(several: Replicas) -> None:
    with trained(several, Net, StepMeter()) as trainings:
        assert all(len(training.reducer.buckets) > 1 for training in trainings)
        assert_equal_and_close([weights(training) for training in trainings], one_process(STEPS))


def test_replicas_of_several_workers_train_as_one_process() -> None:
    shares = [[1, 2, 0, 1], [2, 0, 1, 1]]
    # Built here: the workers are threads of one process, and each of their crews moves its random generator.
    models = [build(Net) for _ in range(4)]

    def work(worker: Communicator) -> list[list[torch.Tensor]]:
        with replicas(2, worker) as made:
            meter = WaitingMeter(StepMeter(), made.replica_threads)
            trainings = made.run(lambda communicator: Training(models[communicator.rank], communicator, meter))
            for number in range(4):
                made.run(functools.partial(take_step, trainings, number, shares[number % 2]))
            for training in trainings:
                take_off(training.reducer)
            return [weights(training) for training in trainings]

    found = [of_replica for of_worker in run_ranks(2, work) for of_replica in of_worker]
    assert len(found) == 4
    assert_equal_and_close(found, one_process(4))


@pytest.mark.parametrize("size", [2, 3])
def test_training_with_dropout_repeats_bit_for_bit(size: int) -> None:
    def train(made: Replicas, seed: int) -> list[torch.Tensor]:
        with trained(made, Dropping, StepMeter(), seed) as trainings:
            return weights(trainings[0])

    with replicas(size) as made:
        once, again, other = train(made, 1), train(made, 1), train(made, 2)
    with replicas(size) as made:
        elsewhere = train(made, 1)
    for repeated in (again, elsewhere):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(repeated, once, strict=True))
    assert not all(torch.equal(mine, theirs) for mine, theirs in zip(other, once, strict=True)), "nothing was dropped"


def test_only_what_all_replicas_wait_for_counts_as_communication(two: Replicas) -> None:
    inside: list[str] = []

    class Recorder(StepMeter):
        @contextlib.contextmanager
        def exposed(self, waiting_on: WaitingOn, step: int = 0, phase: str = "", peer: str = "") -> Iterator[None]:
            inside.append(str(waiting_on))
            yield
            inside.append("no more")

    meter, second_waits = WaitingMeter(Recorder(), two.replica_threads), threading.Event()
    seen: list[list[str]] = []

    def work(communicator: ReplicaCommunicator) -> None:
        if communicator.rank == 0:
            with meter.exposed("the second"):
                assert second_waits.wait(DEADLINE_S)
        else:
            seen.append(list(inside))  # the first one waits, and this one computes
            with meter.exposed("the first"):
                seen.append(list(inside))
                second_waits.set()

    two.run(work)
    assert seen == [[], ["the first"]]
    assert inside == ["the first", "no more"]


# -- failures in the middle of training -----------------------------------------------------------------------------


class Fault(Exception):
    """What a test raises in a replica."""


class FailsInBackward(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise Fault("in backward")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_replica_that_raises_ends_the_others_and_is_named(two: Replicas, where: str, failing: int) -> None:
    ends: dict[int, str] = {}
    with trained(two, Net, StepMeter()) as trainings:
        before = [weights(training) for training in trainings]

        def work(communicator: ReplicaCommunicator) -> None:
            rank = communicator.rank
            model = trainings[rank].model
            assert isinstance(model, Net)
            trainings[rank].shares = [2, 2]
            x, y = share_of(batch(9), [2, 2], rank)
            try:
                hidden = torch.tanh(model.second(torch.tanh(model.first(x)))) * model.scale
                if rank == failing and where == "forward":
                    raise Fault("in forward")
                if rank == failing:
                    hidden = FailsInBackward.apply(hidden)  # type: ignore[no-untyped-call]
                torch.nn.functional.cross_entropy(model.last(hidden), y).backward()
            except Exception as error:
                ends[rank] = str(error)
                raise

        with pytest.raises(Fault, match=f"in {where}") as raised:
            two.run(work)
        assert raised.value.__notes__ == [f"raised in replica {failing} (cpu)"]
        assert ends.pop(failing) == f"in {where}"
        if failing == 1:  # the other one has begun, and waited for gradients
            assert ends.keys() == {0}
            assert "replica 1 raised Fault: in" in ends[0] or "backward() raised on rank 1" in ends[0]
        for training, old in zip(trainings, before, strict=True):
            assert all(torch.equal(mine, kept) for mine, kept in zip(weights(training), old, strict=True))


def test_the_communicators_work_again_after_a_failure(several: Replicas) -> None:
    def work(communicator: ReplicaCommunicator) -> None:
        communicator.barrier()
        several.replica_threads.meet(
            "a meeting", None, lambda given: given
        )  # after which the first replica goes on first
        if communicator.rank == 1:
            raise Fault("between collectives")
        communicator.submit(communicator.barrier)  # nobody looks at it any more
        communicator.barrier()

    with pytest.raises(Fault):
        several.run(work)
    assert any(communicator._error is not None for communicator in several.communicators)
    reopen(several.communicators)
    several.run(check_every_collective)
    with trained(several, Net, StepMeter()) as trainings:
        assert_equal_and_close([weights(training) for training in trainings], one_process(STEPS))
