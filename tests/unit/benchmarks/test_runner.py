"""The runner: order of turns, medians and spreads, shape of a row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest

from benchmarks.runner import Case, Row, Sample, Value, run_cases, sum_up, turns
from benchmarks.table import format_number, format_table


def case_of(system: str, values: list[float | None], order: list[str]) -> Case:
    coming: Iterator[float | None] = iter(values)

    def measure() -> tuple[Sample, Mapping[str, str]]:
        order.append(system)
        return {"steps_per_s": next(coming)}, {"library": "1.0"}

    return Case.of_one_row({"benchmark": "ps", "system": system, "lane": None}, measure)


def test_turns_are_a_b_b_a() -> None:
    assert turns(2, 5) == [0, 1, 1, 0, 0, 1, 1, 0, 0, 1]
    assert turns(3, 2) == [0, 1, 2, 2, 1, 0]
    assert turns(1, 3) == [0, 0, 0]


def test_every_case_gets_as_many_samples_as_blocks() -> None:
    order: list[str] = []
    told: list[str] = []
    rows = run_cases(
        [case_of("a", [3.0, 1.0, 8.0], order), case_of("b", [5.0, 5.0, 5.0], order)],
        3,
        lambda identity, sample: told.append(str(identity["system"])),
    )
    assert order == told == ["a", "b", "b", "a", "a", "b"]
    assert rows[0].medians == {"steps_per_s": 3.0}
    assert rows[0].spreads == {"steps_per_s": (1.0, 8.0)}
    assert rows[1].spreads == {"steps_per_s": (5.0, 5.0)}
    assert rows[0].num_blocks == 3
    assert rows[0].versions == {"library": "1.0"}


def test_no_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        run_cases([], 0)


def test_one_measurement_may_give_several_rows() -> None:
    seconds = iter([1.0, 3.0, 2.0])

    def measure() -> tuple[list[Sample], Mapping[str, str]]:
        second = next(seconds)
        return [{"s": second}, {"s": 10 * second}], {}

    told: list[tuple[Value, float | None]] = []
    cases = [Case([{"bytes": 4}, {"bytes": 8}], measure)]
    rows = run_cases(cases, 3, lambda identity, sample: told.append((identity["bytes"], sample["s"])))
    assert [(row.identity["bytes"], row.medians["s"], row.spreads["s"]) for row in rows] == [
        (4, 2.0, (1.0, 3.0)),
        (8, 20.0, (10.0, 30.0)),
    ]
    assert told[:2] == [(4, 1.0), (8, 10.0)]


def test_a_case_must_give_a_sample_for_each_row() -> None:
    with pytest.raises(ValueError, match="shorter"):
        run_cases([Case([{"bytes": 4}, {"bytes": 8}], lambda: ([{"s": 1.0}], {}))], 1)


def test_a_metric_that_one_sample_lacks_is_unknown() -> None:
    row = sum_up({"system": "a"}, [{"x": 1.0, "y": 2.0}, {"x": None, "y": 4.0}], {})
    assert row.medians == {"x": None, "y": 3.0}
    assert row.spreads == {"x": None, "y": (2.0, 4.0)}


def test_an_error_in_a_sample_is_not_swallowed() -> None:
    def measure() -> tuple[Sample, Mapping[str, str]]:
        raise RuntimeError("the loss did not fall")

    with pytest.raises(RuntimeError, match="did not fall"):
        run_cases([Case.of_one_row({"system": "a"}, measure)], 1)


def test_a_row_is_one_flat_json_object() -> None:
    row = Row(
        {"benchmark": "ps", "system": "a"}, {"x": 2.0, "y": None}, {"x": (1.0, 3.0), "y": None}, 5, {"torch": "2"}
    )
    assert json.loads(json.dumps(row.as_json())) == {
        "benchmark": "ps",
        "system": "a",
        "x": 2.0,
        "y": None,
        "num_blocks": 5,
        "spread": {"x": [1.0, 3.0]},
        "versions": {"torch": "2"},
    }


def test_the_table_is_aligned_and_shows_what_is_unknown() -> None:
    spreads = {"x": (1.0, 3000.0), "y": None}
    rows = [
        Row({"system": "a"}, {"x": 2.0, "y": None}, spreads, 5, {}),
        Row({"system": "longer"}, {"x": 2.0, "y": None}, spreads, 5, {}),
    ]
    header, rule, first, second = format_table(rows).splitlines()
    assert header.split() == ["system", "x", "y"]
    assert set(rule) == {"-", " "}
    assert first.index("2.00 (1.00 to 3,000)") == second.index("2.00 (1.00 to 3,000)") == header.index("x")
    assert first.endswith("-")
    assert format_table([]) == ""


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1234567.8, "1,234,568"), (99.96, "100."), (0.01234, "0.0123"), (7.0, "7.00")]
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert format_number(value) == text
