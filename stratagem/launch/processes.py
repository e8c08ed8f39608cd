"""Child processes: each leads its own session, dies with the launcher, and is read through non-blocking pipes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

from stratagem.cluster.task import TaskId
from stratagem.launch.plan import Launch

_CHILD = str(Path(__file__).with_name("child.py"))
_MAX_LINE_BYTES = 1 << 16
Stream = Literal["stdout", "stderr"]


class LineReader:
    """Cuts what comes out of a pipe into lines."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.at_end = False
        self._rest = b""

    def read(self) -> list[str]:
        """The complete lines that are there now, without line ends; at the end of the stream also the last piece."""
        lines: list[bytes] = []
        while not self.at_end:
            try:
                chunk = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                break
            self.at_end = not chunk
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            lines += whole
            if self._rest and (self.at_end or len(self._rest) > _MAX_LINE_BYTES):
                lines.append(self._rest)
                self._rest = b""
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines]


class TaskProcess:
    """The process of one task.

    Args:
        task: whose.
        launch: command and environment.
    """

    def __init__(self, task: TaskId, launch: Launch) -> None:
        self.task = task
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _CHILD, str(os.getpid()), *launch.command],
            env=launch.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self.streams: dict[Stream, LineReader] = {
            "stdout": LineReader(self._process.stdout.fileno()),
            "stderr": LineReader(self._process.stderr.fileno()),
        }

    @property
    def pid(self) -> int:
        """Process id; also the id of its session and process group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code once :meth:`reap` has seen it; negative: a signal."""
        return self._process.returncode

    def reap(self) -> bool:
        """Whether the process has ended. Then what it started and left behind is killed."""
        if self._process.returncode is not None:
            return True
        # The zombie keeps the group's id from being reused until it is reaped below.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.kill()
        self._process.wait()
        return True

    def send(self, signum: int) -> None:
        """Sends a signal to the process itself (its children decide with it)."""
        if self._process.returncode is None:
            self._process.send_signal(signum)

    def kill(self) -> None:
        """Kills the process and everything in its group."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Waits for the end of a killed process."""
        self._process.wait()

    def close(self) -> None:
        """Closes the pipes."""
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
