"""Processes of tasks: each leads its own session, dies with the launcher, and is read through non-blocking pipes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from stratagem.cluster.task import TaskId
from stratagem.launch.plan import Launch

_CHILD = str(Path(__file__).with_name("child.py"))
_MAX_LINE_BYTES = 1 << 16
_VMSTAT = Path("/proc/vmstat")
Stream = Literal["stdout", "stderr"]


def num_killed_for_memory() -> int:
    """How many processes of this machine the kernel has killed because memory, or a control group's, was used up."""
    with contextlib.suppress(OSError):
        counts = dict(line.split() for line in _VMSTAT.read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    return 0


class Child(Protocol):
    """A process that leads its own session, whoever its parent is."""

    pid: int

    def ended(self) -> int | None:
        """The exit code (negative: a signal) once it has ended; until :meth:`reap` nobody else gets its id."""

    def reap(self) -> None:
        """Lets its id go."""

    def wait(self) -> None:
        """Waits for its end."""


Starter = Callable[[Launch, int, int], Child]
"""Starts a process, with these descriptors as its standard output and error."""


def start_guarded(command: tuple[str, ...], environ: Mapping[str, str], **more: Any) -> subprocess.Popen[bytes]:
    """``command`` in a session of its own, in a process that the kernel kills when this one dies; ``more``: arguments
    of ``Popen``."""
    guarded = [sys.executable, "-I", "-S", _CHILD, str(os.getpid()), *command]
    return subprocess.Popen(guarded, env=environ, stdin=subprocess.DEVNULL, start_new_session=True, **more)


class OwnChild:
    """Implements :class:`Child`: a child of this process, in a Python of its own, which writes to these descriptors."""

    def __init__(self, launch: Launch, stdout: int, stderr: int) -> None:
        self._process = start_guarded(launch.command, launch.environ, stdout=stdout, stderr=stderr)
        self.pid = self._process.pid

    def ended(self) -> int | None:
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def reap(self) -> None:
        self._process.wait()

    def wait(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


class LineReader:
    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.at_end = False
        self._rest = b""

    def read(self) -> list[str]:
        """Complete lines that are there now, without line ends; at the end of the stream also the last piece. No more
        than a pipe holds: who writes without end keeps nobody waiting."""
        try:
            chunk = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return []
        self.at_end = not chunk
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if self._rest and (self.at_end or len(self._rest) > _MAX_LINE_BYTES):
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines]


class TaskProcess:
    def __init__(self, task: TaskId, launch: Launch, start: Starter = OwnChild) -> None:
        self.task = task
        self.started_at = time.monotonic()
        self.returncode: int | None = None
        """The exit code once :meth:`reap` has seen it; negative: a signal."""
        self.was_told_to_die = False
        """Whether this command has killed it."""
        reading_out, writing_out = os.pipe()
        reading_err, writing_err = os.pipe()
        try:
            self._child = start(launch, writing_out, writing_err)
        except BaseException:
            os.close(reading_out)
            os.close(reading_err)
            raise
        finally:
            os.close(writing_out)
            os.close(writing_err)
        self.streams: dict[Stream, LineReader] = {"stdout": LineReader(reading_out), "stderr": LineReader(reading_err)}

    @property
    def pid(self) -> int:
        """Process id; also the id of its session and process group."""
        return self._child.pid

    def reap(self) -> bool:
        """Whether the process has ended. Then what it started and left behind is killed."""
        if self.returncode is None and (code := self._child.ended()) is not None:
            self.kill()  # the zombie keeps the group's id from being reused until it is reaped
            self._child.reap()
            self.returncode = code
        return self.returncode is not None

    def send(self, signum: int) -> None:
        """Sends a signal to the process itself (its children decide with it)."""
        if not self.reap():
            self.was_told_to_die |= signum == signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        if self.returncode is None:
            self.was_told_to_die |= self._child.ended() is None
            for kill in (os.killpg, os.kill):  # a fork may not have made its group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Waits for the end of a killed process."""
        if self.returncode is None:
            self._child.wait()
            self.reap()

    def close(self) -> None:
        for reader in self.streams.values():
            os.close(reader.fd)
