"""The position of a dataset: saved in the middle of an epoch, restored elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from stratagem.arguments import warn_once
from stratagem.data.distribute import distribute, distribute_from_function
from stratagem.data.options import AutoShardPolicy, DistributeOptions
from stratagem.data.placement import InputPlacement
from stratagem.data.split_dataset import SplitDataset
from stratagem.errors import ConfigurationError
from tests.conformance.scenarios.examples import Numbers
from tests.unit.data.reading import CPU, batches, epoch, on_workers, steps_of, values
from tests.unit.data.test_resplitting import SOURCES
from tests.unit.data.test_sharding import FILE, OFF, files

ALONE = InputPlacement((CPU,))


def shuffled(num: int = 20) -> DataLoader[int]:
    return DataLoader(Numbers(num), batch_size=4, shuffle=True)


def read(dataset: SplitDataset, num_steps: int) -> list[Any]:
    """Some steps; what is seen of the position is that of the last one."""
    steps = []
    for item in dataset:
        steps.append(values(item))
        if len(steps) == num_steps:
            break
    return steps


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("seen", range(6))
def test_a_resumed_epoch_goes_on_where_it_was(source: str, seen: int) -> None:
    whole = steps_of(distribute(SOURCES[source](18, 4), placement=ALONE))
    first = distribute(SOURCES[source](18, 4), placement=ALONE)
    iterator = iter(first)
    steps = [values(next(iterator)) for _ in range(min(seen, 5))]
    if seen == 5:
        assert next(iterator, None) is None
    state = json.loads(json.dumps(first.state_dict()))
    assert (state["epoch"], state["step"]) == ((1, 0) if seen == 5 else (0, seen))
    second = distribute(SOURCES[source](18, 4), placement=ALONE)
    second.load_state_dict(state)
    steps += steps_of(second)
    assert steps == whole + (whole if seen == 5 else [])


def test_a_position_goes_on_in_its_order_whichever_dataset_of_the_script_takes_it() -> None:
    first = distribute(shuffled(), placement=ALONE, ordinal=1)
    steps = read(first, 2)
    second = distribute(shuffled(), placement=ALONE, ordinal=3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    steps += steps_of(second)
    assert steps == steps_of(distribute(shuffled(), placement=ALONE, ordinal=1))
    third = distribute(shuffled(), placement=ALONE, ordinal=3)
    third.load_state_dict({name: value for name, value in first.state_dict().items() if name != "ordinal"})
    assert len(steps_of(third)) == 3  # a state of before, without the ordinal


def test_what_is_distributed_already_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="got the result of distribute_dataset"):
        distribute(distribute(shuffled(), placement=ALONE), placement=ALONE)


def test_shuffled_epochs_are_resumed_on_any_number_of_workers() -> None:
    def seeded(placement: InputPlacement) -> SplitDataset:
        return distribute(shuffled(), placement=placement)

    (before,) = on_workers(1, lambda placement: _two_epochs(seeded(placement)), seed=7)
    first = distribute(shuffled(), placement=InputPlacement((CPU,), seed=lambda plan: 7))
    steps_of(first)
    read(first, 2)

    def resumed(placement: InputPlacement) -> Any:
        dataset = seeded(placement)  # another seed, until the state is loaded
        dataset.load_state_dict(first.state_dict())
        assert dataset.plan is not None and dataset.plan.seed == 7 and dataset.epoch == 1
        return steps_of(dataset)

    for workers in (1, 2, 3):
        each = on_workers(workers, resumed, seed=8)
        rows = [[row for own in step for row in own[0]] for step in zip(*each, strict=True)]
        assert rows == [step[0] for step in before[1][2:]]


def _two_epochs(dataset: SplitDataset) -> list[Any]:
    return [steps_of(dataset), steps_of(dataset)]


class WithoutLength(torch.utils.data.Sampler[int]):
    """As many write one: torch's base class has no length. It draws as it goes."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(20, ())) for _ in range(12))


@pytest.mark.parametrize(
    "make", [lambda: torch.utils.data.WeightedRandomSampler([1.0] * 20, 12), WithoutLength], ids=["length", "none"]
)
def test_a_drawn_epoch_is_drawn_again(make: Callable[[], torch.utils.data.Sampler[int]]) -> None:
    def sampled() -> SplitDataset:
        sampler = make()
        return distribute(DataLoader(Numbers(20), batch_size=4, sampler=sampler), placement=ALONE)

    whole = _two_epochs(sampled())
    first, second = sampled(), sampled()
    steps_of(first)
    begun = read(first, 1)
    torch.rand(5)
    before = torch.get_rng_state()
    second.load_state_dict(first.state_dict())
    assert begun + steps_of(second) == whole[1]
    assert torch.equal(before, torch.get_rng_state()), "the script's own"


def test_what_lies_before_is_not_read_again() -> None:
    data = Numbers(20)
    dataset = distribute(DataLoader(data, batch_size=4), placement=ALONE)
    dataset.load_state_dict({**dataset.state_dict(), "step": 3})
    assert steps_of(dataset) == [[[12, 13, 14, 15]], [[16, 17, 18, 19]]]
    assert data.asked == list(range(12, 20))


