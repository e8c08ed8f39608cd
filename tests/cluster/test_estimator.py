"""train_and_evaluate with real processes: workers, parameter servers, and an evaluator beside them.

Tolerance: 1e-5 relative and absolute after 24 updates in float32; sums of slices associate differently.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stratagem as sg
from tests import forks
from tests.cluster.scripts.estimate import BATCH_SIZE, NUM_EXAMPLES

Start = Callable[..., Any]
SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples"
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
MAX_STEPS = 24


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that one process trains."""
    return trained_alone(tmp_path_factory.mktemp("alone"))


def trained_alone(folder: Path, *arguments: str) -> Path:
    command = [sys.executable, str(SCRIPTS / "estimate.py"), "--strategy", "one", *arguments]
    command += ["--model-dir", str(folder), "--max-steps", str(MAX_STEPS)]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parents[2])}
    forks.run(command, check=True, timeout=240, env=environment)
    return folder


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("model.ckpt-*"))


def weights(folder: Path, step: int, name: str = "net") -> dict[str, torch.Tensor]:
    return sg.load_checkpoint(folder / f"model.ckpt-{step:08d}", name)


def check_alike(folder: Path, alone: Path) -> None:
    for name, value in weights(alone, MAX_STEPS).items():
        torch.testing.assert_close(weights(folder, MAX_STEPS)[name], value, **TOLERANCE, msg=name)


def check_evaluator(folder: Path, stderr: str, last: int) -> None:
    steps = [int(step) for step in re.findall(r"evaluator:0\].* evaluated step (\d+):", stderr)]
    assert steps == sorted(set(steps)) and steps[-1] == last, stderr
    assert json.loads((folder / "evaluated.json").read_text())["global_step"] == last
    assert [path.name for path in (folder / "export" / "final").iterdir()] == [f"step-{last:08d}"]
    assert list((folder / "eval").glob("events.*"))


@pytest.mark.thorough
def test_two_workers_in_a_ring_and_an_evaluator(cluster: Start, tmp_path: Path, alone: Path) -> None:
    folder = tmp_path / "model"
    arguments = ["--strategy-first", "--model-dir", folder, "--max-steps", MAX_STEPS]
    done = cluster(2, 0, "estimate.py", *arguments, flags=["--evaluator"]).succeed()
    assert steps_in(folder) == steps_in(alone) == [8, 16, 24]
    check_alike(folder, alone)
    check_evaluator(folder, done.stderr, MAX_STEPS)
    assert len(list(folder.glob("events.*"))) == 1  # the lead's alone
    theirs = json.loads((alone / "evaluated.json").read_text())
    assert json.loads((folder / "evaluated.json").read_text()) == pytest.approx(theirs, rel=1e-4)
    x = torch.randn(5, 7)
    answers = [sg.load_model(each / "export" / "final" / f"step-{MAX_STEPS:08d}") for each in (folder, alone)]
    numbers = torch.zeros(5, dtype=torch.long)
    both = [answer({"x": x, "number": numbers}) for answer in answers]
    torch.testing.assert_close(*both, **TOLERANCE)


@pytest.mark.thorough
def test_an_evaluator_that_could_restore_no_checkpoint_fails(cluster: Start, tmp_path: Path) -> None:
    """The training goes on; the evaluator had ended as if it had evaluated."""
    arguments = ["--model-dir", tmp_path, "--max-steps", 9, "--wider-evaluation"]
    done = cluster(2, 0, "estimate.py", *arguments, flags=["--evaluator"]).finish()
    assert done.code == 1 and steps_in(tmp_path) == [8, 9], done.stderr
    assert "evaluator:0: CheckpointError: the checkpoint is of a different model than net" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("num_ps", [0, 1])
def test_two_estimators_of_one_script(cluster: Start, tmp_path: Path, num_ps: int) -> None:
    flags = ["--staleness", "0", "--max-restarts", "0"]
    cluster(2, num_ps, "two_estimators.py", "--model-dir", tmp_path, flags=flags).succeed()
    assert steps_in(tmp_path / "first") == steps_in(tmp_path / "second") == [3]


@pytest.mark.thorough
def test_a_table_and_its_optimizer_continue_on_parameter_servers(cluster: Start, tmp_path: Path) -> None:
    """Creating the model asked for rows that the job did not have yet, and the sums of Adagrad began anew."""
    folder, arguments = tmp_path / "model", ["--table", "--model-dir", tmp_path / "model", "--max-steps"]
    for last in (10, MAX_STEPS):
        done = cluster(2, 2, "estimate.py", *arguments, last, flags=["--staleness", "0"]).succeed()
    assert "The job resumes from step 10" in done.stderr
    check_alike(folder, trained_alone(tmp_path / "alone", "--table"))


@pytest.mark.thorough
def test_a_killed_ring_goes_on_in_its_data_and_then_on_parameter_servers(
    cluster: Start, tmp_path: Path, alone: Path
) -> None:
    """At staleness 0 parameter servers continue with the weights, the optimizer's state and the data of the ring."""
    folder = tmp_path / "model"
    arguments = ["--model-dir", folder, "--save-steps", 3]
    fault = {"task": "worker:1", "step": 10, "action": "kill"}
    once = ["--max-restarts", "0"]
    first = cluster(2, 0, "estimate.py", *arguments, "--max-steps", MAX_STEPS, flags=once, faults=[fault]).finish()
    assert first.code != 0 and first.faults, first.stderr
    assert steps_in(folder) == [3, 6, 9]
    second = cluster(2, 0, "estimate.py", *arguments, "--max-steps", 16).succeed()
    assert "Resuming from step 9" in second.stderr and steps_in(folder)[-1] == 16
    third = cluster(2, 2, "estimate.py", *arguments, "--max-steps", MAX_STEPS, flags=["--staleness", "0"]).succeed()
    assert "The job resumes from step 16" in third.stderr
    check_alike(folder, alone)


