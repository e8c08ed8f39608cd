"""A worker is lost at any moment: the others train every example of the epoch once, in the same order on all."""

from __future__ import annotations

import collections
import itertools
import json
import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from stratagem.data.distribute import distribute
from stratagem.data.options import AutoShardPolicy, DistributeOptions
from stratagem.data.placement import InputPlacement, StepCounter
from stratagem.data.split_dataset import SplitDataset
from stratagem.errors import ConfigurationError
from stratagem.worker.ring.communicator import Communicator
from tests.thorough import all_but_each_third
from tests.unit.data.reading import CPU
from tests.unit.ring.healing_ranks import Fate, run_mortal

NUM_EXAMPLES, BATCH, NUM_EPOCHS = 26, 6, 2


def dataset_of(communicator: Communicator, **options: Any) -> SplitDataset:
    placement = InputPlacement((CPU,), communicator.size, communicator.rank, communicator, lambda plan: 3)
    loader = DataLoader(TensorDataset(torch.arange(NUM_EXAMPLES)), batch_size=BATCH, shuffle=True)
    return distribute(loader, placement=placement, listener=StepCounter(communicator), **options)


def train(communicator: Communicator, positions: list[str] | None = None) -> list[list[int]]:
    """For each step, all workers' examples that counted in it."""
    dataset, steps = dataset_of(communicator), []
    for _ in range(NUM_EPOCHS):
        for (batch,) in dataset:
            mine = communicator.atomic(lambda batch=batch: communicator.all_gather(batch), is_training=True)  # type: ignore[misc]
            steps.append(torch.cat(mine).tolist())
            if positions is not None:
                positions.append(json.dumps(dataset.state_dict()))
    communicator.barrier()
    return steps


NUM_COLLECTIVES = 2 * (2 + 5 * 3)
"""Of the group in :func:`train`: in each epoch 2 that agree on the start, and in each step 2 and one that confirms."""


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dies_at", all_but_each_third(range(1, NUM_COLLECTIVES + 1, 2)))
def test_every_example_counts_once_an_epoch(dies_at: int, late: bool) -> None:
    dies_at += late
    results = run_mortal(4, train, rank2=Fate(dies_at, late), rank3=Fate(misses_at=dies_at * late))
    assert results[0] == results[1] == results[2]
    every = [row for step in results[0] for row in step]
    assert len(every) == NUM_EPOCHS * NUM_EXAMPLES
    for epoch in range(NUM_EPOCHS):
        assert sorted(every[epoch * NUM_EXAMPLES :][:NUM_EXAMPLES]) == list(range(NUM_EXAMPLES))


def train_in_pairs(communicator: Communicator) -> list[list[int]]:
    """The examples of two steps count together, as gradients that ``no_sync`` keeps do."""
    dataset, steps, kept = dataset_of(communicator), [], []
    assert communicator.healing is not None
    for _ in range(NUM_EPOCHS):
        for number, (batch,) in enumerate(dataset, 1):
            kept.append(batch)
            if number % 2 and number < len(dataset):
                communicator.healing.pending_steps.append(communicator.step)
                continue
            both, kept = torch.cat(kept), []
            mine = communicator.atomic(lambda both=both: communicator.all_gather(both), is_training=True)  # type: ignore[misc]
            steps.append(torch.cat(mine).tolist())
    communicator.barrier()
    return steps


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dies_at", range(1, 2 * (2 + 3 * 3) + 1, 2))
def test_what_a_lost_worker_had_accumulated_comes_again(dies_at: int, late: bool) -> None:
    """Of the batches before the one with which they are reduced it was left out."""
    results = run_mortal(4, train_in_pairs, rank2=Fate(dies_at + late, late))
    assert results[0] == results[1] == results[2]
    every = [row for step in results[0] for row in step]
    assert collections.Counter(every) == dict.fromkeys(range(NUM_EXAMPLES), NUM_EPOCHS)


def train_and_validate(communicator: Communicator) -> tuple[list[list[int]], list[list[int]]]:
    """Each step with a collective before that in which it counts, as SyncBatchNorm makes; after each epoch a pass that
    trains nothing. The examples of all workers, by step: trained, and reduced in validations."""
    dataset, validation = dataset_of(communicator), dataset_of(communicator)
    trained, validated = [], []
    for _ in range(NUM_EPOCHS):
        for (batch,) in dataset:
            communicator.all_reduce(torch.ones(1))
            mine = communicator.atomic(lambda batch=batch: communicator.all_gather(batch), is_training=True)  # type: ignore[misc]
            trained.append(torch.cat(mine).tolist())
        for (batch,) in validation:
            validated.append(torch.cat(communicator.all_gather(batch)).tolist())
    communicator.barrier()
    return trained, validated


