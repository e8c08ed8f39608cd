"""Connections that break, or go silent, between processes that live: nobody restarts, no update is lost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Finished
from tests.cluster.test_exactly_once import check_counts
from tests.cluster.test_faults import Start

TASKS = ("worker:0", "worker:1", "ps:0", "ps:1")


def run(cluster: Start, chaos: list[str], out: Path, epochs: int) -> Finished:
    """Two workers and two ps that count examples; all that was asked for happened, and nobody was started again."""
    script = ("--examples", 1000, "--epochs", epochs, "--pause-s", 0.05, "--out", out)
    done: Finished = cluster(2, 2, "count_examples.py", *script, flags=["--chaos", "; ".join(chaos)]).succeed()
    fired: list[dict[str, Any]] = done.summary["chaos"]
    assert len(fired) == len(chaos) and all("after_s" in each for each in fired), fired
    assert done.summary["restarts"] == done.summary["updates_lost"] == 0, done.stderr
    assert "is lost" not in done.stderr.partition("The job ends")[0], done.stderr
    check_counts(out, epochs)
    return done


@pytest.mark.parametrize("num_resets", [pytest.param(number, marks=pytest.mark.thorough) for number in (1, 20)])
def test_connections_to_the_chief_that_are_reset_for_a_second_cost_nothing(
    cluster: Start, tmp_path: Path, num_resets: int
) -> None:
    chance, at_s, chaos = random.Random(num_resets), -2.0, []
    for _ in range(num_resets):
        at_s += 3.0 + chance.random()  # two in a row would be one that lasts longer
        chaos += [f"reset {task}-chief@{at_s:.2f}s for=1s" for task in TASKS]
    done = run(cluster, chaos, tmp_path / "out.pt", epochs=1 + num_resets * 12 // 20)  # of 6 s each, or more
    assert sum(each["connections"] for each in done.summary["chaos"]) >= len(chaos), done.summary["chaos"]


@pytest.mark.thorough
def test_a_ps_that_is_cut_off_for_eight_seconds_loses_nothing(cluster: Start, tmp_path: Path) -> None:
    chaos = [f"cut worker:{index}-ps:1@1s for=8s" for index in range(2)]
    done = run(cluster, chaos, tmp_path / "out.pt", epochs=1)
    assert all(each["connections"] for each in done.summary["chaos"]), done.summary["chaos"]
    assert max(each["standstill_s"] for each in done.summary["chaos"]) > 2.0, "it was not cut off"


@pytest.mark.thorough
def test_a_chief_that_is_told_to_leave_comes_back_to_the_same_tasks(cluster: Start, tmp_path: Path) -> None:
    script = ("--examples", 1000, "--epochs", 1, "--pause-s", 0.05, "--out", tmp_path / "out.pt")
    done: Finished = cluster(2, 2, "count_examples.py", *script, flags=["--chaos", "stop chief@1s"]).finish()
    assert done.code == 0 and "the job continues with the chief that replaces it" in done.stderr, done.stderr
    assert done.summary["tasks"]["chief:0"]["exit_codes"] == [143, 0], done.summary
    assert done.stderr.count(" resumed at ") == 4 and "Traceback" not in done.stderr, done.stderr
    assert (done.summary["restarts"], done.summary["updates_lost"]) == (1, 0), done.summary
    check_counts(tmp_path / "out.pt", 1)