@pytest.mark.thorough
def test_max_steps_is_exact_on_parameter_servers_whatever_dies(cluster: Start, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    arguments = ["--count", "--place", "--model-dir", folder]
    faults = [{"task": "worker:1", "step": 3, "action": "kill"}, {"task": "worker:0", "step": 9, "action": "kill"}]
    first = cluster(2, 2, "estimate.py", *arguments, "--max-steps", 40, flags=["--evaluator"], faults=faults).succeed()
    assert first.faults == ["fault-0", "fault-1"]
    check_evaluator(folder, first.stderr, 40)
    assert steps_in(folder)[-1] == 40
    counts = weights(folder, 40, "counts")["table.weight"]
    assert counts.sum() == 40 * BATCH_SIZE
    assert counts.min() == counts.max() == 40 * BATCH_SIZE / NUM_EXAMPLES
    cluster(2, 2, "estimate.py", *arguments, "--max-steps", 50).succeed()
    counts = weights(folder, 50, "counts")["table.weight"]
    assert counts.sum() == 50 * BATCH_SIZE
    assert counts.max() - counts.min() == 1


@pytest.mark.thorough
def test_a_job_on_parameter_servers_goes_on_after_the_updates_that_its_checkpoint_has(
    cluster: Start, tmp_path: Path
) -> None:
    """It went on after the lead's own last batch, and made those of the other worker once more."""
    folder = tmp_path / "model"
    arguments = ["--count", "--model-dir", folder, "--max-steps", 400]
    faults = [{"task": "worker:0", "step": 40, "action": "kill"}]
    cut = cluster(2, 2, "estimate.py", *arguments, flags=["--max-restarts", "0"], faults=faults).finish()
    assert cut.code and cut.faults and 0 < steps_in(folder)[-1] < 400
    cluster(2, 2, "estimate.py", *arguments).succeed()
    assert weights(folder, 400, "counts")["table.weight"].sum() == 400 * BATCH_SIZE


@pytest.mark.thorough
def test_a_ring_goes_on_after_the_updates_of_all_workers_on_parameter_servers(cluster: Start, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    arguments = ["--count", "--model-dir", folder, "--max-steps", 200, "--save-steps"]
    faults = [
        {"task": "worker:0", "step": 1, "action": "slow", "seconds": 1.0},  # with a batch that others are ahead of then
        {"task": "worker:0", "step": 2, "action": "kill"},
        {"task": "worker:1", "step": 60, "action": "wait", "for": 1},
    ]
    cut = cluster(2, 2, "estimate.py", *arguments, 1, flags=["--max-restarts", "0"], faults=faults).finish()
    at = steps_in(folder)[-1]
    assert cut.code and "fault-1" in cut.faults
    assert weights(folder, at, "counts")["table.weight"].sum() > at * BATCH_SIZE
    cluster(2, 0, "estimate.py", *arguments, 50).succeed()
    assert weights(folder, 200, "counts")["table.weight"].sum() == 200 * BATCH_SIZE


@pytest.mark.thorough
def test_a_job_in_step_goes_on_after_the_batches_that_its_checkpoint_has(cluster: Start, tmp_path: Path) -> None:
    """Where a worker was lost its parts of the batches are updates of their own, which were taken for batches."""
    arguments = ["--count", "--model-dir", tmp_path / "model", "--max-steps", 32, "--save-steps", 4]
    lost = {"task": "worker:1", "step": 3, "action": "kill"}
    cut = {"task": "worker:0", "step": 22, "action": "kill", "target": "launcher"}
    first = cluster(2, 1, "estimate.py", *arguments, flags=["--staleness", "0"], faults=[lost, cut]).finish()
    assert first.code == -signal.SIGKILL and first.faults == ["fault-0", "fault-1"], first.stderr
    at = steps_in(tmp_path / "model")[-1]
    done = cluster(2, 1, "estimate.py", *arguments, flags=["--staleness", "0"]).succeed()
    assert f"The job resumes from step {at}" in done.stderr


@pytest.mark.thorough
def test_a_ring_that_is_told_to_end_saves_its_step_and_is_started_again(
    cluster: Start, tmp_path: Path, alone: Path
) -> None:
    folder = tmp_path / "model"
    faults = [{"task": "worker:1", "step": 10, "action": "terminate"}]
    done = cluster(2, 0, "estimate.py", "--model-dir", folder, "--max-steps", MAX_STEPS, faults=faults).finish()
    assert done.code == 0 and done.faults, done.stderr
    steps = steps_in(folder)
    between = [step for step in steps if step % 8]
    assert len(between) == 1 and between[0] in (10, 11, 12), steps
    assert f"Resuming from step {between[0]}" in done.stderr
    check_alike(folder, alone)


@pytest.mark.thorough
@pytest.mark.parametrize("num_ps", [0, 2], ids=["ring", "ps"])
def test_the_walk_through(cluster: Start, tmp_path: Path, num_ps: int) -> None:
    arguments = ["--no-download", "--data-dir", tmp_path, "--model-dir", tmp_path / "model", "--epochs", 2]
    done = cluster(2, num_ps, EXAMPLES / "mnist_estimator.py", *arguments, flags=["--evaluator"]).succeed()
    losses = [float(loss) for loss in re.findall(r"evaluator:0\].*test loss (\d+\.\d+)", done.stderr)]
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], abs=1e-5), done.stderr
    assert losses[0] < 1.8  # 2.3 before training
    middle, last = steps_in(tmp_path / "model")
    assert last == 24
    # On parameter servers the others go on while the lead asks for a checkpoint.
    assert middle == 12 if num_ps == 0 else 12 <= middle < 24
