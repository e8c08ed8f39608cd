"""Log lines of every role: stderr, text or JSON, always with the task's name."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Literal


class _TextFormatter(logging.Formatter):
    def __init__(self, task: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {task}: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line, whatever words of others it quotes: no line of theirs looks like one of ours."""
        record.message = _visible(record.message)
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
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _visible(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape", "backslashreplace").decode() for sign in text
    )


def configure_logging(task: str, log_format: Literal["text", "json"] = "text") -> None:
    """Sends the log of the package ``stratagem`` to stderr; the user's own loggers are left alone.

    Args:
        task: task id that every line names.
        log_format: "text" for people, "json" for machines (one object a line).
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_TextFormatter(task) if log_format == "text" else _JsonFormatter(task))
    root = logging.getLogger("stratagem")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
    # Else gRPC writes a line of its own ("Got goaway") for each connection that an idle or ending server closes.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
