"""Datasets: who gets what.

docs/semantics.md, "Datasets": the policies, dataset functions, leases. Expected steps are those of one worker each.
"""

from __future__ import annotations

from typing import Any

from tests.conformance import reasons
from tests.conformance.datasets import flat, written
from tests.conformance.law import cannot, law
from tests.conformance.scenarios import sharding
from tests.conformance.scenarios.examples import Steps
from tests.conformance.strategies import COLUMNS, IN_ONE_PROCESS, PARAMETER_SERVERS, PS_ASYNC, PS_SYNC, Column

LENT = cannot(PARAMETER_SERVERS, "Under parameter servers the chief leases batches: LEASE, and no other policy.")
NOT_LENT_IN_STEP = cannot([PS_SYNC], next(iter(LENT.values())))
ONE_WORKER = cannot(
    [column for column in COLUMNS if column.num_workers == 1], "There is one worker, which reads everything."
)
IN_STEP = cannot(
    [column for column in COLUMNS if column not in PARAMETER_SERVERS],
    "Workers that run in step share each batch; none can be leased to one of them.",
)

Expected = dict[tuple[int, int], list[str]]
"""By numbers of workers and of local replicas: each worker's steps."""

TWELVE: Expected = {
    (1, 1): ["0 1 2 3 ; 4 5 6 7 ; 8 9 10 11"],
    (1, 2): ["0 1 | 2 3 ; 4 5 | 6 7 ; 8 9 | 10 11"],
    (1, 3): ["0 1 | 2 3 | ; 4 5 | 6 7 | ; 8 9 | 10 11 |"],
}


def check(column: Column, results: list[Steps], expected: Expected) -> None:
    assert results == list(map(written, expected[column.num_workers, column.num_local]))


@law("FILE, 2 files of 6, global 4: worker 0 gets [0,1],[2,3],[4],[5]", sharding.by_file, without=LENT)
def test_file(column: Column, results: list[Steps]) -> None:
    check(column, results, FILES)


FILES: Expected = TWELVE | {
    (2, 1): ["0 1 ; 2 3 ; 4 ; 5", "6 7 ; 8 9 ; 10 ; 11"],
    (2, 2): ["0 | 1 ; 2 | 3 ; 4 | 5", "6 | 7 ; 8 | 9 ; 10 | 11"],
}


@law(
    "workers with unequal files stop together; one with none left gets batches of size 0",
    sharding.by_unequal_files,
    without=LENT | ONE_WORKER,
)
def test_unequal_files(column: Column, results: list[Steps]) -> None:
    expected: Expected = {
        (2, 1): ["0 1 ; 2 3 ; 4 ; 5", "6 ; 7 ; ;"],
        (2, 2): ["0 | 1 ; 2 | 3 ; 4 | 5", "6 | 7 ; | ; |"],
    }
    check(column, results, expected)


@law("FILE with fewer files than workers is an error", sharding.too_few_files, without=LENT | ONE_WORKER)
def test_too_few_files(column: Column, results: list[str]) -> None:
    for said in results:
        assert "needs a file for each of the 2 workers, got 1" in said


@law("FILE of a source that is not made of files is an error", sharding.no_files, without=LENT)
def test_no_files(column: Column, results: list[str]) -> None:
    for said in results:
        assert "AutoShardPolicy.FILE needs a source made of files" in said


DATA: Expected = TWELVE | {
    (2, 1): ["0 1 ; 4 5 ; 8 9", "2 3 ; 6 7 ; 10 11"],
    (2, 2): ["0 | 1 ; 4 | 5 ; 8 | 9", "2 | 3 ; 6 | 7 ; 10 | 11"],
}


@law(
    "DATA, 12 items, global 4: worker 0 [0,1],[4,5],[8,9]; worker 1 [2,3],[6,7],[10,11]", sharding.by_data, without=LENT
)
def test_data(column: Column, results: list[Steps]) -> None:
    check(column, results, DATA)


@law("OFF: everyone sees all", sharding.off, without=LENT)
def test_off(column: Column, results: list[Steps]) -> None:
    expected: Expected = TWELVE | {
        (2, 1): ["0 1 ; 2 3 ; 4 5 ; 6 7 ; 8 9 ; 10 11"] * 2,
        (2, 2): ["0 | 1 ; 2 | 3 ; 4 | 5 ; 6 | 7 ; 8 | 9 ; 10 | 11"] * 2,
    }
    check(column, results, expected)


