"""The end of a job, written into its checkpoint folder for a task that comes too late to hear it from the chief.

Only a task whose goodbye did not reach the chief has such a file: it died at the end, and its supervisor restarts it. A
task that dies between its goodbye and its exit has written one for itself. A task looks only when no chief answers, and
removes the file, so one end is taken once. The chief of the next job in the folder removes the remaining ones, and an
old file is ignored.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
from collections.abc import Iterable

from stratagem.checkpoint.durable import read_file, sync, write_durably
from stratagem.errors import JobStoppedError

MAX_AGE_S = 3600.0
"""For how long after the end a task may come late; Kubernetes waits up to 5 minutes before it starts one again."""


def write_end(directory: str, reason: str, missing: Iterable[str]) -> None:
    """Says that the job has ended well, to these tasks alone; what was said before is removed. Raises OSError: it
    cannot be written."""
    folder = pathlib.Path(directory)
    _remove(folder, "ended-*")
    for task in missing:
        temporary = folder / f".ended-{os.getpid()}"
        temporary.unlink(missing_ok=True)
        try:
            write_durably(temporary, reason.encode())
            temporary.replace(_path(directory, task))
        finally:
            temporary.unlink(missing_ok=True)
    if folder.is_dir():
        sync(folder)


def take_end(directory: str, task: str) -> JobStoppedError | None:
    """That the job of this task has ended, told once; None when nobody has said that to it, or it knows no folder."""
    for path in (_path(directory, task), _path(directory, task, "leaves")) if directory else ():
        try:
            written, reason = path.stat().st_mtime, read_file(path).decode()
            path.unlink()  # which gives the folder the time of the same clock: this host's may be another
            is_new = path.parent.stat().st_mtime - written < MAX_AGE_S
        except (OSError, UnicodeDecodeError):
            continue
        if is_new:
            return JobStoppedError(f"{reason} (written in {directory})", 0)
    return None


def note_leaving(directory: str, task: str, reason: str) -> None:
    """Before a task that ends well says goodbye: no chief may be left by its exit. Without a folder nothing happens."""
    if directory:
        with contextlib.suppress(OSError):  # without it the task waits for a chief
            _path(directory, task, "leaves").write_text(reason)


def note_left(directory: str, task: str) -> None:
    """Where a task has joined: what a process before it noted as it left is no word to this one, which is needed."""
    if directory:
        with contextlib.suppress(OSError):
            _path(directory, task, "leaves").unlink(missing_ok=True)


def take_away_at_exit(directory: str, task: str) -> None:
    """What a task notes as it leaves goes with the last of its process, however that ends, unless it is killed. Python
    and torch may need a second to end: called before they are loaded, this comes after both."""
    if directory:
        libc = ctypes.CDLL(None)
        libc.strdup.restype = ctypes.c_void_p
        path = os.path.abspath(_path(directory, task, "leaves"))
        libc.__cxa_atexit(libc.unlink, ctypes.c_void_p(libc.strdup(os.fsencode(path))), None)


def forget_ends(directory: str) -> None:
    """Another job begins in the folder. Raises OSError: it cannot be changed."""
    for pattern in ("ended-*", "leaves-*"):
        _remove(pathlib.Path(directory), pattern)


def note_run(directory: str, task: str, run_id: str) -> None:
    """Writes that a task has ended well in a run of its supervisor; without a folder or an id nothing is written."""
    if directory and run_id:
        with contextlib.suppress(OSError):  # without it the task runs again
            _path(directory, task, "ran").write_text(run_id)


def has_run(directory: str, task: str, run_id: str) -> bool:
    """Whether a task has ended well in this run of its supervisor already."""
    path = _path(directory, task, "ran")
    return bool(directory and run_id) and path.is_file() and path.read_text() == run_id


def _remove(folder: pathlib.Path, pattern: str) -> None:
    for said in folder.glob(pattern):
        said.unlink(missing_ok=True)


def _path(directory: str, task: str, kind: str = "ended") -> pathlib.Path:
    return pathlib.Path(directory) / f"{kind}-{task.replace(':', '-')}"
