"""The parts of an Estimator that decide something: when to save, when to evaluate, which examples come next."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from stratagem.data.index_batches import epoch_order
from stratagem.errors import ConfigurationError
from stratagem.strategy.default import DefaultStrategy
from stratagem.training.estimator.feeds import LeasedFeed, NumberedBatch, repeated
from stratagem.training.estimator.inputs import sample, split
from stratagem.training.estimator.schedules import EvaluatorSchedule, SaveSchedule
from stratagem.worker.ring.communicator import Communicator
from tests.unit.ring.thread_group import run_ranks


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# -- saving ------------------------------------------------------------------------------------------------------------


def test_by_steps() -> None:
    schedule = SaveSchedule(10, 600.0, None, step=13)
    due = []
    for step in (14, 19, 20, 21, 29, 33, 34, 40):  # under parameter servers numbers are left out
        if schedule.is_due(step):
            due.append(step)
            schedule.saved(step)
    assert due == [20, 33, 40]


def test_by_the_clock_of_a_process_alone() -> None:
    clock = Clock()
    schedule = SaveSchedule(None, 5.0, None, 0, clock)
    assert not schedule.is_due(1)
    clock.now = 5.0
    assert schedule.is_due(2)
    schedule.saved(2)
    clock.now = 9.9
    assert not schedule.is_due(3)
    assert not SaveSchedule(None, math.inf, None, 0, clock).is_due(1)


def test_workers_that_run_in_step_go_by_one_clock_and_look_seldom() -> None:
    looks = [0, 0]

    def train(communicator: Communicator) -> list[int]:
        clock, due = Clock(), []
        broadcast = communicator.broadcast

        def counted(tensor: torch.Tensor) -> torch.Tensor:
            looks[communicator.rank] += 1
            return broadcast(tensor)

        communicator.broadcast = counted  # type: ignore[method-assign,assignment]
        schedule = SaveSchedule(None, 5.0, communicator, 0, clock)
        for step in range(1, 2001):
            clock.now += 0.01 * (1 if communicator.rank == 0 else 3)  # rank 1's clock is wrong
            if schedule.is_due(step):
                due.append(step)
                schedule.saved(step)
        return due

    first, second = run_ranks(2, train)
    assert first == second
    assert len(first) == 3 and all(500 <= b - a <= 700 for a, b in zip([0, *first], first, strict=False))
    assert looks[0] == looks[1] and looks[0] < 40


# -- evaluating --------------------------------------------------------------------------------------------------------


def test_an_evaluator_waits_at_first_and_between_evaluations() -> None:
    schedule = EvaluatorSchedule(100, start_delay_s=120, throttle_s=600, now=0)
    assert schedule.decide(130, None, False) == "wait"
    assert schedule.decide(119, 10, False) == "wait"
    assert schedule.decide(120, 10, False) == "evaluate"
    schedule.evaluated(10, started=120)
    assert schedule.decide(800, 10, False) == "wait"  # nothing new
    assert schedule.decide(719, 20, False) == "wait"
    assert schedule.decide(720, 20, False) == "evaluate"
    assert not schedule.is_last(20, False)


def test_an_evaluator_stops_at_the_last_step_or_at_the_end_of_the_job() -> None:
    schedule = EvaluatorSchedule(100, 120, 600, now=0)
    assert schedule.decide(1, 100, False) == "evaluate"
    assert schedule.is_last(100, False)
    schedule.evaluated(100, 1)
    assert schedule.decide(2, 100, False) == "stop"
    endless = EvaluatorSchedule(None, 120, 600, now=0)
    endless.evaluated(30, 0)
    assert endless.decide(10_000, 30, False) == "wait"
    assert endless.decide(1, 35, True) == "evaluate"
    assert endless.is_last(35, True)
    endless.evaluated(35, 1)
    assert endless.decide(2, 35, True) == "stop"
    assert EvaluatorSchedule(100, 0, 0, now=0).decide(0, None, True) == "stop"


# -- repeating ---------------------------------------------------------------------------------------------------------


def read(source: DataLoader[Any], num_batches: int | None, start: int = 0) -> list[list[int]]:
    found: list[list[int]] = []
    first = 0
    for item in repeated(source, num_batches, start):
        assert isinstance(item, NumberedBatch) and item.first == first
        rows = item.batch[0].tolist()
        first += len(rows)
        found.append(rows)
    return found


def flat(batches: list[list[int]]) -> list[int]:
    return [row for rows in batches for row in rows]


LARGE = (1 << 64) - 5
"""A seed, as large as they may be."""


def order_of(ordinal: int, seed: int = LARGE, count: int = 10) -> list[int]:
    return [int(row) for epoch in range(3) for row in epoch_order(count, True, seed, ordinal, epoch)]


class Leasing(DefaultStrategy):
    """Whose second dataset is distributed, in a job with a seed."""

    def distribute_dataset(self, source: Any, **_: Any) -> Any:
        return Leased(source, SimpleNamespace(seed=LARGE), 2)


@dataclasses.dataclass
class Leased:
    source: Any
    plan: Any
    ordinal: int

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


def fed(
    num_examples: int, step: int, state: Any = None, loader: Any = None, ordinal: int | None = None
) -> tuple[LeasedFeed, list[int]]:
    """A feed and the examples of its training, from a step on; ``state``: of a checkpoint of that step."""
    feed = LeasedFeed(Leasing(), loader or numbers(batch_size=4, shuffle=True), ordinal)
    if state is not None:
        feed.resume(state, step)
    feed.aim(step, step + num_examples // 4)
    return feed, [int(row) for _, item in feed.batches() for row in item.batch[0]]


def numbers(count: int = 10, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), **arguments)


def test_epochs_follow_each_other_without_a_seam() -> None:
    assert read(numbers(batch_size=4), 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5]]
    assert read(numbers(batch_size=4, drop_last=True), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert read(numbers(batch_size=4), 2, start=2) == [[8, 9, 0, 1], [2, 3, 4, 5]]


def test_one_pass_is_one_epoch() -> None:
    assert read(numbers(batch_size=4), None) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert read(numbers(batch_size=4, drop_last=True), None, start=4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert read(numbers(batch_size=4), None, start=1) == [[4, 5, 6, 7], [8, 9]], "the rest, as on other strategies"


def test_orders_of_a_shuffling_loader_are_those_of_every_strategy() -> None:
    """A second Estimator, or a further training, had the order of the first, and no seed of the job's."""
    feed, rows = fed(28, 30)
    assert rows == order_of(2)[:28]
    assert fed(28, 30, ordinal=5)[1] == order_of(5)[:28]
    state = json.loads(json.dumps(feed.state_dict()))
    assert fed(12, 34, state)[1] == order_of(2)[16:28], "a job that resumes in the middle goes on there"
    with_older = fed(12, 4, {"dataset": None})[1]
    assert with_older == order_of(1, seed=0)[16:28]


