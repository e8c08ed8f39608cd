"""Variables.

`sg.Variable` (SEMANTICS: "Contexts and values").
"""

from __future__ import annotations

from typing import Any

from tests.conformance.law import cannot, law, only
from tests.conformance.replicas import steps
from tests.conformance.scenarios import variables
from tests.conformance.strategies import CENTRAL_2, PARAMETER_SERVERS, Column

ON_SERVERS = cannot(
    PARAMETER_SERVERS,
    "Parameter servers hold the parameters of prepared models; a `Variable` in the scope is refused, with advice.",
)


def expected_of(aggregation: str, num_replicas: int) -> float:
    """What the numbers 1, 2, … of replicas become."""
    total = num_replicas * (num_replicas + 1) / 2
    return {"SUM": total, "MEAN": total / num_replicas, "ONLY_FIRST_REPLICA": 1.0}[aggregation]


@law(
    "NONE + assignment in a step of several replicas = error; with one replica it works",
    variables.unaggregated,
    without=ON_SERVERS,
)
def test_unaggregated(column: Column, results: list[Any]) -> None:
    for found in results:
        if column.num_replicas == 1:
            assert found == {"error": "none", "text": "", "value": 2.0}
        else:
            assert found["error"] == "ConfigurationError" and found["value"] == 1.0
            assert "'plain' was created without aggregation" in found["text"]


@law(
    "SUM, MEAN, ONLY_FIRST_REPLICA: `assign`, `assign_add`, `assign_sub` in a step",
    variables.written,
    without=ON_SERVERS,
)
def test_written(column: Column, results: list[Any]) -> None:
    for found in results:
        for case, values in found.items():
            aggregation, method = case.split()
            change = expected_of(aggregation, column.num_replicas)
            expected = {"assign": change, "assign_add": 10.0 + change, "assign_sub": 10.0 - change}[method]
            assert values == {"inside": [expected] * column.num_local, "after": expected}, case


@law("ONLY_FIRST_REPLICA counts steps, not replicas", variables.step_counter, without=ON_SERVERS)
def test_step_counter(column: Column, results: list[Any]) -> None:
    assert results == [3] * column.num_workers


@law("ON_READ: a value a replica, aggregated when read in cross-replica context", variables.on_read, without=ON_SERVERS)
def test_on_read(column: Column, results: list[Any]) -> None:
    for aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        mine = [found[aggregation]["inside"] for found in results]
        assert [value for _, value in steps(column, mine)] == [1.0 + one for one in range(column.num_replicas)]
        after = expected_of(aggregation, column.num_replicas)
        assert [found[aggregation]["after"] for found in results] == [after] * column.num_workers


@law(
    "ON_READ without aggregation cannot be read for several replicas",
    variables.on_read_unaggregated,
    without=ON_SERVERS,
)
def test_on_read_unaggregated(column: Column, results: list[Any]) -> None:
    for found in results:
        assert found["error"] == ("none" if column.num_replicas == 1 else "ConfigurationError")


@law("an assignment outside of replicas is seen by all", variables.assigned_outside, without=ON_SERVERS)
def test_assigned_outside(column: Column, results: list[Any]) -> None:
    for number, value in steps(column, [found["inside"] for found in results]):
        assert value == [3.0, 1.0 + number]
    for found in results:
        assert found["after"] == [3.0, (column.num_replicas + 1) / 2, 12.0]


@law("initial values come from the lead", variables.initial_values, without=ON_SERVERS)
def test_initial_values(column: Column, results: list[Any]) -> None:
    assert [found["mine"] for found in results] == [100.0, 101.0][: column.num_workers]  # they would differ
    for found in results:
        assert found["inside"] == [[100.0, 100.0]] * column.num_local


@law("initial weights come from the lead", variables.initial_weights)
def test_initial_weights(column: Column, results: list[Any]) -> None:
    assert [found["mine"] for found in results] == [100.0, 101.0][: column.num_workers]
    for found in results:
        assert found["inside"] == [100.0] * column.num_local


@law("a variable created inside a step of several replicas is refused", variables.in_step)
def test_in_step(column: Column, results: list[Any]) -> None:
    for found in results:
        if column.num_replicas > 1 or column in PARAMETER_SERVERS:
            assert found["error"] == "ConfigurationError" and "'late'" in found["text"]
        else:
            assert found["error"] == "none"


@law(
    "a trainable variable is stepped with the gradient of all replicas",
    variables.trainable,
    without=ON_SERVERS
    | cannot(CENTRAL_2, "Replicas share its one copy, so that none of them can have a gradient of it."),
)
def test_trainable(column: Column, results: list[Any]) -> None:
    # d/dw and d/dscale of mean(w · scale · number) at w = 1, scale = 2
    mean = (column.num_replicas + 1) / 2
    for found in results:
        assert found == [[1.0 - 2.0 * mean, 2.0 - mean]] * column.num_local


@law(
    "parameter servers refuse a variable in the scope, and say what to do",
    variables.created,
    without=only(PARAMETER_SERVERS),
)
def test_created(column: Column, results: list[Any]) -> None:
    for found in results:
        assert found["error"] == "ConfigurationError"
        assert "'metric'" in found["text"] and "outside of the scope" in found["text"]
