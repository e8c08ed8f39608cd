"""The ``collectives`` benchmark: a small job of each system, whose values are compared."""

from __future__ import annotations

import os

import pytest

from benchmarks.collectives.calls import COLLECTIVES
from benchmarks.collectives.torch_cases import collectives_cases
from benchmarks.peers import MPI
from benchmarks.runner import Case


def check(case: Case, package: str) -> None:
    assert [(row["collective"], row["bytes"]) for row in case.identities] == [
        (name, size) for name in COLLECTIVES for size in (4096, 65536)
    ]
    samples, versions = case.measure()
    assert len(samples) == len(case.identities) and package in versions
    assert all(value is not None and value > 0 for sample in samples for value in sample.values())


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("system", [pytest.param("gloo", marks=pytest.mark.thorough), "stratagem"])
def test_a_small_job(system: str) -> None:
    lanes = [] if system == "gloo" else ["shm"]
    (case,) = collectives_cases(2, [4096, 65536], lanes, gloo=system == "gloo")
    check(case, "torch")


def test_a_small_job_of_open_mpi_over_each_lane() -> None:
    if (python := MPI.find(None, os.environ, required=False)) is None:
        pytest.skip("needs mpirun, and STRATAGEM_MPI_PYTHON for an interpreter with mpi4py")
    cases = collectives_cases(2, [4096, 65536], [], gloo=False, mpi_python=python)
    assert [case.identities[0]["lane"] for case in cases] == ["shm", "tcp"]
    for case in cases:
        check(case, "openmpi")
