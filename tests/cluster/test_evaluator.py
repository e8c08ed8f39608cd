"""An evaluator beside the training cluster sees checkpoints while they are made, and the last one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]
DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.mark.thorough
def test_digits_with_an_evaluator(cluster: Start) -> None:
    job = cluster(2, 2, DIGITS, "--epochs", 8, flags=["--evaluator", "--checkpoint-every-s", "1"])
    done = job.succeed()
    evaluated = [
        (int(step), float(percent))
        for step, percent in re.findall(r"\[evaluator:0\] step (\d+): held-out accuracy ([\d.]+)%", done.stderr)
    ]
    assert [step for step, _ in evaluated] == sorted({step for step, _ in evaluated})
    assert evaluated[-1][0] == done.summary["steps"]
    assert evaluated[-1][1] == round(100 * done.summary["metrics"]["accuracy"], 2)


@pytest.mark.thorough
def test_a_script_that_ignores_being_the_evaluator_is_told(cluster: Start) -> None:
    done = cluster(1, 1, "train_small.py", flags=["--evaluator"]).finish()
    assert done.code == 2
    assert "sg.is_evaluator()" in done.stderr
    assert "Traceback" not in done.stderr
