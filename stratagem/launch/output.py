"""Where the lines of the tasks go: the lead's standard output to ours, the rest to stderr with the task's name."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from stratagem.cluster.task import TaskId
from stratagem.launch.processes import Stream

TAIL_LINES = 20
_COLOURS = {"chief": 35, "ps": 33, "worker": 36, "evaluator": 32}
_TRACEBACK = "Traceback (most recent call last):"
_MAX_TRACEBACKS = 1024
"""Different ones that are remembered: a long job may log one for each bad example."""


class TracebackFilter:
    """Lets each traceback through once: all workers of a broken script raise the same one, some not to its end."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, ...], TaskId] = {}
        self._open: dict[TaskId, list[str]] = {}

    def feed(self, task: TaskId, line: str) -> list[str]:
        """The lines to show now that ``task`` wrote ``line``."""
        block = self._open.get(task)
        if block is None:
            if line.strip() != _TRACEBACK:
                return [line]
            self._open[task] = [line]
            return []
        block.append(line)
        if line.startswith(" ") or not line:
            return []
        return self.flush(task)

    def flush(self, task: TaskId) -> list[str]:
        """What is held back of ``task``: the whole block, or one line about who wrote the same before."""
        block = self._open.pop(task, [])
        if not block:
            return []
        is_whole = block[-1] != "" and not block[-1].startswith(" ") and len(block) > 1
        if not is_whole and any(one[: len(block)] == tuple(block) for one in self._first):
            return []
        if len(self._first) >= _MAX_TRACEBACKS and tuple(block) not in self._first:
            self._first.clear()
        first = self._first.setdefault(tuple(block), task)
        return block if first == task else [f"{block[-1]} (same traceback as {first})"]


class OutputRouter:
    """Shows (``show``: one line on our stdout or stderr), logs (a file ``<type>-<index>.log`` per task in ``log_dir``
    is appended to) and remembers what the tasks write. ``verbose``: the standard output of every worker, marked, not
    only the lead's."""

    def __init__(self, show: Callable[[Stream, str], None], log_dir: Path, *, verbose: bool, colour: bool) -> None:
        self.lead = TaskId("worker", 0)
        self._show = show
        self._log_dir = log_dir
        self._verbose = verbose
        self._colour = colour
        self._logs: dict[TaskId, IO[str]] = {}
        self._cannot_log = False
        self._tails: dict[TaskId, deque[str]] = {}
        self._filter = TracebackFilter()
        log_dir.mkdir(parents=True, exist_ok=True)

    def line(self, task: TaskId, stream: Stream, line: str) -> None:
        self._log(task, line)
        if stream == "stderr":
            self._tails.setdefault(task, deque(maxlen=TAIL_LINES)).append(line)
            for shown in self._filter.feed(task, line):
                self._show("stderr", self._prefix(task) + shown)
        elif task == self.lead:
            self._show("stdout", line)
        elif task.type != "worker" or self._verbose:
            self._show("stderr", self._prefix(task) + line)

    def ended(self, task: TaskId) -> None:
        """A task's process has ended; nothing more comes from that life."""
        for shown in self._filter.flush(task):
            self._show("stderr", self._prefix(task) + shown)

    def say(self, text: str) -> None:
        """A line of the launcher itself."""
        self._show("stderr", f"stratagem: {text}")

    def tail(self, task: TaskId) -> list[str]:
        return list(self._tails.get(task, ()))

    def log_file(self, task: TaskId) -> Path:
        return self._log_dir / f"{task.type}-{task.index}.log"

    def close(self) -> None:
        for log in self._logs.values():
            with contextlib.suppress(OSError):
                log.close()

    def _log(self, task: TaskId, line: str) -> None:
        """Adds to a task's log, for whoever reads it meanwhile. A full disk ends the logs, not the job."""
        if self._cannot_log:
            return
        try:
            if task not in self._logs:
                self._logs[task] = self.log_file(task).open("a", buffering=1, encoding="utf-8")
            self._logs[task].write(line + "\n")
        except OSError as error:
            self._cannot_log = True
            self.close()
            self.say(f"the logs in {self._log_dir} end here: {error.strerror}")

    def _prefix(self, task: TaskId) -> str:
        return f"\x1b[{_COLOURS[task.type]}m[{task}]\x1b[0m " if self._colour else f"[{task}] "


def essence(tail: list[str], num_lines: int = 3) -> list[str]:
    """The last lines that say something; of a traceback only what follows its frames, which were shown before."""
    starts = [index for index, line in enumerate(tail) if line.strip() == _TRACEBACK]
    since = tail[starts[-1] + 1 :] if starts else tail
    return [line for line in since if line.strip() and not line.startswith(" ")][-num_lines:]
