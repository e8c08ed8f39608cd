"""Parameter servers die one after the other, and not one acknowledged update is lost."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg
from tests.cluster.test_exactly_once import check_counts

Start = Callable[..., Any]
NUM_KILLS = int(os.environ.get("TEST_KILLS", "30"))
"""Of the thorough test; 200 take five minutes."""


def are_copied(log: str, num_ps: int) -> bool:
    """Whether another ps has a whole copy of each."""
    live: dict[str, str] = {}
    copied: set[str] = set()
    for task, number, holder, of, of_number in re.findall(
        r"(ps:\d) \(incarnation (\d+)\) joined|\[(ps:\d)\].* Keeping a copy of (ps:\d) \(incarnation (\d+)\)", log
    ):
        if task:
            live[task] = number
            copied -= {task, f"ps:{(int(task[3:]) - 1) % num_ps}"}
        elif live[of] == of_number and holder != of:
            copied.add(of)
    return len(copied) == num_ps


def kill_in_turns(job: Any, num_kills: int, num_ps: int = 2) -> None:
    for kill in range(num_kills):
        task = f"ps:{kill % num_ps}"
        job.wait_for(lambda: are_copied(job.stderr, num_ps), f"copies of all ps before kill {kill}")
        pid = job.pid_of(task)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        done = kill + 1
        job.wait_for(lambda done=done: len(re.findall(r"resumes from step", job.stderr)) == done, f"{task} to go on")


SOAK = [pytest.mark.thorough, pytest.mark.timeout(60 + 20 * NUM_KILLS)]


@pytest.mark.parametrize(
    ("num_kills", "arguments"),
    [
        (3, ()),
        pytest.param(4, ("--table",), marks=pytest.mark.thorough),
        pytest.param(NUM_KILLS, (), marks=SOAK),
    ],
)
def test_no_update_is_lost_when_a_ps_is_killed(
    cluster: Start, tmp_path: Path, num_kills: int, arguments: tuple[str, ...]
) -> None:
    stop = tmp_path / "stop"
    job = cluster(
        2,
        2,
        "count_examples.py",
        *("--examples", 400, "--pause-s", 0.02, "--until", stop, *arguments),
        flags=["--ps-replicas", "2", "--max-restarts", str(num_kills)],
    )
    job.wait_for(lambda: "Checkpoint of step 0" in job.stderr, "initial values")  # else a worker gives them again
    kill_in_turns(job, num_kills)
    stop.touch()
    done = job.succeed()
    assert (done.summary["restarts"], done.summary["updates_lost"]) == (num_kills, 0), done.stderr
    counted = re.findall(r"resumes from step \d+, of which ps:\d had a copy: 0 updates lost", done.stderr)
    assert len(counted) == num_kills
    # The last checkpoint, not the lead's copies: the other worker may begin one more epoch.
    state = sg.load_checkpoint(done.summary["checkpoint"])
    epochs = -int(next(iter(state.values())).flatten()[0])
    assert epochs > 0
    check_counts(state, epochs)


@pytest.mark.thorough
def test_two_ps_that_cannot_reach_one_another_hold_nobody_up(cluster: Start, tmp_path: Path) -> None:
    """Cut off for longer than a silent backup is waited for: it drops its copy, and makes it anew afterwards."""
    stop = tmp_path / "stop"
    arguments = ("--examples", 400, "--pause-s", 0.02, "--until", stop)
    chaos = ["--chaos", "cut ps:0-ps:1@step=150 for=14s"]
    job = cluster(2, 2, "count_examples.py", *arguments, flags=["--ps-replicas", "2", "--max-restarts", "0", *chaos])
    job.wait_for(lambda: job.stderr.count("Dropping the copy of") == 2, "both copies to be dropped")
    copies = job.stderr.count("Keeping a copy of")
    job.wait_for(lambda: job.stderr.count("Keeping a copy of") >= copies + 2, "copies after the cut")
    stop.touch()
    done = job.succeed()
    assert (done.summary["restarts"], done.summary["updates_lost"]) == (0, 0), done.stderr
    assert done.summary["chaos"][0]["standstill_s"] < 12, "shorter than the cut"
    state = sg.load_checkpoint(done.summary["checkpoint"])
    check_counts(state, -int(next(iter(state.values())).flatten()[0]))
