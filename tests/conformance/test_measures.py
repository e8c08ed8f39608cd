"""Measures: every moment of a loop belongs to one phase.

The phases are those of ``stratagem/measuring/measures.py``, as ``status --json`` and the others have them.
"""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.measuring import measures
from tests.conformance.law import cannot, law
from tests.conformance.scenarios import phases
from tests.conformance.strategies import TPU, Column


@law(
    "phases of a step: they add up to the loop's time; forward, backward and optimizer are told apart",
    phases.spent,
    without=cannot(TPU, "XLA computes when a graph is dispatched: the time of `backward()` is that of tracing."),
)
def test_phases(column: Column, results: list[dict[str, Any]]) -> None:
    for one in results:
        values, steps = one["values"], one["steps"] * column.num_local
        whole = sum(values.get(phase, 0.0) for phase in measures.PHASES)
        assert whole == pytest.approx(one["elapsed_s"], rel=0.01, abs=0.01)  # another may run between two clocks
        if not steps:  # of asynchronous workers the others may have taken every unit
            continue
        assert values[measures.BACKWARD] >= 0.99 * steps * phases.BACKWARD_S, values
        assert values[measures.FORWARD] >= 0.99 * steps * phases.FORWARD_S, values
        assert values[measures.SCRIPT] >= 0.99 * steps * phases.REST_S, values
        assert values[measures.OPTIMIZER] > 0
    assert sum(one["steps"] for one in results) >= phases.NUM_STEPS
