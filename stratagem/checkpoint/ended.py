"""The end of a job, written into its checkpoint folder for a ps that comes too late to hear it from the chief.

Only a ps whose goodbye the chief did not get is named: it died at the end, and whoever supervises it starts it again.
The chief of the next job in the folder removes the file. A ps that starts before that chief must not take the end of
the last job for its own: it looks only when no chief answers, and an old file says nothing.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Iterable

from stratagem.checkpoint.durable import sync_directory, write_durably
from stratagem.checkpoint.manifest import UNREADABLE

NAME = "ended.json"
MAX_AGE_S = 3600.0
"""For how long after the end a ps may come late; Kubernetes waits up to 5 minutes before it starts one again."""


def write_end(directory: str, reason: str, missing: Iterable[str]) -> None:
    """Says that the job has ended well, to these ps; to none: removes what was said.

    Raises:
        OSError: it cannot be written.
    """
    path = pathlib.Path(directory) / NAME
    tasks = sorted(missing)
    if not tasks:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(f".{NAME}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    write_durably(temporary, json.dumps({"reason": reason, "missing": tasks}).encode())
    temporary.replace(path)
    sync_directory(path.parent)


def read_end(directory: str, task: str) -> str:
    """Why the job of this ps has ended; empty when nobody has said that to it."""
    path = pathlib.Path(directory) / NAME
    try:
        content = json.loads(path.read_text())
        is_told = task in content["missing"] and time.time() - path.stat().st_mtime < MAX_AGE_S
        return str(content["reason"]) if is_told else ""
    except UNREADABLE:
        return ""
