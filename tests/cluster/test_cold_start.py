"""A job started again after a shard of its newest checkpoint was damaged: one step on all ps, nothing counted wrong."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg
from tests.cluster.test_checkpoint_faults import cut, flip
from tests.cluster.test_exactly_once import check_counts

Start = Callable[..., Any]
EPOCHS = 3


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("staleness", "shard", "harm"),
    [
        ("inf", "ps-1.safetensors", flip),
        ("inf", "ps-0.json", cut),
        ("inf", "ps-1.safetensors", Path.unlink),
        ("0", "ps-0.safetensors", flip),
        ("0", "ps-1.json", cut),
        ("0", "ps-1.safetensors", Path.unlink),
    ],
)
def test_a_damaged_shard(
    cluster: Start, tmp_path: Path, staleness: str, shard: str, harm: Callable[[Path], None]
) -> None:
    saved = tmp_path / "saved"
    flags = ("--staleness", staleness, "--checkpoint-dir", str(saved), "--checkpoint-every-s", "0.3")
    arguments = ("--epochs", EPOCHS, "--examples", 240, "--pause-s", 0.01)
    first = cluster(2, 2, "count_examples.py", *arguments, "--pause-s", 0.2, flags=flags)
    first.wait_for(lambda: len(list(saved.glob("step-*"))) >= 3, "three checkpoints")
    processes = first.processes()
    os.killpg(first.process.pid, signal.SIGKILL)
    for process in processes:
        process.wait(60)
    first.close()
    paths = sorted(saved.glob("step-*"), key=step_of)
    harm(paths[-1] / shard)

    again = cluster(2, 2, "count_examples.py", *arguments, flags=flags).succeed()
    lost = step_of(paths[-1]) - step_of(paths[-2])
    assert lost > 0
    assert re.search(rf"The job resumes from step {step_of(paths[-2])} ", again.stderr), again.stderr
    assert f"{lost} updates in newer checkpoints are undone and recomputed" in again.stderr
    assert f"{lost} update" in again.stderr.splitlines()[-1], again.stderr.splitlines()[-1]
    assert (again.summary["updates_lost"], again.summary["updates_undone"]) == (0, lost)
    assert again.summary["restored"] == str(paths[-2])
    check_counts(sg.load_checkpoint(again.summary["checkpoint"]), EPOCHS)
