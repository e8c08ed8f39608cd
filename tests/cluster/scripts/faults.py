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
from typing import Any

import psutil

from stratagem.worker.push.ps_client import PendingCall, PsClient
from stratagem.worker.runtime import active_runtime


def _pid_of(target: str, task: str) -> int:
    if target == task:
        return os.getpid()
    if target == "launcher":
        above = psutil.Process().parents()  # between them there may be the process that forked this one
        return next(each.pid for each in above if "stratagem.launch.fork_server" not in each.cmdline())
    runtime = active_runtime()
    assert runtime is not None
    return next(status.pid for status in runtime.chief.status().tasks if status.info.task == target)


def _tear() -> None:
    """The next update is applied by ps:0; then this process dies before ps:1 has heard of it."""
    start = PsClient.start

    def torn(self: PsClient, method: str, request: Any, *, sequenced: bool = False) -> PendingCall:
        call = start(self, method, request, sequenced=sequenced)
        if method == "CommitUpdate" and self.index == 0:
            call.result()
            os.kill(os.getpid(), signal.SIGKILL)
        return call

    PsClient.start = torn  # type: ignore[method-assign]


def _resend() -> None:
    """From now on every commit is sent twice more, and its place in the queue is taken by a later one."""
    start = PsClient.start

    def twice(self: PsClient, method: str, request: Any, *, sequenced: bool = False) -> PendingCall:
        call = start(self, method, request, sequenced=sequenced)
        if method == "CommitUpdate":
            call.result()
            again = type(request)()
            again.CopyFrom(request)
            for _ in range(2):
                again.reply_transfer = self.new_transfer()
                assert not self.restart(method, again).result().applied
                RESENT.append(again.sender.sequence)
        return call

    PsClient.start = twice  # type: ignore[method-assign]


RESENT: list[int] = []
"""Sequence numbers of commits that were sent again."""


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
            os.kill(_pid_of(fault.get("target", task), task), signal.SIGKILL)
        elif fault["action"] == "terminate":
            told = psutil.Process(_pid_of(fault.get("target", task), task))
            told.send_signal(signal.SIGTERM)
            if fault.get("target", "").startswith("chief"):
                told.wait()  # else the next fault may find it while it leaves
        elif fault["action"] == "tear":
            _tear()
        elif fault["action"] == "resend":
            _resend()
        elif fault["action"] == "raise":
            raise RuntimeError("a fault of the test")
        elif fault["action"] == "wait":
            while not (folder / f"fault-{fault['for']}").exists():
                time.sleep(0.01)
        elif fault["action"] == "slow":
            time.sleep(fault["seconds"])
        else:
            raise ValueError(f"unknown fault {fault}")
