"""Jobs that are told to end, and go on: real processes, real signals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Start = Callable[..., Any]


def weights(path: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return loaded


def at(step: int, action: str, target: str, task: str = "worker:0") -> dict[str, Any]:
    return {"task": task, "step": step, "action": action, "target": target}


def train(cluster: Start, folder: Path, by: str, **options: Any) -> Any:
    """One job of two workers; another one with the same folder goes on where it was."""
    arguments = ["--by", by, "--folder", folder, "--out", folder.with_suffix(".pt")]
    return cluster(2, 0, "train_preempted.py", *arguments, **options).finish()


def check_same(found: Path, expected: Path) -> None:
    one, other = weights(found), weights(expected)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.thorough
def test_a_ring_interrupted_three_times_ends_with_the_weights_of_one_that_was_not(
    cluster: Start, tmp_path: Path
) -> None:
    done = train(cluster, tmp_path / "whole", "hand")
    assert done.code == 0, done.stderr
    schedule = [
        at(2, "terminate", "worker:1", "worker:1"),
        at(9, "terminate", "chief:0"),
        at(17, "kill", "chief:0"),
        at(17, "terminate", "launcher"),
    ]
    first = train(cluster, tmp_path / "parts", "hand", faults=schedule)
    assert first.code == 143, first.stderr
    assert first.faults == ["fault-0", "fault-1", "fault-2", "fault-3"], first.stderr
    assert first.stderr.count("restarting the job") == 1, first.stderr
    assert first.summary["tasks"]["chief:0"]["exit_codes"][:3] == [143, 143, -9], "with its ring, then alone"
    for worker in range(2):
        assert first.summary["tasks"][f"worker:{worker}"]["exit_codes"] == [143, 143], first.stderr
    assert not (tmp_path / "parts.pt").exists()
    second = train(cluster, tmp_path / "parts", "hand")
    assert second.code == 0 and "Resuming after" in second.stderr, second.stderr
    check_same(tmp_path / "parts.pt", tmp_path / "whole.pt")


@pytest.mark.thorough
def test_a_ring_with_min_workers_is_told_and_has_not_failed(cluster: Start, tmp_path: Path) -> None:
    schedule = [at(2, "terminate", "worker:1", "worker:1"), at(12, "terminate", "launcher")]
    done = train(cluster, tmp_path / "a", "fit", faults=schedule, flags=["--min-workers", "1"])
    assert done.code == 143 and done.faults == ["fault-0", "fault-1"], done.stderr
    assert {task: ended["exit_codes"] for task, ended in done.summary["tasks"].items()} == {
        task: [143, 143] for task in ("chief:0", "worker:0", "worker:1")
    }, done.stderr


@pytest.mark.thorough
def test_a_ring_that_fits_is_told_and_killed_and_ends_with_the_same_weights(cluster: Start, tmp_path: Path) -> None:
    done = train(cluster, tmp_path / "whole", "fit")
    assert done.code == 0, done.stderr
    schedule = [at(3, "terminate", "worker:0"), at(12, "kill", "worker:1", "worker:1")]
    parts = train(cluster, tmp_path / "parts", "fit", faults=schedule)
    assert parts.code == 0, parts.stderr
    assert parts.faults == ["fault-0", "fault-1"], parts.stderr
    assert parts.summary["tasks"]["worker:1"]["exit_codes"] == [143, -9, 0]
    assert parts.stderr.count("restarting the job") == 2
    check_same(tmp_path / "parts.pt", tmp_path / "whole.pt")
    assert not (tmp_path / "parts").exists()  # the backup is removed


def test_a_worker_of_parameter_servers_is_told_and_the_others_go_on(cluster: Start, tmp_path: Path) -> None:
    arguments = ["--by", "fit", "--folder", tmp_path / "a", "--out", tmp_path / "a.pt"]
    told = at(3, "terminate", "worker:1", "worker:1")
    first = {"task": "worker:0", "step": 1, "action": "wait", "for": 0}  # else it may take all batches itself
    done = cluster(2, 1, "train_preempted.py", *arguments, faults=[told, first]).succeed()
    assert done.faults == ["fault-0", "fault-1"]
    assert done.summary["tasks"]["worker:0"]["exit_codes"] == [0]
    assert done.summary["tasks"]["worker:1"]["exit_codes"] == [143, 0]
    assert "worker:1: preempted" in done.stderr
    assert weights(tmp_path / "a.pt").keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}


@pytest.mark.thorough
def test_a_worker_of_parameter_servers_has_what_its_script_saved_last(cluster: Start, tmp_path: Path) -> None:
    """The batch of the signal has had its update and does not come again; that is after what was saved last."""
    arguments = ["--by", "hand", "--folder", tmp_path / "saved", "--out", tmp_path / "out.pt", "--every", 2]
    done = cluster(1, 1, "train_preempted.py", *arguments, faults=[at(4, "terminate", "worker:0")]).succeed()
    assert done.faults == ["fault-0"] and done.summary["tasks"]["worker:0"]["exit_codes"] == [143, 0], done.stderr
    assert "started again has steps as the script saved them last" in done.stderr
    assert "Resuming after 4 calls of run" in done.stderr and "23 steps, 23 calls" in done.stdout, done.stderr
    assert "Checkpoint of step 24: " in done.stderr
