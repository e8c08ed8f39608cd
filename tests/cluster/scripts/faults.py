"""Faults of a test, inside the processes of its job: each is due at a step of a task, and happens once.

The schedule is JSON in the environment variable TEST_FAULTS: ``[{"task": "worker:1", "step": 7, "action": "kill"}]``.
A marker file says that a fault has happened, also to a later life of the task, and to the test.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path


def at_step(task: str, step: int) -> None:
    """Lets the faults happen that are due for ``task`` at ``step``."""
    folder = Path(os.environ.get("TEST_FAULTS_DIR", "."))
    for number, fault in enumerate(json.loads(os.environ.get("TEST_FAULTS", "[]"))):
        if fault["task"] != task or step < fault["step"]:
            continue
        try:
            (folder / f"fault-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        if fault["action"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault["action"] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault["action"] == "raise":
            raise RuntimeError("a fault of the test")
        elif fault["action"] == "slow":
            time.sleep(fault["seconds"])
        else:
            raise ValueError(f"unknown fault {fault}")
