"""What the tasks recently measured and logged, for a view of the present."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from stratagem.cluster.identity import CHIEF
from stratagem.rpc.logs import MAX_CHARACTERS, LogLine

WINDOW_S = 15.0
"""How long ago the earlier one may be."""
SPACING_S = 3.0
"""Between two that are kept, beside the newest."""
MAX_OF_TASK, MAX_LINES = 60, 300
"""That are kept of one task, and shown of all."""
_LEVELS = frozenset(name for name, level in logging.getLevelNamesMapping().items() if level >= logging.INFO)

Measures = bytes | Mapping[str, float]
"""As it came, or the chief's own."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one task measured, as it came."""

    newest: Measures = b""
    earlier: Measures = b""
    window_s: float = 0.0
    """Seconds from the earlier one to the newest."""
    age_s: float = 0.0
    """Seconds since the newest came."""


class Recent:
    """Keeps a few measures of each task: the newest, and those of a while before."""

    def __init__(self) -> None:
        self._kept: dict[str, collections.deque[tuple[float, Measures]]] = {}

    def add(self, task: str, measured: Measures, now: float) -> None:
        kept = self._kept.setdefault(task, collections.deque())
        if kept and now - kept[-1][0] > WINDOW_S:  # it, or this chief, stood still: no step took that long
            kept.clear()
        if len(kept) > 1 and now - kept[-2][0] < SPACING_S:
            kept.pop()
        kept.append((now, measured))
        while len(kept) > 2 and kept[1][0] <= now - WINDOW_S:
            kept.popleft()

    def forget(self, task: str) -> None:
        """A new process does what the task does: it counts from nothing."""
        self._kept.pop(task, None)

    def of(self, task: str, now: float) -> Measured:
        kept = self._kept.get(task)
        if not kept:
            return Measured()
        (first_at, first), (last_at, last) = kept[0], kept[-1]
        return Measured(last, first if len(kept) > 1 else b"", last_at - first_at, now - last_at)


class JobLog(logging.Handler):
    """Log lines of the chief, whose handler this is, and of the tasks that send theirs. Thread-safe.

    Bounded: a task that writes much drops only its own lines.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._of: dict[str, collections.deque[dict[str, Any]]] = {}
        self._num = 0
        self._lock = threading.Lock()

    def add(self, task: str, lines: Iterable[LogLine]) -> None:
        with self._lock:
            kept = self._of.setdefault(task, collections.deque(maxlen=MAX_LINES if task == CHIEF else MAX_OF_TASK))
            for at, level, text in lines:
                self._num += 1
                shown = level if level in _LEVELS else "INFO"
                line = {"number": self._num, "at": at, "task": task, "level": shown, "text": text[:MAX_CHARACTERS]}
                kept.append(line)

    def emit(self, record: logging.LogRecord) -> None:
        self.add(CHIEF, [(record.created, record.levelname, record.getMessage())])

    def since(self, number: int) -> list[dict[str, Any]]:
        """The newest lines after that one, in the order in which they came: :data:`MAX_LINES` at most."""
        with self._lock:
            every = [line for kept in self._of.values() for line in kept if line["number"] > number]
        return heapq.nlargest(MAX_LINES, every, key=lambda line: line["number"])[::-1]
