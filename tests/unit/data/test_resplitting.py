"""Global batches over replicas: the numbers of tf.distribute, whatever the source and wherever the replicas are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler, TensorDataset

from stratagem.cluster.units import Plan
from stratagem.data.distribute import distribute, distribute_from_function, leasable
from stratagem.data.loaders import plan_of
from stratagem.data.options import AutoShardPolicy, DistributeOptions
from stratagem.data.placement import InputPlacement, StepShare
from stratagem.data.readers import BatchSplit, cut
from stratagem.data.values import PerReplica
from stratagem.errors import ConfigurationError
from tests.conformance.scenarios.examples import Numbers, Steps, Stream
from tests.unit.data.reading import CPU, Epochs, Shares, batches, epoch, on_workers, steps_of

NUMBERS = [
    (6, 4, 2, [[[0, 1], [2, 3]], [[4], [5]]]),
    (4, 4, 5, [[[0], [1], [2], [3], []]]),
    (8, 4, 3, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]),
    (5, 5, 1, [[[0, 1, 2, 3, 4]]]),
]
SOURCES: dict[str, Callable[[int, int], Any]] = {
    "map-style": lambda num, size: DataLoader(Numbers(num), batch_size=size),
    "iterable": lambda num, size: batches(num, size),
    "iterable dataset": lambda num, size: DataLoader(Stream(num), batch_size=size),
    "items": lambda num, size: DataLoader(batches(num, size), batch_size=None),  # type: ignore[arg-type]
    "batch sampler": lambda num, size: DataLoader(
        Numbers(num), batch_sampler=[list(range(num))[first : first + size] for first in range(0, num, size)]
    ),
    "batch sampler with numpy": lambda num, size: DataLoader(
        Numbers(num),
        batch_sampler=np.split(np.arange(num), range(size, num, size)),  # type: ignore[arg-type]
    ),
    "whole lists": lambda num, size: DataLoader(
        FetchedAtOnce(num),
        batch_size=None,
        sampler=BatchSampler(SequentialSampler(range(num)), size, drop_last=False),
    ),
}


class FetchedAtOnce(Numbers):
    """Gives a whole batch for a list of indices."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index)


@pytest.mark.parametrize(("num", "size", "replicas", "expected"), NUMBERS)
@pytest.mark.parametrize("source", SOURCES)
def test_local_replicas_follow_tf_distribute(
    source: str, num: int, size: int, replicas: int, expected: list[list[list[int]]]
) -> None:
    (steps,) = epoch(lambda: SOURCES[source](num, size), replicas=replicas)
    assert steps == expected


@pytest.mark.parametrize(("num", "size", "workers", "expected"), NUMBERS)
@pytest.mark.parametrize("source", SOURCES)
def test_workers_follow_tf_distribute(
    source: str, num: int, size: int, workers: int, expected: list[list[list[int]]]
) -> None:
    each = epoch(lambda: SOURCES[source](num, size), workers)
    assert [[own[0] for own in step] for step in zip(*each, strict=True)] == expected


@pytest.mark.parametrize("source", SOURCES)
def test_workers_with_several_replicas_each(source: str) -> None:
    first, second = epoch(lambda: SOURCES[source](14, 8), num_workers=2, replicas=2)
    assert first == [[[0, 1], [2, 3]], [[8, 9], [10, 11]]]
    assert second == [[[4, 5], [6, 7]], [[12, 13], []]]


@given(st.integers(0, 200), st.integers(1, 20))
def test_the_cut_is_that_of_plans(num_examples: int, num_replicas: int) -> None:
    parts = cut(num_examples, num_replicas)
    assert len(parts) == num_replicas
    assert [row for part in parts for row in part] == list(range(num_examples))
    if num_examples:
        plan = Plan(num_examples, num_examples, num_slices=num_replicas)
        assert [(part.start, part.stop) for part in parts if part] == [plan.bounds(i) for i in range(plan.num_units)]


@given(st.integers(1, 100), st.integers(1, 4), st.integers(1, 4))
def test_every_worker_alone_takes_all_and_together_they_take_all_once(num: int, workers: int, replicas: int) -> None:
    alone = [row for step in BatchSplit(workers, 0, replicas, True).steps(num) for rows in step for row in rows]
    assert alone == list(range(num))
    dealt = [BatchSplit(workers, worker, replicas, False).steps(num) for worker in range(workers)]
    assert all(len(steps) == 1 for steps in dealt)
    assert [row for (step,) in dealt for rows in step for row in rows] == list(range(num))


