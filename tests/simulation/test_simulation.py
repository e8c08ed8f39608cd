"""A small share of what ``make simulate`` does, and that it can fail."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.simulation.cluster import MEMORY
from tests.simulation.mutations import MUTATIONS

NUM_SCHEDULES = 2000
"""Two minutes of a quiet processor, most take less than one; a count, so that the same are run on a slow one."""


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own: what stands in the place of threads is in no other test's way."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.thorough  # `.ci/run` runs some thousands each day; a process starts in as long as a hundred of them take
@pytest.mark.parametrize("form", ["table", "models", "fit", "ring"])
def test_schedules_of_each_form_hold_every_invariant(form: str) -> None:
    done = simulate("--first", "1", "--seeds", "3", "--form", form)
    assert done.returncode == 0 and "3 schedules, none failed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def test_a_schedule_holds_every_invariant(tmp_path: pathlib.Path) -> None:
    """It fits beside parameter servers."""
    killed = subprocess.Popen(["true"])
    killed.wait()
    left, used = (pathlib.Path(MEMORY, f"simulation-{pid}-{tmp_path.name}") for pid in (killed.pid, os.getpid()))
    left.mkdir()
    used.mkdir()
    done = simulate("--seed", "7")
    assert done.returncode == 0 and "nothing failed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    assert used.exists() and not left.exists()
    used.rmdir()


@pytest.mark.thorough
def test_a_seed_tells_the_same_story_twice() -> None:
    first, second = simulate("--seed", "7"), simulate("--seed", "7")
    assert first.returncode == 0 and "nothing failed" in first.stdout, first.stdout[-4000:] + first.stderr[-2000:]
    assert first.stdout == second.stdout and " starts" in first.stdout


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_broken_protocol_is_found_in_few_schedules(name: str) -> None:
    forms = {"rows": "table", "copy": "copies", "fit:": "fit", "models:": "models", "ring:": "ring"}
    form = forms.get(name.partition(" ")[0], "")
    found = simulate("--first", "1", "--seeds", str(NUM_SCHEDULES), "--mutation", name, "--form", form)
    assert found.returncode == 1 and "failed:" in found.stdout, found.stdout[-2000:] + found.stderr[-2000:]
