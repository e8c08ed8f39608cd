"""Log lines of every role: stderr, text or JSON, always with the task's name.

A plain script may not have configured logging; its user should see what is going on all the same.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import sys
import threading
import time
from typing import Any, Literal

PACKAGE = logging.getLogger("stratagem")
MAX_LINES_AT_ONCE, MAX_CHARACTERS = 30, 500
"""That a task tells the chief at once, and of one line."""
MAX_SHOWN = 8000
"""Characters of a line's message: what it quotes of others may be of any length."""
_MAX_KINDS = 1024
"""Of lines that a :class:`Throttle` counts at once."""
LogLine = tuple[float, str, str]
"""Seconds since 1970, level, text."""
_NOBODYS_LEVEL = logging.INFO - 1
"""Of the package as long as nobody has chosen one."""


class _TextFormatter(logging.Formatter):
    def __init__(self, task: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {task}: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line, whatever words of others it quotes: no line of theirs looks like one of ours."""
        record.message = _visible(shortened(record.message))
        return super().formatMessage(record)


class _JsonFormatter(logging.Formatter):
    def __init__(self, task: str) -> None:
        super().__init__()
        self._task = task

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "task": self._task,
            "logger": record.name,
            "message": shortened(record.getMessage()),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _UntilConfigured(logging.Handler):
    """Shows the package's lines on stderr until logging is configured; from then on it has no effect."""

    def emit(self, record: logging.LogRecord) -> None:
        """Shows the record, or hands it to whoever was configured to."""
        root = logging.getLogger()
        if root.handlers:
            # pytest adds its handlers to loggers that do not propagate.
            others = [handler for handler in root.handlers if handler not in PACKAGE.handlers]
            for handler in others if record.levelno >= _chosen_level(record.name) else ():
                if record.levelno >= handler.level:
                    handler.handle(record)
        elif all(handler is self or isinstance(handler, LogTail) for handler in PACKAGE.handlers):
            print(self.format(record), file=sys.stderr, flush=True)


def _chosen_level(name: str) -> int:
    """The level that somebody has chosen for a logger, by the rules of ``logging``."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None and (not logger.level or (logger is PACKAGE and logger.level == _NOBODYS_LEVEL)):
        logger = logger.parent
    return logging.NOTSET if logger is None else logger.level


class LogTail(logging.Handler):
    """The package's newest lines, for one consumer: of INFO and above, cut at :data:`MAX_CHARACTERS`."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: collections.deque[LogLine] = collections.deque(maxlen=MAX_LINES_AT_ONCE)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps it, and forgets the oldest where nobody takes them."""
        self._lines.append((record.created, record.levelname, record.getMessage()[:MAX_CHARACTERS]))

    def take(self) -> list[LogLine]:
        """Those since the last time, oldest first."""
        found: list[LogLine] = []
        while self._lines:
            found.append(self._lines.popleft())
        return found


def show_until_configured(task: str = "stratagem") -> None:
    """Has the package's log shown on stderr, from INFO on, with the ``task``, until the user configures logging."""
    if not PACKAGE.handlers and PACKAGE.propagate:
        PACKAGE.addHandler(_UntilConfigured())
        PACKAGE.propagate = False
        if not PACKAGE.level:
            PACKAGE.setLevel(_NOBODYS_LEVEL)
    for handler in PACKAGE.handlers:
        if isinstance(handler, _UntilConfigured):
            handler.setFormatter(_TextFormatter(task))
    _quieten_grpc()


def shortened(text: str, most: int = MAX_SHOWN) -> str:
    """The text, without its middle where it has more than ``most`` characters."""
    half = most // 2
    num_lacking = len(text) - 2 * half
    return text if num_lacking <= 0 else f"{text[:half]} [… {num_lacking:,} characters …] {text[-half:]}"


def _visible(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape", "backslashreplace").decode() for sign in text
    )


def configure_logging(task: str, log_format: Literal["text", "json"] = "text") -> None:
    """Sends the log of the package to stderr, each line with the ``task``; the user's own loggers are left alone."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_TextFormatter(task) if log_format == "text" else _JsonFormatter(task))
    PACKAGE.handlers[:] = [handler]
    PACKAGE.setLevel(logging.INFO)
    PACKAGE.propagate = False
    _quieten_grpc()


def _quieten_grpc() -> None:
    """Else it writes a line of its own ("Got goaway") for each connection that an idle or ending server closes."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


class Throttle:
    """For lines that a peer can cause: lets ``burst`` of a kind through every ``period_s`` seconds, and counts the
    others. Thread-safe."""

    def __init__(self, burst: int = 10, period_s: float = 10.0) -> None:
        self._burst = burst
        self._period_s = period_s
        self._guard = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}
        """When the period of a kind began, and its lines since then."""

    def admit(self, kind: str, now: float) -> int | None:
        """Whether a line may be written. ``now``: seconds, monotonic. Gives how many of its kind were left out in the
        period before; None: leave it out."""
        with self._guard:
            began, count = self._kinds.get(kind, (now, 0))
            left_out = 0
            if now - began >= self._period_s:
                began, count, left_out = now, 0, max(0, count - self._burst)
            if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            self._kinds[kind] = began, count + 1
            return left_out if count < self._burst else None

    def log(self, logger: logging.Logger, level: int, kind: str, message: str, *arguments: Any, **extra: Any) -> None:
        """Writes a line, or counts it."""
        left_out = self.admit(f"{logger.name}:{kind}", time.monotonic())
        if left_out:
            logger.log(level, "%d more lines of this kind (%s) were suppressed", left_out, kind)
        if left_out is not None:
            logger.log(level, message, *arguments, **extra)


THROTTLE = Throttle()