def test_one_replica_gets_batches_several_get_per_replica() -> None:
    (alone,) = distribute(batches(3, 3), placement=InputPlacement((CPU,)))
    assert torch.equal(alone, torch.arange(3))
    (both,) = distribute(batches(3, 3), placement=InputPlacement((CPU, CPU)))
    assert isinstance(both, PerReplica)
    assert [batch.tolist() for batch in both.values] == [[0, 1], [2]] and both.shares == (2.0, 1.0)


@pytest.mark.parametrize("source", SOURCES)
def test_shares_are_told_before_each_batch(source: str) -> None:
    def work(placement: InputPlacement) -> Shares:
        heard = Shares()
        for _ in distribute(SOURCES[source](14, 8), placement=placement, listener=heard):
            heard.events.append("batch")
        return heard

    first, second = on_workers(2, work, replicas=2)
    assert first.events == ["start 0", "begin 0", "batch", "done 0", "begin 1", "batch", "done 1", "complete"]
    assert first.begun == [StepShare(0, 0, (2, 2), 8), StepShare(0, 1, (2, 2), 6)]
    assert second.begun == [StepShare(0, 0, (2, 2), 8), StepShare(0, 1, (2, 0), 6)]
    assert second.begun[1].weights == (2 / 6, 0.0)


def test_a_dataset_with_a_batch_size() -> None:
    assert epoch(lambda: Numbers(6), replicas=2, batch_size=4) == [[[[0, 1], [2, 3]], [[4], [5]]]]
    assert epoch(lambda: Stream(6), replicas=2, batch_size=4) == [[[[0, 1], [2, 3]], [[4], [5]]]]


def test_each_worker_reads_its_own_rows_only() -> None:
    def work(placement: InputPlacement) -> list[int]:
        data = Numbers(8)
        steps_of(distribute(DataLoader(data, batch_size=4), placement=placement))
        return data.asked

    assert on_workers(2, work) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_shuffled_shares_are_one_permutation() -> None:
    def work(placement: InputPlacement) -> list[list[list[list[int]]]]:
        dataset = distribute(DataLoader(Numbers(50), batch_size=12, shuffle=True), placement=placement)
        return [steps_of(dataset) for _ in range(2)]

    epochs = list(zip(*on_workers(3, work, seed=5), strict=True))
    orders = [[row for step in zip(*one, strict=True) for own in step for row in own[0]] for one in epochs]
    assert all(sorted(order) == list(range(50)) for order in orders) and orders[0] != orders[1]
    (alone,) = on_workers(1, work, seed=5)
    assert [[row for step in one for row in step[0]] for one in alone] == orders


def test_length() -> None:
    placement = InputPlacement((CPU, CPU))
    assert len(distribute(DataLoader(Numbers(9), batch_size=4), placement=placement)) == 3
    assert len(distribute(DataLoader(Numbers(9), batch_size=4, drop_last=True), placement=placement)) == 2
    assert len(distribute(batches(9, 4), placement=placement)) == 3
    assert len(distribute(SOURCES["batch sampler"](9, 4), placement=placement)) == 3
    assert len(distribute(SOURCES["items"](9, 4), placement=placement)) == 3
    with pytest.raises(TypeError, match="how many steps"):
        len(distribute(DataLoader(Stream(9), batch_size=4), placement=placement))
    with pytest.raises(TypeError, match="how many steps"):
        len(distribute((batch for batch in batches(9, 4)), placement=placement))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("workers", [1, 2])