@pytest.mark.parametrize("options", [FILE, OFF])
@pytest.mark.parametrize("seen", range(5))
def test_workers_that_read_alone_resume(options: DistributeOptions, seen: int) -> None:
    whole = epoch(lambda: files("0-5", "6-9"), num_workers=2, options=options)

    def work(placement: InputPlacement) -> Any:
        first = distribute(files("0-5", "6-9"), placement=placement, options=options)
        iterator = iter(first)
        steps = [values(next(iterator)) for _ in range(seen)]
        second = distribute(files("0-5", "6-9"), placement=placement, options=options)
        second.load_state_dict(first.state_dict())
        iterator.close()
        return steps + steps_of(second)

    if len(whole[0]) >= seen:
        assert on_workers(2, work) == whole


def test_a_function_is_resumed() -> None:
    placement = InputPlacement((CPU, CPU))
    dataset = distribute_from_function(lambda context: batches(10, 2), placement=placement)
    dataset.load_state_dict({**dataset.state_dict(), "step": 1})
    assert steps_of(dataset) == [[[4, 5], [6, 7]], [[8, 9], []]]


def test_batches_read_ahead_are_not_seen_yet() -> None:
    options = DistributeOptions(prefetch=3)
    dataset = distribute(batches(20, 4), placement=ALONE, options=options)
    iterator = iter(dataset)
    next(iterator)
    assert dataset.state_dict()["step"] == 1


def test_a_loop_that_is_left() -> None:
    dataset = distribute(shuffled(), placement=ALONE)
    begun = read(dataset, 2)
    state = dataset.state_dict()
    assert (state["epoch"], state["step"]) == (0, 2)
    rest = distribute(shuffled(), placement=ALONE)
    rest.load_state_dict(state)
    whole = _two_epochs(distribute(shuffled(), placement=ALONE))
    assert begun + steps_of(rest) == whole[0]
    assert steps_of(dataset) == whole[1]  # in the same process the next loop is the next epoch


@pytest.mark.parametrize("begins_anew", [False, True])
def test_a_position_in_a_pass_that_was_left_is_not_where_the_next_pass_begins(
    begins_anew: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that trains two steps of each epoch trained two of the first once more, without a word."""
    warn_once.cache_clear()
    dataset = distribute(shuffled(), placement=ALONE)
    begun = read(dataset, 2)
    if begins_anew:
        dataset.begin_at(dataset.epoch + 1)
    state = dataset.state_dict()
    assert caplog.text == ""
    following = read(dataset, 2)
    assert ("begins the next one: a job that resumes there trains the rest" in caplog.text) != begins_anew
    resumed = distribute(shuffled(), placement=ALONE)
    resumed.load_state_dict(state)
    assert (read(resumed, 2) == following) == begins_anew
    assert begun != following


def test_states_of_other_data_are_refused() -> None:
    state = distribute(shuffled(), placement=ALONE).state_dict()
    with pytest.raises(ConfigurationError, match=r"num_examples=20.*24"):
        distribute(shuffled(24), placement=ALONE).load_state_dict(state)
    with pytest.raises(ConfigurationError, match="'seed'"):
        distribute(shuffled(), placement=ALONE).load_state_dict({"epoch": 0, "step": 0})
    with pytest.raises(ConfigurationError, match="policy='data'"):
        distribute_from_function(lambda context: batches(4, 2), placement=ALONE).load_state_dict(state)
    alone = DistributeOptions(auto_shard_policy=AutoShardPolicy.OFF)
    state = distribute(batches(8, 4), placement=ALONE, options=alone).state_dict()
    with pytest.raises(ConfigurationError, match="num_local_replicas=1"):
        distribute(batches(8, 4), placement=InputPlacement((CPU, CPU)), options=alone).load_state_dict(state)


def test_workers_at_different_places_are_told() -> None:
    def work(placement: InputPlacement) -> None:
        dataset = distribute(shuffled(), placement=placement)
        if placement.worker == 1:
            dataset.load_state_dict({**dataset.state_dict(), "step": 2})
        steps_of(dataset)

    with pytest.raises(ConfigurationError, match=r"\(0, 0, 0, 20\) on worker 0 and \(0, 2, 0, 20\) on worker 1"):
        on_workers(2, work)


@pytest.mark.parametrize("seen", [4, 5])
def test_a_pass_that_resumes_behind_its_last_batch_says_why_it_has_none(
    seen: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Scripts print the loss of their last batch after the loop, and failed with a NameError at each start."""
    saved = distribute(shuffled(), placement=ALONE)
    iterator = iter(saved)
    for _ in range(seen):
        next(iterator)
    resumed = distribute(shuffled(), placement=ALONE)
    resumed.load_state_dict(saved.state_dict())
    assert len(steps_of(resumed)) == 5 - seen
    assert ("this pass has no batch" in caplog.text) == (seen == 5)
    caplog.clear()
    assert len(steps_of(resumed)) == 5 and caplog.text == ""
