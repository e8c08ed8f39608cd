"""Scripts of jobs that make no strategy: they train with the job's, or are told the line to write."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forks

SCRIPT = Path(__file__).parent / "scripts" / "fit_without_strategy.py"
PLAIN = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(3, 2)).sum().backward()
optimizer.step()
print("trained")
"""
OWN_LOADER = """
import torch
import stratagem as sg
strategy = sg.strategy_from_environment()
with strategy.scope():
    model = torch.nn.Linear(2, 1)
model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(12, 2)), batch_size=4)
for (batch,) in SOURCE:
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""
WAY_OUT = "strategy = sg.strategy_from_environment()"


def alone() -> dict[str, Any]:
    """What the script finds without a job."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


@pytest.mark.parametrize(
    ("workers", "ps", "flags", "strategy"),
    [
        (2, 0, (), "MultiWorkerMirroredStrategy"),
        pytest.param(
            1, 0, ("--strategy", "mirrored", "--devices", "cpu:0,cpu:1"), "MirroredStrategy", marks=pytest.mark.thorough
        ),
        pytest.param(2, 1, ("--staleness", "0"), "ParameterServerStrategy", marks=pytest.mark.thorough),
    ],
)
def test_model_fit_trains_with_the_strategy_of_the_job(
    cluster: Callable[..., Any], workers: int, ps: int, flags: tuple[str, ...], strategy: str
) -> None:
    done = cluster(workers, ps, SCRIPT, flags=flags).succeed()
    one, found = alone(), json.loads(done.stdout)
    assert (one["strategy"], one["replicas"], one["has"]) == ("DefaultStrategy", 1, False)
    assert (found["strategy"], found["replicas"], found["has"]) == (strategy, 2, True)
    assert done.stderr.count(f": {strategy} on cpu:0") == (0 if ps else workers)  # nothing is said twice
    assert found["loss"] == pytest.approx(one["loss"], rel=2e-6)


@pytest.mark.thorough
def test_a_plain_script_trains_no_model_in_each_worker(cluster: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    done = cluster(2, 0, tmp_path / "plain.py").finish()
    assert done.code in (1, 2) and "trained" not in done.stdout, done.stderr
    assert "this job has 2 replicas, but its script has made no strategy" in done.stderr and WAY_OUT in done.stderr
    assert "plain.py:6" in done.stderr  # the line of the step
    assert done.summary["restarts"] == 0


@pytest.mark.parametrize(
    ("num_ps", "says"),
    [(0, True), *(pytest.param(*each, marks=pytest.mark.thorough) for each in [(0, False), (1, True), (1, False)])],
)
def test_a_loader_that_is_not_distributed_is_warned_of_once(
    cluster: Callable[..., Any], tmp_path: Path, num_ps: int, says: bool
) -> None:
    """Two workers trained on the same batches without a word."""
    (tmp_path / "own.py").write_text(
        OWN_LOADER.replace("SOURCE", "loader" if says else "strategy.distribute_dataset(loader)")
    )
    done = cluster(2, num_ps, tmp_path / "own.py").succeed()
    assert done.stderr.count("each of the 2 workers trains on what the script gives it") == says
    assert done.stderr.count("strategy.distribute_dataset(loader) does") == says


@pytest.mark.parametrize(
    ("devices", "text", "code", "words"),
    [
        ("cpu:0,cpu:1", PLAIN, 2, "this job has 2 replicas, but its script has made no strategy and trains"),
        ("cpu:0,cpu:1", "print('only this')", 2, "has made no strategy and has ended"),
        pytest.param("cpu", PLAIN, 0, "trained", marks=pytest.mark.thorough),
    ],
)
def test_several_replicas_of_one_process(tmp_path: Path, devices: str, text: str, code: int, words: str) -> None:
    (tmp_path / "plain.py").write_text(text)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("STRATAGEM_")}
    flags = ["--strategy", "mirrored", "--devices", devices]
    command = [sys.executable, "-m", "stratagem.cli", "worker", *flags, str(tmp_path / "plain.py")]
    done = forks.run(command, env=environ, timeout=240)
    assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done.stderr
