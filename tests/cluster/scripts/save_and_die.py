"""Saves three checkpoints, and is killed at a chosen point of the third: ``save_and_die.py DIRECTORY POINT``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stratagem.checkpoint import draft, tensor_file
from stratagem.training.saving.checkpoint import Checkpoint

CALLS = {
    "tensors": (tensor_file, "write_tensors"),
    "manifest": (draft, "_set_aside_if_damaged"),  # it is on the disk, the rename is next
    "latest": (draft, "sync"),  # the second one follows the rename
}


def die_in(point: str) -> None:
    """From now on the process is killed at that point; in the middle of the file where there is one."""
    owner, name = CALLS[point]
    original: Callable[..., Any] = getattr(owner, name)
    calls = []

    def die(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if point == "latest" and len(calls) < 2:
            return original(*arguments, **options)
        if point == "tensors":
            original(*arguments, **options)
            os.truncate(arguments[0], arguments[0].stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, die)


def main() -> None:
    folder, point = Path(sys.argv[1]), sys.argv[2]
    model = torch.nn.Linear(100, 10)
    checkpoint = Checkpoint(model=model, number=0)
    for number in (1, 2, 3):
        torch.nn.init.constant_(model.weight, float(number))
        checkpoint.number = number
        if number == 3:
            die_in(point)
        checkpoint.save(folder / "step")


if __name__ == "__main__":
    main()
