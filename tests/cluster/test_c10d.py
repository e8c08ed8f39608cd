"""torch's own tests of its backends, run on ours. What they show, what does not apply: docs/design/distributed.md."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "c10d.py"
JOB_S = 1500.0

pytestmark = pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="torch's tests need expecttest")


def outcomes(*arguments: str) -> dict[str, str]:
    """Names of tests to passed, failed or skipped."""
    command = [sys.executable, str(SCRIPT), *arguments]
    job = subprocess.run(command, capture_output=True, text=True, timeout=JOB_S, check=False)
    assert job.returncode == 0, job.stderr[-5000:]
    lines = [line.split() for line in job.stdout.splitlines()]
    return {line[1]: line[0] for line in lines if line and line[0] in ("passed", "failed", "skipped")}


@pytest.mark.thorough
@pytest.mark.timeout(2 * JOB_S)
@pytest.mark.parametrize("ranks", [3, 4])
def test_all(ranks: int) -> None:
    found = outcomes("--ranks", str(ranks))
    assert [name for name, outcome in found.items() if outcome == "failed"] == []
    assert sum(outcome == "passed" for outcome in found.values()) >= 110


@pytest.mark.thorough
def test_all_to_all_which_torch_tries_with_mpi_alone() -> None:
    names = [
        "test_all_to_all",
        "test_all_to_all_complex",
        "test_all_to_all_full_group",
        "test_all_to_all_group",
        "test_all_to_all_single_equal_split",
        "test_all_to_all_single_equal_split_complex",
        "test_all_to_all_single_equal_split_full_group",
        "test_all_to_all_single_equal_split_group",
        "test_all_to_all_single_unequal_split",
        "test_all_to_all_single_unequal_split_complex",
        "test_all_to_all_single_unequal_split_full_group",
        "test_all_to_all_single_unequal_split_group",
    ]
    assert outcomes("--like", "mpi", *names) == dict.fromkeys(names, "passed")
