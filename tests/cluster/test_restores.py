"""Going back to a checkpoint under parameter servers, whoever is slower than the others, and whenever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]


def restore(start: Start, folder: Path, staleness: str, restores: int, *arguments: object) -> None:
    job = start(
        *(2, 1, "restore_often.py", "--folder", folder, "--restores", restores, *arguments),
        flags=["--staleness", staleness],
    )
    done = job.succeed()
    assert f"restored {restores} times" in done.stdout
    assert "what was restored has 0: they are rolled back to it" in done.stderr


@pytest.mark.thorough
def test_workers_linger_in_turn_after_each_agreement(cluster: Start, tmp_path: Path) -> None:
    restore(cluster, tmp_path, "0", 4)


@pytest.mark.thorough
@pytest.mark.parametrize(("staleness", "stopped"), [("0", "worker:1"), ("0", "worker:0"), ("inf", "worker:1")])
def test_a_worker_is_stopped_now_and_then(cluster: Start, tmp_path: Path, staleness: str, stopped: str) -> None:
    restore(cluster, tmp_path, staleness, 20, "--stopped", stopped)


@pytest.mark.thorough
def test_a_ps_that_is_lost_comes_back_with_what_was_loaded(cluster: Start, tmp_path: Path) -> None:
    """It came back with the values of before, which the first checkpoint had: one half of the model was another."""
    folder = tmp_path / "checkpoints"
    flags = ["--checkpoint-dir", folder, "--chaos", "kill ps:1@step=20"]
    done = cluster(2, 2, "loads_late.py", folder, flags=[str(flag) for flag in flags]).succeed()
    assert "ps:1 restored step 0" in done.stderr
    again = cluster(2, 2, "loads_late.py", folder, flags=["--checkpoint-dir", str(folder)]).succeed()
    assert "the job continues with 120 updates, and what this script loads replaces them" in again.stderr


def test_what_is_not_loaded_stays_as_other_workers_have_trained_it(cluster: Start) -> None:
    """The lead gave the ps all of its own values, which were older: what others had trained was gone."""
    cluster(2, 2, "loads_a_part.py").succeed()


@pytest.mark.thorough
def test_a_script_whose_last_save_is_older_than_the_chief_s_goes_on_with_the_chief_s(
    cluster: Start, tmp_path: Path
) -> None:
    """The updates since its last save were undone, and their examples, which the chief has counted, did not come
    again."""
    folder = str(tmp_path / "checkpoints")
    for num_epochs, words in ((1, "[1.0] batches: 8"), (2, "[2.0] batches: 11")):
        done = cluster(1, 1, "saves_early.py", folder, num_epochs, flags=["--checkpoint-dir", folder]).succeed()
        assert f"each example: {words}" in done.stdout
    assert "the job continues with 8 updates, what was restored has 3" in done.stderr


def test_a_manager_that_may_not_save_says_so_before_the_first_step(cluster: Start, tmp_path: Path) -> None:
    flags = ["--checkpoint-roots", str(tmp_path / "allowed"), "--max-restarts", "0"]
    done = cluster(1, 1, "saves_early.py", tmp_path / "elsewhere", 0, flags=flags).succeed()
    assert "CheckpointManager.save() will fail: checkpoints may lie below" in done.stderr
