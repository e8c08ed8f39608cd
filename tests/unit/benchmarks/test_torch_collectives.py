"""The ``collectives`` benchmark: a small job of each system, whose values are compared."""

from __future__ import annotations

import pytest

from benchmarks.collectives.torch_cases import collectives_cases
from benchmarks.collectives.torch_job import COLLECTIVES


@pytest.mark.parametrize("system", [pytest.param("gloo", marks=pytest.mark.thorough), "stratagem"])
def test_a_small_job(system: str) -> None:
    lanes = [] if system == "gloo" else ["shm"]
    (case,) = collectives_cases(2, [4096, 65536], lanes, gloo=system == "gloo")
    assert [(row["collective"], row["bytes"]) for row in case.identities] == [
        (name, size) for name in COLLECTIVES for size in (4096, 65536)
    ]
    samples, versions = case.measure()
    assert len(samples) == len(case.identities) and "torch" in versions
    assert all(value is not None and value > 0 for sample in samples for value in sample.values())
