"""Datasets: re-splitting.

docs/semantics.md, "Datasets". Written for all replicas: "0 1 | 2 3 ; 4 | 5" is two steps of two replicas.
"""

from __future__ import annotations

from typing import Any

import pytest

import stratagem as sg
from tests.conformance import reasons
from tests.conformance.datasets import flat, joined, written
from tests.conformance.law import cannot, law
from tests.conformance.scenarios import resplitting
from tests.conformance.scenarios.examples import Reader, Steps, numbers
from tests.conformance.strategies import (
    CENTRAL_2,
    COLUMNS,
    IN_ONE_PROCESS,
    MIRRORED_2,
    PARAMETER_SERVERS,
    PS_ASYNC,
    PS_SYNC,
    TPU,
    Column,
)

NO_SHARE = cannot(PS_SYNC, reasons.NO_SHARE)
ALONE = cannot([*IN_ONE_PROCESS, PS_ASYNC], reasons.ONE_IN_SYNC)
BY_NUMBER = cannot(PARAMETER_SERVERS, reasons.LENT_BY_NUMBER)
ANY_STEP = cannot(PARAMETER_SERVERS, "The chief keeps the position: its journal knows the units that are accepted.")

SIX_BY_FOUR = {
    1: "0 1 2 3 ; 4 5",
    2: "0 1 | 2 3 ; 4 | 5",
    3: "0 1 | 2 3 | ; 4 | 5 |",
    4: "0 | 1 | 2 | 3 ; 4 | 5 | |",
}


@law(
    "range(6) by 4: ceil(global / replicas) each; over 2 it is [0,1]\\|[2,3], then [4]\\|[5]",
    resplitting.six_by_four,
)
def test_range_6_by_4(column: Column, results: list[Steps]) -> None:
    assert joined(column, results) == written(SIX_BY_FOUR[column.num_replicas])


@law("range(8) by 4: over 3 it is [0,1]\\|[2,3]\\|[] twice", resplitting.eight_by_four)
def test_range_8_by_4(column: Column, results: list[Steps]) -> None:
    expected = {
        1: "0 1 2 3 ; 4 5 6 7",
        2: "0 1 | 2 3 ; 4 5 | 6 7",
        3: "0 1 | 2 3 | ; 4 5 | 6 7 |",
        4: "0 | 1 | 2 | 3 ; 4 | 5 | 6 | 7",
    }
    assert joined(column, results) == written(expected[column.num_replicas])


@law(
    "range(4) by 4 over 5: four singles and []",
    resplitting.four_over_five,
    without=cannot(
        [column for column in COLUMNS if column not in (MIRRORED_2, CENTRAL_2)],
        "The number is for five replicas, which only strategies within one process are given here.",
    ),
)
def test_range_4_over_5(column: Column, results: list[Steps]) -> None:
    assert joined(column, results) == written("0 | 1 | 2 | 3 |")


@law(
    "one example: the first replica has it, the others a batch of size 0",
    resplitting.one_example,
    without=ALONE | NO_SHARE,
)
def test_one_example(column: Column, results: list[Steps]) -> None:
    assert joined(column, results) == [[[0]] + [[]] * (column.num_replicas - 1)]


@law("a Dataset with `batch_size=`", resplitting.datasets_and_batch_size)
def test_map_style(column: Column, results: list[Steps]) -> None:
    assert joined(column, results) == written(SIX_BY_FOUR[column.num_replicas])


@law("an iterable of batches", resplitting.lists_of_batches, without=BY_NUMBER)
def test_lists(column: Column, results: list[Steps]) -> None:
    assert joined(column, results) == written(SIX_BY_FOUR[column.num_replicas])


@law("a DataLoader over an IterableDataset", resplitting.streams, without=BY_NUMBER)
def test_streams(column: Column, results: list[Steps]) -> None:
    assert joined(column, results) == written(SIX_BY_FOUR[column.num_replicas])


