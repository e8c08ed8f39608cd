"""Processes that die, requests that come twice, updates that are torn: the job goes on and nothing counts twice."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.test_exactly_once import LONG, check_counts, wait
from tests.cluster.test_synchronous import check_equal, one_process

Start = Callable[..., Any]


@pytest.mark.thorough
def test_resent_updates_are_applied_once(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    faults = [{"task": f"worker:{index}", "step": 0, "action": "resend"} for index in (0, 1)]
    done = cluster(2, 2, "count_examples.py", "--epochs", 2, "--out", out, faults=faults).succeed()
    resends = sum(int(number) for number in re.findall(r"(\d+) resends", done.stderr))
    assert resends >= 100, resends
    check_counts(out, 2)


@pytest.mark.thorough
def test_a_torn_update_is_completed_by_the_next_worker(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    faults = [{"task": "worker:1", "step": 4, "action": "tear"}, wait("worker:0")]
    done = cluster(2, 2, "count_examples.py", *LONG, "--out", out, faults=faults).finish()
    assert "fault-0" in done.faults
    assert done.code == 0, done.stderr
    assert done.summary["tasks"]["worker:1"]["exit_codes"] == [-9, 0], done.summary
    check_counts(out, 1)


def test_a_killed_ps_restarts_from_its_checkpoint(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    faults = [{"task": "worker:0", "step": 10, "action": "kill", "target": "ps:1"}, wait("worker:1")]
    done = cluster(2, 2, "count_examples.py", *LONG, "--out", out, faults=faults).finish()
    assert "fault-0" in done.faults
    assert done.code == 0, done.stderr
    lost = done.summary["updates_lost"]
    assert lost > 0
    printed = [int(number) for number in re.findall(r"ps:1 .* (\d+) (?:more )?updates", done.stderr)]
    assert sum(printed) == lost, done.stderr
    # Every update that ps:1 lost is missing from its variable, and only those: 4 examples an update.
    state = torch.load(out, weights_only=True)
    missing = sum(float((value + 1).sum()) for value in state.values())
    assert missing == 4 * lost, (missing, lost)


@pytest.mark.thorough
def test_a_ps_killed_before_its_variables_are_there(cluster: Start) -> None:
    faults = [{"task": "worker:1", "step": -1, "action": "kill", "target": "ps:1"}]
    done = cluster(2, 2, "count_examples.py", "--pause-s", 0.02, faults=faults).finish()
    assert done.faults == ["fault-0"]
    assert done.code == 0, done.stderr
    assert done.summary["tasks"]["ps:1"]["exit_codes"] == [-9, 0], done.summary


def test_a_killed_chief_restarts_from_its_journal(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    faults = [{"task": "worker:0", "step": 10, "action": "kill", "target": "chief:0"}, wait("worker:1")]
    done = cluster(2, 2, "count_examples.py", *LONG, "--out", out, faults=faults).finish()
    assert "fault-0" in done.faults
    assert done.code == 0, done.stderr
    assert done.summary["tasks"]["chief:0"]["exit_codes"] == [-9, 0], done.summary
    check_counts(out, 1)


@pytest.mark.thorough
def test_synchronous_worker_killed(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    faults = [{"task": "worker:2", "step": 5, "action": "kill"}]
    job = cluster(3, 2, "train_small.py", "--epochs", 4, "--out", out, flags=["--staleness", "0"], faults=faults)
    done = job.finish()
    assert done.faults == ["fault-0"]
    assert done.code == 0, done.stderr
    assert done.summary["examples"] == 4 * 50
    state = torch.load(out, weights_only=True)
    assert all(bool(torch.isfinite(value).all()) for value in state.values())


def test_synchronous_ps_killed_rolls_back_and_equals_one_process(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    faults = [{"task": "worker:0", "step": 7, "action": "kill", "target": "ps:0"}]
    # One epoch, longer than the way to the first checkpoint: what came after it is computed again.
    arguments = ["--epochs", 1, "--examples", 200]
    job = cluster(2, 2, "train_small.py", *arguments, "--out", out, flags=["--staleness", "0"], faults=faults)
    expected = one_process(tmp_path, *arguments)
    done = job.finish()
    assert done.faults == ["fault-0"]
    assert done.code == 0, done.stderr
    check_equal(expected, out)


@pytest.mark.thorough
def test_bounded_staleness_with_a_slow_worker(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    faults = [{"task": "worker:1", "step": step, "action": "slow", "seconds": 0.2} for step in range(4)]
    job = cluster(2, 2, "count_examples.py", "--epochs", 2, "--out", out, flags=["--staleness", "2"], faults=faults)
    job.succeed()
    check_counts(out, 2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_ps", "flags", "words"),
    [
        (0, [], r"in \w+ "),
        (1, ["--staleness", "0"], r"to deliver their part of step \d+"),
    ],
    ids=["ring", "staleness 0"],
)
def test_a_worker_that_is_slow_is_named_while_the_others_wait(
    cluster: Start, num_ps: int, flags: list[str], words: str
) -> None:
    faults = [{"task": "worker:1", "step": 3, "action": "slow", "seconds": 8}]
    done = cluster(2, num_ps, "train_small.py", "--epochs", 1, flags=flags, faults=faults).finish()
    assert (done.code, done.faults) == (0, ["fault-0"]), done.stderr
    assert re.search(rf"worker:0 live step \d+, has waited \d+ s for worker:1 {words}", done.stderr), done.stderr
    assert "worker:1 live step" not in done.stderr, "it waits for nobody"