def test_a_place_of_workers_in_step_is_gone_on_from(caplog: pytest.LogCaptureFixture) -> None:
    loader = numbers(count=12, batch_size=4, shuffle=True)
    place = {"epoch": 1, "step": 2, "seed": LARGE, "ordinal": 3, "num_examples": 12, "batch_size": 4}
    order = order_of(3, count=12)
    assert fed(12, 40, {"dataset": place}, loader)[1] == order[20:32]
    other = {**place, "batch_size": 6}
    assert "starts from its beginning" not in caplog.text
    assert fed(12, 4, {"dataset": other}, loader)[1] == order_of(2, count=12)[:12]
    assert "starts from its beginning" in caplog.text


def test_worker_processes_and_rows_read_at_once() -> None:
    class AtOnce(TensorDataset):
        def __getitems__(self, rows: list[int]) -> torch.Tensor:
            return self.tensors[0][rows]

    at_once = DataLoader(AtOnce(torch.arange(10)), batch_size=4, collate_fn=lambda rows: [rows])
    assert read(at_once, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert read(numbers(batch_size=4, num_workers=1), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (numbers(batch_size=4, sampler=WeightedRandomSampler([1.0] * 10, 10)), "shuffle=True or shuffle=False"),
        ([torch.zeros(4)], "leases batches by number"),
        (numbers(3, batch_size=4, drop_last=True), "no batch to train on"),
    ],
)
def test_batches_that_cannot_be_lent(source: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        repeated(source, 3, 0)


# -- samples -----------------------------------------------------------------------------------------------------------


def test_another_max_steps_than_the_job_of_the_checkpoint_is_refused_with_the_way_out() -> None:
    class Chief(DefaultStrategy):
        def distribute_dataset(self, source: Any, **_: Any) -> Any:
            raise ConfigurationError(f"num_examples is 96 in the job and {len(source.dataset)} here.")

    feed = LeasedFeed(Chief(), DataLoader(TensorDataset(torch.arange(32)), 8))
    assert feed.aim(0, 20) == 20
    with pytest.raises(
        ConfigurationError, match=r"96 in the job and 160 here\. .* max_steps .* leave out --checkpoint-dir"
    ):
        next(feed.batches())


@pytest.mark.parametrize(
    ("batch", "expected"),
    [(("x", "y"), ("x", "y")), (["x", "y"], ("x", "y")), (("x",), ("x", None)), ({"a": 1}, ({"a": 1}, None))],
)
def test_features_and_labels(batch: Any, expected: Any) -> None:
    assert split(batch) == expected


class OwnIterator(IterableDataset[list[torch.Tensor]]):
    """Of ten examples, that can be gone through once in a process."""

    def __init__(self) -> None:
        self._left = iter(range(10))

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return self

    def __next__(self) -> list[torch.Tensor]:
        return [torch.tensor(next(self._left))]


@pytest.mark.parametrize(
    "make",
    [
        lambda: numbers(batch_size=4, shuffle=True),
        lambda: numbers(batch_size=None),
        lambda: numbers(batch_size=4, sampler=WeightedRandomSampler([1.0] * 10, 10)),
        lambda: iter([[torch.arange(4)], [torch.arange(3)]]),
        lambda: DataLoader(OwnIterator(), batch_size=4),
        lambda: DataLoader(OwnIterator(), batch_size=4, num_workers=1),
    ],
    ids=["loader", "items", "sampler", "iterator", "stream", "process"],
)
def test_a_sample_takes_nothing_away(make: Callable[[], Any]) -> None:
    torch.manual_seed(2)
    before = torch.get_rng_state()
    source = make()
    batch, source = sample(source)
    assert torch.equal(torch.get_rng_state(), before)
    assert batch[0].numel() <= 2
    left = list(source)
    torch.manual_seed(2)
    assert str(left) == str(list(make()))