@law("a DataLoader whose items are batches", resplitting.items_that_are_batches, without=BY_NUMBER)
def test_items_that_are_batches(column: Column, results: list[Steps]) -> None:
    assert joined(column, results) == written(SIX_BY_FOUR[column.num_replicas])


@law("a DataLoader with worker processes", resplitting.loader_processes)
def test_loader_processes(column: Column, results: list[Steps]) -> None:
    assert joined(column, results) == written(SIX_BY_FOUR[column.num_replicas])


@law("dicts and nested tuples keep their form, dtypes and shapes", resplitting.dicts)
def test_dicts(column: Column, results: list[Any]) -> None:
    parts = [part for steps in results for step in steps for part in step]
    for part in parts:
        assert part["keys"] == ["row", "more", "pair"] and part["same"]
        assert part["row"] == ["torch.float32", [3]] and part["first"] == ["torch.int64", []]
    assert sorted(number for part in parts for number in part["examples"]) == [0, 1, 2, 3, 4]


@law("… also at size 0", resplitting.dicts, without=ALONE | NO_SHARE)
def test_dicts_of_size_0(column: Column, results: list[Any]) -> None:
    parts = [part for steps in results for step in steps for part in step]
    assert len(parts) == 2 * column.num_replicas
    empty = [part for part in parts if not part["examples"]]
    assert empty
    for part in empty:
        assert part["row"] == ["torch.float32", [3]] and part["first"] == ["torch.int64", []]


@law("dataclasses, made by a `collate_fn`", resplitting.dataclasses_of_a_collate_fn)
def test_dataclasses_of_a_collate_fn(column: Column, results: list[Any]) -> None:
    check_dataclasses(column, results)


@law("dataclasses, in an iterable", resplitting.dataclasses_in_a_list, without=BY_NUMBER)
def test_dataclasses_in_a_list(column: Column, results: list[Any]) -> None:
    check_dataclasses(column, results)


def check_dataclasses(column: Column, results: list[Any]) -> None:
    parts = [part for steps in results for step in steps for part in step]
    assert sorted(number for _, found, _, _ in parts for number in found) == [0, 1, 2, 3, 4]
    for name, found, labels, shape in parts:
        assert name == "Labelled"
        assert labels == [[-float(number)] for number in found] and shape == [len(found), 1]
    assert column in PARAMETER_SERVERS or len(parts) == 2 * column.num_replicas


@law(
    '`on_empty="skip"` leaves out, on every worker, a step in which a replica has nothing',
    resplitting.skipping_empty,
    without=BY_NUMBER,
)
def test_on_empty_skip(column: Column, results: list[Steps]) -> None:
    steps = joined(column, results)
    assert flat(steps) == list(range(25 if column in IN_ONE_PROCESS else 24))
    assert all(examples for step in steps for examples in step)


@law("`len` is the number of steps", resplitting.length)
def test_length(column: Column, results: list[list[int]]) -> None:
    assert results == [[3, 2]] * column.num_workers


@law('`len` knows `drop_last=True` and `on_empty="skip"`', resplitting.steps_left_out, without=BY_NUMBER)
def test_steps_left_out(column: Column, results: list[dict[str, int]]) -> None:
    skip = 3 if column in IN_ONE_PROCESS else 2
    assert results == [{"call": 3, "skip": skip, "drop_last": 2}] * column.num_workers


@law("`shuffle=True` is one seeded order an epoch, the same under every strategy", resplitting.shuffled)
def test_shuffled(column: Column, results: list[dict[str, Any]]) -> None:
    alone = sg.OneDeviceStrategy("cpu")
    for _ in range(results[0]["ordinal"]):
        dataset = alone.distribute_dataset(numbers(14, 4, shuffle=True))
    expected = [Reader(alone).epoch(dataset), Reader(alone).epoch(dataset)]
    assert [one["counted"] for one in results] == [2] * column.num_workers
    for number, want in enumerate(expected):
        assert sorted(flat(want)) == list(range(14)) != flat(want)
        epochs = [one["epochs"][number] for one in results]
        if column in PARAMETER_SERVERS:
            units = [examples for steps in epochs for step in steps for examples in step if examples]
            order = flat(want)
            units.sort(key=lambda examples: order.index(examples[0]))
            assert [number for unit in units for number in unit] == order
        else:
            assert flat(joined(column, epochs)) == flat(want)
    assert expected[0] != expected[1]