@pytest.mark.parametrize("dies_at", all_but_each_third(range(1, 70)))
def test_a_pass_that_trains_nothing_is_not_made_again(dies_at: int, caplog: pytest.LogCaptureFixture) -> None:
    results = run_mortal(3, train_and_validate, rank1=Fate(dies_at))
    assert results[0] == results[1]
    trained, validated = results[0]
    assert collections.Counter(itertools.chain(*trained)) == dict.fromkeys(range(NUM_EXAMPLES), NUM_EPOCHS)
    seen = collections.Counter(itertools.chain(*validated))
    assert max(seen.values()) <= NUM_EPOCHS and sum(seen.values()) >= NUM_EPOCHS * NUM_EXAMPLES - BATCH // 3
    if sum(seen.values()) < NUM_EPOCHS * NUM_EXAMPLES:
        assert "were lost; no update was made" in caplog.text


@pytest.mark.parametrize("dies_at", range(3, 12))
def test_a_pass_that_is_left_takes_with_it_what_would_have_come_again(dies_at: int) -> None:
    def work(communicator: Communicator) -> list[int]:
        dataset, last = dataset_of(communicator), []
        for epoch in range(NUM_EPOCHS):
            for number, (batch,) in enumerate(dataset):
                mine = communicator.atomic(lambda batch=batch: communicator.all_gather(batch), is_training=True)  # type: ignore[misc]
                last += torch.cat(mine).tolist() if epoch else []
                if not epoch and number == 2:
                    break
        communicator.barrier()
        return last

    for seen in run_mortal(3, work, rank1=Fate(dies_at)):
        assert sorted(seen) == list(range(NUM_EXAMPLES))


def test_what_comes_again_is_a_part_of_the_position() -> None:
    def work(communicator: Communicator) -> tuple[list[str], list[list[int]], list[list[int]]]:
        positions: list[str] = []
        steps = train(communicator, positions)
        resumed = dataset_of(communicator)
        resumed.load_state_dict(json.loads(positions[2]))
        again = []
        for (batch,) in resumed:
            mine = communicator.atomic(lambda batch=batch: communicator.all_gather(batch), is_training=True)  # type: ignore[misc]
            again.append(torch.cat(mine).tolist())
        communicator.barrier()
        return positions, steps, again

    in_second_step = 2 + 3 + 1
    for positions, steps, again in run_mortal(3, work, rank1=Fate(in_second_step)):
        left = [json.loads(position).get("left") for position in positions]
        assert left[0] is None and len(left[1]) == BATCH // 3 and left[1] == steps[5]
        assert len(steps) == NUM_EPOCHS * 5 + 1
        assert again == steps[3:6]


def test_what_cannot_be_dealt_out_anew_is_refused() -> None:
    def work(communicator: Communicator) -> None:
        placement = InputPlacement((CPU,), communicator.size, communicator.rank, communicator)
        off = DistributeOptions(auto_shard_policy=AutoShardPolicy.OFF)
        sources: list[tuple[Any, Any]] = [([torch.arange(4)], None), (DataLoader(TensorDataset(torch.arange(4))), off)]
        for source, options in sources:
            with pytest.raises(
                ConfigurationError, match=r"--min-workers asks for.*DataLoader over a map-style dataset"
            ):
                distribute(source, placement=placement, options=options)
        communicator.barrier()

    run_mortal(2, work, rank1=Fate(1))


@pytest.mark.parametrize("seed", range(12))
def test_whoever_else_dies_while_the_ring_heals(seed: int) -> None:
    # Two ranks die within a few collectives, one of them perhaps in those by which the ring heals.
    chance = random.Random(seed)
    first = chance.randrange(1, NUM_COLLECTIVES - 6)
    second = first + chance.randrange(4)
    fates = {"rank1": Fate(first, chance.random() < 0.5), "rank3": Fate(second, chance.random() < 0.5)}
    fates["rank0"] = Fate(misses_at=chance.randrange(first, second + 3) * (chance.random() < 0.5))
    results = run_mortal(5, train, 0, **fates)
    assert results[0] == results[1] == results[2], fates
    every = [row for step in results[0] for row in step]
    for epoch in range(NUM_EPOCHS):
        assert sorted(every[epoch * NUM_EXAMPLES :][:NUM_EXAMPLES]) == list(range(NUM_EXAMPLES)), fates
