"""The newest lines of every task's log, for the page. Bounded: a task that writes much drops its own lines."""

from __future__ import annotations

import collections
import heapq
import logging
import threading
from collections.abc import Iterable
from typing import Any

from stratagem.rpc.logs import MAX_CHARACTERS, LogLine

CHIEF = "chief:0"
MAX_OF_TASK, MAX_LINES = 60, 300
"""That are kept of one task, and shown of all."""
_LEVELS = frozenset(name for name, level in logging.getLevelNamesMapping().items() if level >= logging.INFO)


class JobLog(logging.Handler):
    """Lines of the chief, whose handler this is, and of those that tell it theirs. Thread-safe."""

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