@law("OFF, shuffled: everyone sees all, in an order of its own", sharding.off_and_shuffled, without=LENT | ONE_WORKER)
def test_off_and_shuffled(column: Column, results: list[Steps]) -> None:
    orders = [flat(steps) for steps in results]
    assert all(sorted(order) == list(range(48)) for order in orders)
    assert orders[0] != orders[1]


@law("AUTO: FILE for sources made of files, else DATA", sharding.auto, without=LENT)
def test_auto(column: Column, results: list[dict[str, Steps]]) -> None:
    check(column, [one["files"] for one in results], FILES)
    check(column, [one["map-style"] for one in results], DATA)
    check(column, [one["list"] for one in results], DATA)


@law(
    "iterables that are not the same on all workers are detected at the first batch",
    sharding.other_batches,
    without=LENT | ONE_WORKER,
)
def test_other_batches(column: Column, results: list[str]) -> None:
    for said in results:
        assert "workers 0 and 1 must read the same" in said and "AutoShardPolicy.OFF" in said


@law(
    "`distribute_datasets_from_function`: batches per replica, shards by its InputContext",
    sharding.from_function,
    without=NOT_LENT_IN_STEP,
)
def test_from_function(column: Column, results: list[dict[str, Any]]) -> None:
    each = 12 // column.num_replicas
    for worker, one in enumerate(results):
        assert one["told"] == [column.num_workers, worker, column.num_replicas, each]
        own = list(range(24))[worker :: column.num_workers]
        batches = [own[start : start + each] for start in range(0, len(own), each)]
        first = range(0, len(batches), column.num_local)
        assert one["steps"] == [batches[start : start + column.num_local] for start in first]


@law(
    "functions that give different numbers of batches: all stop together, batches of size 0 meanwhile",
    sharding.uneven_functions,
    without=NOT_LENT_IN_STEP | cannot([*IN_ONE_PROCESS, PS_ASYNC], reasons.ONE_IN_SYNC),
)
def test_uneven_functions(column: Column, results: list[Steps]) -> None:
    expected: Expected = {
        (1, 2): ["0 | 1 ; 2 |"],
        (1, 3): ["0 | 1 | 2"],
        (2, 1): ["0 ; 1 ; 2", "10 ; ;"],
        (2, 2): ["0 | 1 ; 2 |", "10 | ; |"],
    }
    check(column, results, expected)


@law(
    "a batch per replica of a global batch that does not divide is an error",
    sharding.indivisible,
    without=NOT_LENT_IN_STEP | cannot([*IN_ONE_PROCESS, PS_ASYNC], reasons.ONE_IN_SYNC),
)
def test_indivisible(column: Column, results: list[str]) -> None:
    for said in results:
        assert f"divisible by the {column.num_replicas} replicas, got 13" in said


@law("LEASE: each example is leased once an epoch, in units that are never cut again", sharding.leased, without=IN_STEP)
def test_leased(column: Column, results: list[list[Steps]]) -> None:
    epochs = list(zip(*results, strict=True))
    for of_workers in epochs:
        assert sorted(number for steps in of_workers for number in flat(steps)) == list(range(30))
    units = [unit for of_workers in epochs for steps in of_workers for (unit,) in steps if unit]
    # In batches of 4: seven full ones and one of 2, at staleness 0 in halves.
    one_epoch = [4] * 7 + [2] if column is PS_ASYNC else [2] * 14 + [1] * 2
    assert sorted(map(len, units)) == sorted(one_epoch * 2)
    assert epochs[0] != epochs[1]


@law("policies that do not fit the strategy are refused", sharding.other_policies)
def test_other_policies(column: Column, results: list[dict[str, str]]) -> None:
    leases = column in PARAMETER_SERVERS
    for said in results:
        assert not said["AUTO"]
        if leases:
            assert not said["LEASE"]
            for name in ("FILE", "DATA", "OFF"):
                assert said[name].startswith(f"AutoShardPolicy.{name} is for workers that run in step")
        else:
            assert not said["FILE"] and not said["DATA"] and not said["OFF"]
            assert said["LEASE"].startswith("AutoShardPolicy.LEASE leases units to workers that come and go")


@law("LEASE: what the chief cannot lease is refused", sharding.not_to_be_lent, without=IN_STEP)
def test_not_to_be_lent(column: Column, results: list[dict[str, str]]) -> None:
    for said in results:
        assert "the chief leases batches by number" in said["list"]
        assert "map-style dataset" in said["stream"] and "AnyOrder" in said["sampler"]
        refused = "the chief cannot lease what a function makes on each worker" in said["function"]
        assert refused if column is PS_SYNC else not said["function"]
        assert "on_empty" in said["skip"] and "prefetch" in said["prefetch"]
