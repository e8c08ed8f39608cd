"""sg.Model with real processes: a ring equals one process and goes on after a crash; parameter servers train too.

Tolerance: 1e-5 relative and absolute after 21 updates in float32; sums of slices associate differently.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stratagem as sg
from tests import forks

Start = Callable[..., Any]
SCRIPTS = Path(__file__).parent / "scripts"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    out = tmp_path_factory.mktemp("alone") / "one"
    command = [sys.executable, str(SCRIPTS / "fit.py"), "--strategy", "one", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parents[2])}
    forks.run(command, check=True, timeout=240, env=environment)
    return news(out, 0), torch.load(f"{out}.pt", weights_only=True)


def news(out: Path, worker: int) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(Path(f"{out}.worker:{worker}").read_text())
    return read


def check_equal(one: dict[str, Any], ring: dict[str, Any]) -> None:
    assert ring["history"].keys() == one["history"].keys()
    for name, values in one["history"].items():
        assert ring["history"][name] == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE), name
    assert ring["evaluation"] == pytest.approx(one["evaluation"], rel=TOLERANCE)
    torch.testing.assert_close(
        torch.tensor(ring["prediction"]), torch.tensor(one["prediction"]), rtol=TOLERANCE, atol=TOLERANCE
    )


def test_a_ring_has_the_history_of_one_process_on_every_worker(
    cluster: Start, tmp_path: Path, alone: tuple[dict[str, Any], dict[str, torch.Tensor]]
) -> None:
    out = tmp_path / "ring"
    done = cluster(2, 0, "fit.py", "--out", out, "--checkpoints", tmp_path / "checkpoints").succeed()
    check_equal(alone[0], news(out, 0))
    assert news(out, 1) == news(out, 0)
    for name, value in torch.load(f"{out}.pt", weights_only=True).items():
        torch.testing.assert_close(value, alone[1][name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    assert names[-3:] == ["ckpt_1", "ckpt_2", "ckpt_3"]
    assert len(names) > 3 and all(name.startswith("best-") for name in names[:-3])
    lines = [line for line in done.stderr.splitlines() if "epoch 3/3" in line]
    assert len(lines) == 1 and "worker:0" in lines[0]  # the lead alone shows progress
    assert done.summary["examples"] == 240  # evaluating is not training


def test_a_killed_ring_goes_on_at_its_step_and_one_worker_stops_all(
    cluster: Start, tmp_path: Path, alone: tuple[dict[str, Any], dict[str, torch.Tensor]]
) -> None:
    arguments = ["--out", tmp_path / "ring", "--backup", tmp_path / "backup"]
    fault = {"task": "worker:1", "step": 11, "action": "kill"}
    first = cluster(2, 0, "fit.py", *arguments, flags=["--max-restarts", "0"], faults=[fault]).finish()
    assert first.code != 0 and first.faults, first.stderr
    assert (tmp_path / "backup").exists()
    cluster(2, 0, "fit.py", *arguments, "--epochs", 5, "--stop-on-one", 2, "--keep-backup").succeed()
    second = [news(tmp_path / "ring", worker) for worker in range(2)]
    for ring in second:
        assert ring["is_resumed"] and ring["has_backup"]
        assert ring["num_steps"] == 21
        check_equal(alone[0], ring)
    cluster(2, 0, "fit.py", *arguments, "--epochs", 5).succeed()  # nothing is left to do
    for worker, ring in enumerate(second):
        assert news(tmp_path / "ring", worker) == {**ring, "has_backup": False}


@pytest.mark.thorough
def test_parameter_servers_train_and_their_checkpoint_evaluates_elsewhere(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "ps"
    arguments = ["--out", out, "--epochs", 8, "--checkpoints", tmp_path / "checkpoints"]
    cluster(2, 2, "fit.py", *arguments).succeed()
    both = [news(out, worker) for worker in range(2)]
    assert sum(one["num_steps"] for one in both) == 8 * 7  # each batch of an epoch on one worker
    for name in ("history", "evaluation"):
        assert both[0][name] == both[1][name]
    for one in both:
        losses = one["history"]["val_loss"]
        assert len(losses) == len(one["history"]["loss"]) and losses[-1] < losses[0]
    newest = sg.load_checkpoint(tmp_path / "checkpoints" / "ckpt_8")
    assert newest["0.weight"].shape == (16, 7)


def test_a_model_checkpoint_that_may_not_save_on_parameter_servers_is_refused_before_the_first_step(
    cluster: Start, tmp_path: Path
) -> None:
    flags = ["--checkpoint-roots", str(tmp_path / "allowed"), "--max-restarts", "0"]
    arguments = ["--out", tmp_path / "ps", "--checkpoints", tmp_path / "elsewhere"]
    done = cluster(1, 1, "fit.py", *arguments, flags=flags).finish()
    assert done.code != 0
    assert "ForbiddenError: checkpoints may lie below" in done.stderr
    assert done.summary["steps"] == 0, done.stderr