def test_steps_with_an_empty_share_can_be_skipped(source: str, workers: int) -> None:
    options = DistributeOptions(on_empty="skip")
    each = epoch(lambda: SOURCES[source](13, 6), workers, replicas=4 // workers, options=options)
    assert each == ([[]] if workers == 1 else [[], []])  # ceil(6/4) = 2, 2, 2 and nothing for the fourth
    each = epoch(lambda: SOURCES[source](9, 8), workers, replicas=4 // workers, options=options)
    assert [rows for own in each for step in own for rows in step] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    if source == "map-style":
        dataset = distribute(SOURCES[source](9, 8), placement=InputPlacement((CPU,) * 4), options=options)
        assert len(dataset) == 1


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sampled", ["sampler", "batch sampler", "items"])
def test_the_indices_of_other_samplers_are_drawn_once_for_all(sampled: str, workers: int) -> None:
    def source() -> DataLoader[Any]:
        sampler = torch.utils.data.WeightedRandomSampler([1.0] * 20, 12)
        if sampled == "sampler":
            return DataLoader(Numbers(20), batch_size=4, sampler=sampler)
        if sampled == "items":
            return DataLoader(batches(80, 4), batch_size=None, sampler=sampler)  # type: ignore[arg-type]
        return DataLoader(Numbers(20), batch_sampler=torch.utils.data.BatchSampler(sampler, 4, drop_last=False))

    def work(placement: InputPlacement) -> list[list[list[list[int]]]]:
        dataset = distribute(source(), placement=placement)
        return [steps_of(dataset) for _ in range(2)]

    first, second = zip(*on_workers(workers, work, replicas=2 // workers, seed=3), strict=True)
    (expected_first, expected_second) = on_workers(1, work, replicas=2, seed=3)[0]

    def flat(per_worker: Any) -> list[int]:
        return [row for step in zip(*per_worker, strict=True) for own in step for rows in own for row in rows]

    assert flat(first) == flat([expected_first]) and flat(second) == flat([expected_second])
    assert flat(first) != flat(second)


def test_a_sampler_that_fails_on_worker_0_is_refused_on_all() -> None:
    class Failing(Sampler[Any]):
        fails = True

        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Iterator[Any]:
            if self.fails:
                raise OSError("no list of indices")
            yield from range(8)

    def work(placement: InputPlacement) -> tuple[str, list[list[list[int]]]]:
        dataset = distribute(DataLoader(Numbers(20), batch_size=4, sampler=(sampler := Failing())), placement=placement)
        with pytest.raises((OSError, ConfigurationError), match="no list of indices") as caught:
            steps_of(dataset)
        sampler.fails = False
        return caught.typename, steps_of(dataset)

    (first, mine), (second, others) = on_workers(2, work)
    assert (first, second) == ("OSError", "ConfigurationError")
    assert (mine, others) == ([[[0, 1]], [[4, 5]]], [[[2, 3]], [[6, 7]]])


def test_drawing_leaves_the_random_numbers_alone() -> None:
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 20, 12, generator=torch.Generator().manual_seed(4))
    torch.manual_seed(1)
    loader = DataLoader(Numbers(20), batch_size=4, sampler=sampler, generator=torch.Generator())
    steps_of(distribute(loader, placement=InputPlacement((CPU,))))
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))
    assert sampler.generator is not None and sampler.generator.initial_seed() == 4


def test_a_sampler_without_a_length() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter([[0, 1], [2, 3]])

    loader: DataLoader[int] = DataLoader(Numbers(4), batch_sampler=Endless())
    assert epoch(lambda: loader, replicas=2) == [[[[0], [1]], [[2], [3]]]]
    with pytest.raises(ConfigurationError, match=r"Endless .* __len__"):
        epoch(lambda: loader, num_workers=2)


@pytest.mark.parametrize(
    "arguments",
    [
        lambda: {"batch_sampler": (batch for batch in ([0, 1], [2, 3]))},
        lambda: {"sampler": iter(range(4)), "batch_size": 2},
    ],
)
def test_a_generator_of_indices_has_one_pass(arguments: Callable[[], dict[str, Any]]) -> None:
    dataset = distribute(DataLoader(Numbers(4), **arguments()), placement=InputPlacement((CPU,)))
    assert len(list(dataset)) == 2
    with pytest.raises(ConfigurationError, match=r"(generator|iterator) gives its batches only once"):
        list(dataset)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_batch_sampler_gives_no_empty_batch(num_workers: int) -> None:
    with pytest.raises(ConfigurationError, match="expected at least one index in each batch, got an empty list"):
        epoch(lambda: DataLoader(Numbers(3), batch_sampler=[[0, 1], [], [2]]), num_workers=num_workers)


@pytest.mark.parametrize("num_processes", [None, 4])
def test_a_sampler_may_count_processes_of_its_own(num_processes: int | None) -> None:
    """It was taken for one of accelerate's, and refused."""
    sampler = torch.utils.data.SequentialSampler(Numbers(4))
    sampler.num_processes = num_processes  # type: ignore[attr-defined]
    loader = DataLoader(Numbers(4), batch_size=2, sampler=sampler)
    assert len(steps_of(distribute(loader, placement=InputPlacement((CPU,))))) == 2


def test_sources_that_cannot_be_shared_out() -> None:
    placement = InputPlacement((CPU,))
    with pytest.raises(ConfigurationError, match="batch_size="):
        distribute(Numbers(4), placement=placement)
    with pytest.raises(ConfigurationError, match="batches of its own"):
        distribute(batches(4, 2), placement=placement, batch_size=2)
    array = torch.zeros(3, 4)
    for arrays in (array, array.numpy(), (array, array), {"x": array}):
        with pytest.raises(ConfigurationError, match=r"expected batches, got .*DataLoader\(TensorDataset\("):
            distribute(arrays, placement=placement)
    with pytest.raises(ConfigurationError, match="got int"):
        distribute(3, placement=placement)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="DistributedSampler"):
        sampler: torch.utils.data.DistributedSampler[int] = torch.utils.data.DistributedSampler(Numbers(4), 2, 0)
        distribute(DataLoader(Numbers(4), sampler=sampler), placement=placement)
    with pytest.raises(ConfigurationError, match="DistributedSampler gives each worker a part"):
        leasable(DataLoader(Numbers(4), sampler=sampler))
    part = torch.utils.data.BatchSampler(range(4), 2, drop_last=False)
    part.num_processes, part.process_index = 2, 0  # type: ignore[attr-defined]  # as accelerate's BatchSamplerShard
    with pytest.raises(ConfigurationError, match="BatchSampler gives each worker a part"):
        distribute(DataLoader(Numbers(4), batch_sampler=part), placement=placement)
    with pytest.raises(ConfigurationError, match=r"one index at a time .* got 2: give sampler=BatchSampler"):
        steps_of(distribute(DataLoader(Numbers(4), batch_size=None, sampler=[[0, 1]]), placement=placement))
    with pytest.raises(ConfigurationError, match=r"LEASE .*DATA"):
        distribute(
            batches(4, 2), placement=placement, options=DistributeOptions(auto_shard_policy=AutoShardPolicy.LEASE)
        )
    examples: Any = DataLoader([(torch.zeros(2), torch.tensor(k)) for k in range(4)], batch_size=None)  # type: ignore
    assert len(steps_of(distribute(examples, placement=placement))) == 4
    with pytest.raises(ConfigurationError, match=r"one example .* cut along its features: give the DataLoader batch_"):
        steps_of(distribute(examples, placement=InputPlacement((CPU, CPU))))
    assert len(steps_of(distribute(list(examples), placement=InputPlacement((CPU, CPU))))) == 4
    once = distribute(iter(batches(4, 2)), placement=placement)
    assert len(steps_of(once)) == 2
    with pytest.raises(ConfigurationError, match="second pass"):
        steps_of(once)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="expected AutoShardPolicy of AUTO, FILE, DATA, OFF, LEASE"):
        DistributeOptions(auto_shard_policy="files")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="prefetch"):
        DistributeOptions(prefetch=-1)
    with pytest.raises(ConfigurationError, match="on_empty"):
        DistributeOptions(on_empty="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_of_the_loader(workers: int) -> None:
    def work(placement: InputPlacement) -> list[list[list[list[int]]]]:
        loader = DataLoader(Numbers(10), batch_size=4, num_workers=1, persistent_workers=True, timeout=60)
        dataset = distribute(loader, placement=placement)
        for _ in dataset:
            break  # what the process has read ahead is dropped
        return [steps_of(dataset) for _ in range(2)]

    each = on_workers(workers, work, replicas=2 // workers)
    for steps in zip(*each, strict=True):
        rows = [own for step in zip(*steps, strict=True) for own in step]
        assert [part for own in rows for part in own] == [[0, 1], [2, 3], [4, 5], [6, 7], [8], [9]]


def test_samplers_and_datasets_hear_of_epochs() -> None:
    class Shuffling(Stream):
        heard: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.heard.append(epoch)

    dataset = distribute(DataLoader(Shuffling(4), batch_size=2), placement=InputPlacement((CPU,)))
    steps_of(dataset)
    steps_of(dataset)
    assert Shuffling.heard == [0, 1]


class OfEpoch(Sampler[int]):
    """As DistributedSampler shuffles."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch])


@pytest.mark.parametrize(
    "sampling",
    [{"sampler": OfEpoch()}, {"batch_sampler": BatchSampler(OfEpoch(), 2, False)}],
    ids=["sampler", "batch_sampler"],
)
def test_samplers_of_a_map_style_dataset_hear_of_epochs(sampling: dict[str, Any]) -> None:
    dataset = distribute(DataLoader(Numbers(4), **sampling), placement=InputPlacement((CPU,)))
    assert [steps_of(dataset) for _ in range(2)] == [[[[0]]], [[[1]]]]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stateful_loader_of_torchdata_is_planned_like_torchs(shuffle: bool) -> None:
    """Its samplers, which are no subclasses of torch's RandomSampler, and a subclass of BatchSampler."""
    names = {"__module__": "torchdata.stateful_dataloader.sampler", "replacement": False, "num_samples": 8}
    names |= {"data_source": range(8), "__len__": lambda _: 8}
    data = Numbers(8)
    sampler: Any = type("RandomSampler", (Sampler,), names)() if shuffle else SequentialSampler(data)

    class Loader(DataLoader[int]):
        def __init__(self) -> None:
            super().__init__(data, batch_size=2, sampler=sampler)
            self.__dict__["batch_sampler"] = type("BatchSampler", (BatchSampler,), {})(sampler, 2, False)

    rows = [row for step in steps_of(distribute(leasable(Loader()), placement=InputPlacement((CPU,)))) for row in step]
    assert plan_of(Loader(), 1, 0).shuffle == (rows != [[0, 1], [2, 3], [4, 5], [6, 7]]) == shuffle


def test_a_stateful_loader_of_torchdata_is_not_asked_for_a_position() -> None:
    class StatefulDataLoader(DataLoader[int]):
        next_iter_state: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"_num_yielded": 0}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.next_iter_state = state

    loader, moved = StatefulDataLoader(Numbers(4), batch_size=2), StatefulDataLoader(Numbers(4), batch_size=2)
    dataset = distribute(loader, placement=InputPlacement((CPU,)))
    next(iter(dataset))
    for call in (loader.state_dict, lambda: loader.load_state_dict(state={"_num_yielded": 1})):
        with pytest.raises(ConfigurationError, match=r"sg\.Checkpoint .* keeps the position"):
            call()
    moved.load_state_dict({"_num_yielded": 1})
    with pytest.raises(ConfigurationError, match=r"sg\.Checkpoint .* keeps the position"):
        distribute(moved, placement=InputPlacement((CPU,)))


class EpochStream(Epochs, IterableDataset[int]):
    """The epoch that it is read in."""

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch])


