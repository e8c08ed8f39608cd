"""Contexts and values.

Scopes, replica contexts, reductions (SEMANTICS: "Contexts and values"); variables are in test_variables.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.law import cannot, law
from tests.conformance.replicas import NO_COLLECTIVES, numbers, steps
from tests.conformance.scenarios import contexts, forgotten
from tests.conformance.scenarios.contexts import LENGTHS
from tests.conformance.strategies import COLUMNS, IN_ONE_PROCESS, PS_ASYNC, PS_SYNC, RING_2X2, SEVERAL_LOCAL, Column

ONE_LOCAL = cannot(
    [column for column in COLUMNS if column not in SEVERAL_LOCAL],
    "A worker has one replica, so none can be missing: workers that diverge are told by their next collective, or by "
    "the chief.",
)


@law("`scope()` makes the strategy current; outside, `get_strategy()` is a pass-through", contexts.current)
def test_scope(column: Column, results: list[Any]) -> None:
    for found in results:
        assert found["outside"] and found["inside"] and found["after"]
        assert found["in_run"] == [True] * column.num_local
        assert (found["default_replicas"], found["default_run"], found["default_reduce"]) == (1, [2], 3.0)


@law("a second strategy's scope inside is an error that names both", contexts.another_scope)
def test_second_scope(column: Column, results: list[Any]) -> None:
    for found in results:
        assert found["error"] == "ConfigurationError"
        assert found["name"] in found["text"] and "OneDeviceStrategy" in found["text"]
        assert found["still"] and found["outside"] == "none"


@law("what trains in `run` without `prepare` is refused, with the line to write", forgotten.prepare)
def test_forgotten_prepare(column: Column, results: list[Any]) -> None:
    line = "model, optimizer = strategy.prepare(model, optimizer)"
    said = {
        "nothing": "built inside strategy.scope(), got a gradient inside strategy.run, but its model was not prepared",
        "model": "SGD.step() inside strategy.run, but the optimizer was not prepared",
        "by hand": "was not prepared",
    }
    for found in results:
        assert not any(one["changed"] for one in found.values())
        for name, text in said.items():
            assert text in found[name]["said"] and line in found[name]["said"]
        assert not found["frozen"]["said"]
        if "late" in found:
            assert "SGD steps with a parameter of shape [3]" in found["late"]["said"]
        if "optimizer" in found:
            assert "no prepared model has" in found["optimizer"]["said"]


@law("gradients that a script sets are refused where they would make the replicas diverge", forgotten.own_gradients)
def test_own_gradients(column: Column, results: list[Any]) -> None:
    parts = column.num_replicas > 1 and not column.num_ps
    for found in results:
        assert ("do not come from backward()" in found["own"]) == parts
        assert column.num_ps or found["reduced"] == results[0]["reduced"]


@law("`run` is in replica context; a scope, and the function of `merge_call`, are not", contexts.cross_or_replica)
def test_contexts(column: Column, results: list[Any]) -> None:
    for found in results:
        assert found == {"in_scope": True, "steps": [[True, True]] * column.num_local, "outside": False}


@law("`run` calls the step once for each local replica, with its part of every `PerReplica`", contexts.calls_of_run)
def test_run(column: Column, results: list[Any]) -> None:
    for worker, found in enumerate(results):
        mine = numbers(column, worker)
        assert sorted(found["calls"]) == mine
        assert [step["number"] for step in found["steps"]] == mine
        assert [step["seen"] for step in found["steps"]] == [[7, 10 + one, 10 + one] for one in mine]
        assert {step["num"] for step in found["steps"]} == {column.num_replicas}
        assert found["is_per_replica"] and found["num_replicas_in_sync"] == column.num_replicas


@law("`strategy.extended` is not part of the API", contexts.has_extended)
def test_extended(column: Column, results: list[Any]) -> None:
    assert results == [False] * column.num_workers


@law("`distribute_values_from_function` calls once for each replica", contexts.values_from_function)
def test_values_from_function(column: Column, results: list[Any]) -> None:
    for number, value in steps(column, results):
        assert value == [number, column.num_replicas]


@law("`all_reduce` in a step: SUM, MEAN, MIN, MAX", contexts.replica_all_reduce, without=NO_COLLECTIVES)
def test_all_reduce(column: Column, results: list[Any]) -> None:
    n = column.num_replicas
    for _, found in steps(column, results):
        assert found["sum"] == [n * (n + 1) / 2, 2.0 * n]
        assert found["mean"] == [(n + 1) / 2, 2.0]
        assert found["min"] == [1.0, 2.0]
        assert found["max"] == [float(n), 2.0]


@law(
    "gradients pass through `all_reduce`: the sum over all replicas' losses",
    contexts.replica_all_reduce,
    without=NO_COLLECTIVES,
)
def test_gradient_of_all_reduce(column: Column, results: list[Any]) -> None:
    n = column.num_replicas
    for _, found in steps(column, results):
        assert found["gradient"] == [n * (n + 1) / 2, 0.0]


@law("`all_gather` in a step, of uneven lengths", contexts.replica_all_gather, without=NO_COLLECTIVES)
def test_all_gather(column: Column, results: list[Any]) -> None:
    expected = [float(one) for one in range(column.num_replicas) for _ in range(LENGTHS[one])]
    for _, found in steps(column, results):
        assert found == [expected]


@law("what needs other workers' replicas in a step is refused, not answered for one", contexts.collective_in_step)
def test_no_wrong_answer(column: Column, results: list[Any]) -> None:
    for found in results:
        if column is PS_SYNC:
            assert {one["error"] for one in found} == {"ConfigurationError"}
            assert all("MultiWorkerMirroredStrategy" in one["text"] for one in found)
        else:
            assert {one["error"] for one in found} == {"none"}


@law("`merge_call`: all replicas of the process meet, the function runs once, results go back", contexts.merged)
def test_merge_call(column: Column, results: list[Any]) -> None:
    for worker, found in enumerate(results):
        mine = numbers(column, worker)
        assert found["calls"] == [[True, mine]]
        assert found["steps"] == [{"sum": sum(one + 1 for one in mine), "doubled": 2 * one} for one in mine]


@law("weights written inside `merge_call` are those of every local replica after it", contexts.updates_in_merge)
def test_updates_in_merge_call(column: Column, results: list[Any]) -> None:
    assert results == [[1.5 * column.num_local] * column.num_local] * column.num_workers


@law(
    "a replica that leaves out a `merge_call`: an error that names both, no deadlock",
    contexts.early_return,
    without=ONE_LOCAL,
)
def test_early_return(column: Column, results: list[Any]) -> None:
    for worker, found in enumerate(results):
        first, *_, last = numbers(column, worker)
        assert found["error"] == "CollectiveError"
        assert (
            f"replica {first} is at synchronization point 1 of this step (merge_call of early_return" in found["text"]
        )
        assert f"replica {last} has ended its step after 0 synchronization points" in found["text"]


@law(
    "replicas at different `merge_call`s: an error that names both, no deadlock",
    contexts.different_merges,
    without=ONE_LOCAL,
)
def test_different_merges(column: Column, results: list[Any]) -> None:
    for found in results:
        assert found["error"] == "CollectiveError"
        assert ".one with" in found["text"] and ".other with" in found["text"]


@law(
    "replicas at different collectives: an error on every worker, no hang",
    contexts.different_collectives,
    without=NO_COLLECTIVES | cannot((*IN_ONE_PROCESS, PS_ASYNC), "There is one replica in sync, so it meets no other."),
)
def test_different_collectives(column: Column, results: list[Any]) -> None:
    for found in results:
        assert found["error"] == "CollectiveError"
        assert "same calls" in found["text"] and ("all_reduce" in found["text"] or "all_gather" in found["text"])


@law("an error in the function of `merge_call` is raised by `run`", contexts.error_in_merge)
def test_error_in_merge_call(column: Column, results: list[Any]) -> None:
    for found in results:
        assert found["error"] == "CollectiveError" and "broken on purpose" in found["text"]


@law("an error in one replica ends the others and is raised with its number", contexts.error_in_one, without=ONE_LOCAL)
def test_error_in_one(column: Column, results: list[Any]) -> None:
    for worker, found in enumerate(results):
        mine = numbers(column, worker)
        assert "lost on purpose" in found["text"]
        assert found["ended"] == mine
        assert found["notes"] == [f"raised in replica {mine[-1]} (cpu)"]


@law(
    "after such errors the strategy works",
    contexts.again_after,
    without=ONE_LOCAL | cannot(RING_2X2, "The other workers cannot know of it: the ring is broken, and says so."),
)
def test_again_after(column: Column, results: list[Any]) -> None:
    for found in results:
        assert found["errors"] == ["'lost on purpose'", "CollectiveError", "CollectiveError"]
        assert found["total"] == [column.num_replicas] * column.num_local


@law("`reduce` with axis None: across replicas, of structures too", contexts.reduced, without=NO_COLLECTIVES)
def test_reduce(column: Column, results: list[Any]) -> None:
    n = column.num_replicas
    total = n * (n + 1) // 2
    for found in results:
        assert found["SUM"] == {"x": [total, n], "n": total}
        assert found["MEAN"] == {"x": [total / n, 1.0], "n": total / n}
        assert found["MIN"] == {"x": [1.0, 1.0], "n": 1}
        assert found["MAX"] == {"x": [n, 1.0], "n": n}


@law(
    "`reduce` with axis 0: MEAN of a last batch split 4 + 2 divides by 6",
    contexts.reduced_over_batch,
    without=NO_COLLECTIVES,
)
def test_reduce_over_batch(column: Column, results: list[Any]) -> None:
    lengths = LENGTHS[: column.num_replicas]
    total = sum(length * (number + 1.0) for number, length in enumerate(lengths))
    for found in results:
        assert found["SUM"] == [total, total]
        assert found["MEAN"] == [pytest.approx(total / sum(lengths), rel=1e-6)] * 2


@law("`gather` concatenates, uneven lengths allowed", contexts.gathered, without=NO_COLLECTIVES)
def test_gather(column: Column, results: list[Any]) -> None:
    expected = [number for number in range(column.num_replicas) for _ in range(LENGTHS[number])]
    for found in results:
        assert found["columns"] == [expected]
        assert found["rows"] == [[number] for number in expected]


@law(
    "a scope sets no default device and no seed; `prepare` moves modules",
    contexts.no_default_device,
)
def test_no_default_device(column: Column, results: list[Any]) -> None:
    for found in results:
        assert found["device"] == "cpu" and found["same"]
        assert len(found["places"]) == len(found["devices"]) == column.num_local
        assert [place.split(":")[0] for place in found["places"]] == [one.split(":")[0] for one in found["devices"]]
