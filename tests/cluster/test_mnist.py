"""The walk-throughs of examples/, with real processes: what is saved, restored and exported evaluates to one loss."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_PS = {"ring": 0, "ps": 2}


def losses_in(output: str) -> list[float]:
    """The test losses that were printed: trained, restored, reloaded."""
    return [float(loss) for loss in re.findall(r"test loss (\d+\.\d+)", output)]


def run(cluster: Start, kind: str, script: str, folder: Path) -> str:
    """Two workers' output of two epochs of a walk-through."""
    arguments = ["--no-download", "--data-dir", folder, "--model-dir", folder, "--epochs", "2"]
    done = cluster(2, NUM_PS[kind], EXAMPLES / script, *arguments, flags=["--max-restarts", "0"]).succeed()
    output: str = done.stdout
    return output


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["ring", "ps"])
def test_fit_restore_evaluate_export_reload(cluster: Start, tmp_path: Path, kind: str) -> None:
    output = run(cluster, kind, "mnist.py", tmp_path)
    losses = losses_in(output)
    assert len(losses) == 3 and losses == pytest.approx([losses[0]] * 3, abs=1e-5)
    assert losses[0] < 1.8  # 2.3 before training
    assert output.count("learning rate of epoch") == 2
    assert len(list((tmp_path / "checkpoints").glob("ckpt_*"))) == 2
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    loaded = reader.EventAccumulator(str(tmp_path / "logs" / "train")).Reload()
    assert {"epoch_loss", "epoch_accuracy"} <= set(loaded.Tags()["scalars"])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["ring", "ps"])
def test_a_loop_of_ones_own(cluster: Start, tmp_path: Path, kind: str) -> None:
    losses = losses_in(run(cluster, kind, "mnist_loop.py", tmp_path))
    assert len(losses) == 3 and losses == pytest.approx([losses[0]] * 3, abs=1e-5)
    assert losses[0] < 1.8
