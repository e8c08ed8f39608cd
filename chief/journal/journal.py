"""What a restarted chief must know: one JSON object a line, and the state that the lines add up to.

Decisions that others rely on (incarnations, plans, losses, closed steps, checkpoints) are on disk before they take
effect. Accepted units, counts on them and composed steps are handed to the operating system at once without waiting:
they survive a killed chief. If the machine crashes, the bitmaps of the ps restore the lost units; the counts on them
are lost, and with them the exact numbers of an epoch's metrics, but of no evaluation.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
from typing import Any, NoReturn

from stratagem.checkpoint.durable import sync, way_out
from stratagem.checkpoint.manifest import UNREADABLE
from stratagem.chief.journal.history import JobHistory
from stratagem.errors import ConfigurationError, JournalLostError

logger = logging.getLogger(__name__)

NAME = "journal.jsonl"
COMPACT_BYTES = 8 << 20


class Journal:
    """The journal of a job. Without a ``directory`` nothing is kept; a file of ``compact_bytes`` is replaced by one
    equivalent line. ConfigurationError: a line in the middle cannot be read. JournalLostError: the file cannot be read
    or written."""

    def __init__(self, directory: str, *, compact_bytes: int = COMPACT_BYTES) -> None:
        self.history = JobHistory()
        self._path = pathlib.Path(directory) / NAME if directory else None
        self._compact_bytes = compact_bytes
        self._fd = -1
        self._num_bytes = 0
        self._full_bytes = 0
        self._lost = ""
        if self._path is not None:
            try:
                self._begin(self._path)
            except OSError as error:
                advice = way_out(error, "give the chief a --state-dir that it can write to")
                self._lose(f"cannot be kept ({error.strerror}): {advice}")
            except ConfigurationError:
                self.close()
                raise

    def _begin(self, path: pathlib.Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open(path)
        num_bytes = -1
        while self._num_bytes != num_bytes:  # one that has lost its lock may write until it finds a line of ours
            num_bytes, self.history = self._num_bytes, replay(path)
            self._num_bytes = path.stat().st_size
        if self.history.stopped is not None:
            logger.info("The job in %s is over (%s); starting a new one", path.parent, self.history.stopped)
            newest = self.history.newest_incarnation
            self.history = JobHistory(self.history.chief_epoch, newest, earlier_incarnations=newest)
            self.close()
            self._replace(path)
            self._open(path)

    def write(self, kind: str, *, durable: bool = True, **fields: Any) -> None:
        """Appends a record. ``kind``: name of the record, as :class:`JobHistory` knows it; ``durable``: wait until it
        is on the disk; ``fields``: JSON values. JournalLostError: see :meth:`check`; the record counts for nobody."""
        self.check()
        record = {"kind": kind, **fields}
        self.history.apply(record)
        if self._path is None:
            return
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
            self._num_bytes += len(line)
            if self._num_bytes > self._full_bytes:
                self.close()
                self._replace(self._path)
                self._open(self._path)
            elif durable:
                os.fsync(self._fd)
        except OSError as error:
            self._lose(f"cannot be written ({error}): free some space there, or give another --state-dir")

    def check(self) -> None:
        """Whether the file is the one that was opened, and all that is in it is ours. JournalLostError: another chief
        has written it (its lock was lost: removed, or taken by an NFS server), it was removed, or a write has failed
        before."""
        if self._lost:
            raise JournalLostError(self._lost)
        if self._fd < 0:
            return
        try:
            found = os.fstat(self._fd)
        except OSError as error:
            self._lose(f"cannot be read ({error})")
        if not found.st_nlink:
            self._lose("was removed or replaced")
        if found.st_size != self._num_bytes:
            self._lose("was written by another chief")

    def _lose(self, how: str) -> NoReturn:
        self._lost = f"the journal {self._path} {how}"
        raise JournalLostError(self._lost)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _replace(self, path: pathlib.Path) -> None:
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(json.dumps(self.history.to_record(), separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def _open(self, path: pathlib.Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._num_bytes = path.stat().st_size
        # A summary that is large itself must not be written with every record.
        self._full_bytes = max(self._compact_bytes, 2 * self._num_bytes)
        sync(path.parent)


def replay(path: pathlib.Path) -> JobHistory:
    """What a journal says; a last line that is torn is cut off. ConfigurationError: a line in the middle cannot be
    read, or one is of another version, or was altered."""
    history = JobHistory()
    data = path.read_bytes() if path.exists() else b""
    offset = 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        is_strange = False
        try:
            if not line.endswith(b"\n"):
                raise ValueError("no end of line")
            record = json.loads(line)
            is_strange = True  # whole, and not ours
            history.apply(record)
        except (*UNREADABLE, IndexError, MemoryError) as error:
            if is_strange or offset + len(line) < len(data):
                why = f"another version of Stratagem may have written it: {error!r}" if is_strange else error
                raise ConfigurationError(
                    f"line {number} of {path} cannot be read ({why}). Move the file away to start a new "
                    "job (it then resumes from the newest checkpoint)."
                ) from None
            # The chief died in the middle of its last line: nobody has acted on it.
            logger.warning("The last line of %s is torn and ignored", path)
            os.truncate(path, offset)
            break
        offset += len(line)
    try:
        history.check()
    except (TypeError, ValueError, ConfigurationError) as error:
        raise ConfigurationError(f"{path} was altered ({error}). Move the file away to start a new job") from None
    return history


def exit_code_of(directory: str) -> int | None:
    """Of the job whose journal lies there; None: it is not over. Errors as :func:`replay`."""
    history = replay(pathlib.Path(directory) / NAME)
    return None if history.stopped is None else history.exit_code