@pytest.mark.parametrize("kind", [Epochs, EpochStream])
def test_a_process_that_stays_hears_of_epochs(kind: type[Epochs]) -> None:
    loader = DataLoader(kind(1), num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    dataset = distribute(loader, placement=InputPlacement((CPU,)))
    assert [steps_of(dataset) for _ in range(2)] == [[[[0]]], [[[1]]]]


def test_a_newer_pass_ends_an_older_one() -> None:
    dataset = distribute(DataLoader(TensorDataset(torch.arange(6)), batch_size=2), placement=InputPlacement((CPU,)))
    older = iter(dataset)
    next(older)
    newer = iter(dataset)
    next(newer)
    with pytest.raises(ConfigurationError, match="newer"):
        next(older)


def test_the_form_of_a_batch_is_learned_when_the_first_data_come() -> None:
    class Late:
        def __init__(self, worker: int) -> None:
            self._worker = worker
            self._num_passes = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            self._num_passes += 1
            return iter([torch.arange(2)] if self._num_passes > 1 and self._worker == 0 else [])

    def work(placement: InputPlacement) -> list[Steps]:
        dataset = distribute_from_function(lambda context: Late(context.input_pipeline_id), placement=placement)
        return [steps_of(dataset), steps_of(dataset)]

    assert on_workers(2, work) == [[[], [[[0, 1]]]], [[], [[[]]]]]
