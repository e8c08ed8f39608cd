"""Staleness 0: workers × ps give the numbers of one process on the joined batch.

Tolerance: 2e-6 relative and absolute after 15 updates in float32; sums of slices associate differently.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forks

Start = Callable[..., Any]
TOLERANCE = 2e-6
SCRIPTS = Path(__file__).parent / "scripts"


def one_process(folder: Path, *arguments: object, script: str = "train_small.py") -> dict[str, torch.Tensor]:
    out = folder / "one.pt"
    command = [sys.executable, str(SCRIPTS / script), "--strategy", "one", "--out", str(out), *map(str, arguments)]
    forks.run(command, check=True, timeout=240, env={**os.environ, "PYTHONPATH": str(SCRIPTS.parents[2])})
    state: dict[str, torch.Tensor] = torch.load(out, weights_only=True)
    return state


def check_equal(expected: dict[str, torch.Tensor], path: Path) -> None:
    state = torch.load(path, weights_only=True)
    assert expected.keys() == state.keys()
    for name, value in expected.items():
        difference = float((state[name] - value).abs().max())
        assert torch.allclose(state[name], value, rtol=TOLERANCE, atol=TOLERANCE), f"{name} differs by {difference}"


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param("sgd", marks=pytest.mark.thorough),
        pytest.param("momentum", marks=pytest.mark.thorough),
        pytest.param("adam", marks=pytest.mark.thorough),
        "adamw",
    ],
)
def test_three_workers_two_ps_equal_one_process(cluster: Start, tmp_path: Path, optimizer: str) -> None:
    # 50 examples in batches of 12: slices of 4, and a last batch of 2 that only two workers share.
    out = tmp_path / "ps.pt"
    job = cluster(3, 2, "train_small.py", "--optimizer", optimizer, "--out", out, flags=["--staleness", "0"])
    expected = one_process(tmp_path, "--optimizer", optimizer)
    job.succeed()
    check_equal(expected, out)


@pytest.mark.thorough
def test_clipping_schedule_and_shards(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "ps.pt"
    arguments = ["--clip-norm", 0.05, "--decay", "--optimizer", "momentum"]
    job = cluster(
        2,
        2,
        "train_small.py",
        *arguments,
        "--strategy",
        "sharded",
        "--shards",
        3,
        "--out",
        out,
        flags=["--staleness", "0"],
    )
    expected = one_process(tmp_path, *arguments)
    job.succeed()
    check_equal(expected, out)


def test_a_worker_that_starts_again_has_the_jobs_place_in_a_schedule(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "ps.pt"
    arguments = ["--anneal", "--optimizer", "momentum"]
    faults = [{"task": "worker:0", "step": 7, "action": "kill"}]
    job = cluster(1, 1, "train_small.py", *arguments, "--out", out, flags=["--staleness", "0"], faults=faults)
    expected = one_process(tmp_path, *arguments)
    assert job.succeed().faults
    check_equal(expected, out)


@pytest.mark.thorough
def test_a_job_that_resumes_has_its_place_in_a_schedule(cluster: Start, tmp_path: Path) -> None:
    """Its weights and data went on, and the rate began anew, without a word."""
    out = tmp_path / "ps.pt"
    arguments = ["--anneal", "--optimizer", "momentum"]
    flags = ["--staleness", "0", "--checkpoint-dir", str(tmp_path / "checkpoints")]
    for epochs in (1, 2):
        cluster(2, 1, "train_small.py", *arguments, "--epochs", epochs, "--out", out, flags=flags).succeed()
    check_equal(one_process(tmp_path, *arguments, "--epochs", "2"), out)


def test_one_worker_equals_one_process_asynchronously(cluster: Start, tmp_path: Path) -> None:
    out = tmp_path / "ps.pt"
    job = cluster(1, 2, "train_small.py", "--out", out)
    expected = one_process(tmp_path)
    job.succeed()
    check_equal(expected, out)


@pytest.mark.thorough
def test_two_optimizers_several_steps_a_batch_and_their_state(cluster: Start, tmp_path: Path) -> None:
    # The critic's gradient also stays in the graph of the generator's loss: zero_grad() must unstage it.
    out = tmp_path / "ps.pt"
    job = cluster(2, 2, "train_gan.py", "--out", out, flags=["--staleness", "0"])
    expected = one_process(tmp_path, script="train_gan.py")
    job.succeed()
    assert any(".exp_avg" in name for name in expected) and any(".momentum_buffer" in name for name in expected)
    check_equal(expected, out)


@pytest.mark.thorough
def test_schedules_go_through_a_last_batch_that_has_no_slice_for_a_worker(cluster: Start) -> None:
    """What was saved after the epoch was a step behind on that worker, the lead perhaps."""
    cluster(2, 2, "schedules.py", flags=["--staleness", "0"]).succeed()


@pytest.mark.thorough
def test_accumulation(cluster: Start, tmp_path: Path) -> None:
    # Even slices: 48 examples in batches of 12, over 3 workers, two batches an update.
    out = tmp_path / "ps.pt"
    arguments = ["--accumulate", 2, "--examples", 48]
    job = cluster(3, 2, "train_small.py", *arguments, "--out", out, flags=["--staleness", "0"])
    expected = one_process(tmp_path, *arguments)
    job.succeed()
    check_equal(expected, out)