@law("a sampler of the script's own is drawn once, for all workers", resplitting.samplers, without=BY_NUMBER)
def test_samplers(column: Column, results: list[Steps]) -> None:
    order = flat(joined(column, results))
    assert sorted(order) == list(range(40)) != order


@law("each example's gradient is applied exactly once an epoch", resplitting.counted)
def test_counted(column: Column, results: list[list[float]]) -> None:
    assert results == [[2.0] * 30] * column.num_workers


@law("`prefetch=2` reads two steps ahead; CPUs need none", resplitting.prefetched, without=BY_NUMBER)
def test_prefetch(column: Column, results: list[dict[str, Any]]) -> None:
    step = 4 * column.num_local
    ahead = 1 if column in TPU else 0
    for one in results:
        assert one["default"] == [step * min(number + ahead, 5) for number in range(1, 6)]
        assert one["two"] == [3 * step, 4 * step, 5 * step, 5 * step, 5 * step]
        assert one["default steps"] == one["two steps"]
    steps = joined(column, [one["two steps"] for one in results])
    assert flat(steps) == list(range(5 * 4 * column.num_replicas))


@law("a position saved within an epoch is resumed where it was, shuffled or not", resplitting.resumed, without=ANY_STEP)
def test_resumed(column: Column, results: list[dict[str, Any]]) -> None:
    for one in results:
        assert one["again"] == one["whole"][2:] and len(one["whole"]) == 10
    again = joined(column, [one["again"] for one in results])
    assert sorted(flat(again[3:])) == list(range(18)) and len(flat(again[:3])) == 10


@law("a position is the same under every number of replicas", resplitting.position, without=ANY_STEP)
def test_position(column: Column, results: list[dict[str, Any]]) -> None:
    for one in results:
        assert resplitting.POSITION.items() <= one["saved"].items()  # beside the number of the dataset
    assert flat(joined(column, [one["rest"] for one in results])) == list(range(8, 18))


@law("after a loop that was left early, the next one is the next epoch", resplitting.left_early, without=ANY_STEP)
def test_left_early(column: Column, results: list[list[Any]]) -> None:
    whole = {
        1: "0 1 2 3 ; 4 5 6 7",
        2: "0 1 | 2 3 ; 4 5 | 6 7",
        3: "0 1 | 2 3 | ; 4 5 | 6 7 |",
        4: "0 | 1 | 2 | 3 ; 4 | 5 | 6 | 7",
    }
    for _, first_epoch, _, epochs in results:
        assert (first_epoch, epochs) == (0, 2)
    expected = written(whole[column.num_replicas])
    assert joined(column, [[first] for first, *_ in results]) == expected[:1]
    assert joined(column, [steps for _, _, steps, _ in results]) == expected


@law("what cannot be distributed is refused, with the way out", resplitting.refused)
def test_refused(column: Column, results: list[dict[str, str]]) -> None:
    for said in results:
        assert "add batch_size=" in said["no batch size"]
        assert "has batches of its own" in said["two batch sizes"]
        assert "DistributedSampler" in said["already shared out"]
        assert "expected a DataLoader" in said["no source"]


def test_text_of_steps() -> None:
    assert written("0 1 | 2 3 | ; 4 | |") == [[[0, 1], [2, 3], []], [[4], [], []]]


def test_workers_that_part_are_seen() -> None:
    with pytest.raises(AssertionError, match="different numbers of steps"):
        joined(PS_SYNC, [written("0"), written("0;1")])
