"""One chief at a time has a journal: a lock that the kernel, or an NFS server, releases when its process dies.

A chief that is stalled or unreachable keeps it: then none takes over, and there are never two.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import socket
import tempfile
import time

from stratagem.chief.journal.journal import NAME as JOURNAL
from stratagem.errors import ConfigurationError

logger = logging.getLogger(__name__)

NAME = "journal.lock"
STANDBY_NAME = "standby.lock"
"""Held by the chief that stands by, or by the first of several."""
LOOK_S = 0.1
"""Between two looks whether it is free."""
PREDECESSOR_S = 5.0
"""For the chief whose place is taken to end: its process may still be on its way out."""
PRECEDENCE_S = 2.0
"""For the chief that stood by already, which goes first; one that stands still does not keep others from it."""
ROOM_S = 50.0
"""For room on a full disk: a little less than tasks look for their chief."""
ROOM_BYTES = 1 << 14
"""What a chief writes until its job goes on, and some of what follows."""


class JournalLock:
    """The lock of a journal's folder, the chief's state_dir, which is created. OSError: the file cannot be opened."""

    refusal = (
        "the journal in {where} belongs to a running chief: {holder}. End that one, give this one another --state-dir, "
        "or start it with --standby, to take over the job when that one is lost"
    )

    def __init__(self, directory: str, name: str = NAME) -> None:
        self._path = pathlib.Path(directory) / name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def acquire(self) -> bool:
        """Whether it is ours now; does not wait."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with contextlib.suppress(OSError):  # a full disk, on which it is ours all the same
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return True

    @property
    def holder(self) -> str:
        """Whose it is, or was last, as ``"process 7 on host-b"``."""
        return os.pread(self._fd, 256, 0).decode(errors="replace") or "another process"

    async def wait(self, standby: bool) -> bool:
        """Waits until it is ours, on ``standby`` for as long as that takes, otherwise for as long as a chief needs to
        end; returns whether another chief had it. ConfigurationError: another chief keeps it."""
        deadline, has_waited = time.monotonic() + PRECEDENCE_S, False
        while standby and time.monotonic() < deadline and standing_by(str(self._path.parent)):
            has_waited = True
            await asyncio.sleep(LOOK_S)
        if not self.acquire():
            has_waited = True
            await self._wait(standby)
        await _room(self._path.parent)
        return has_waited

    async def _wait(self, standby: bool) -> None:
        holder, where = self.holder, self._path.parent
        if standby:
            logger.info("Standing by: the chief is %s, with the journal in %s", holder, where)
        deadline, turn = time.monotonic() + PREDECESSOR_S, JournalLock(str(where), STANDBY_NAME) if standby else None
        is_next = False
        try:
            while not self.acquire():
                if turn is not None:
                    is_next = is_next or turn.acquire()
                elif time.monotonic() > deadline:
                    raise ConfigurationError(self.refusal.format(where=where, holder=holder))
                await asyncio.sleep(LOOK_S)
        finally:
            if turn is not None:
                turn.release()

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class CheckpointsLock(JournalLock):
    """The same for a folder of checkpoints: two jobs would resume from it, and delete in it, as if they were one."""

    refusal = (
        "the checkpoints in {where} belong to a running job, whose chief is {holder}. Wait until it ends, or give "
        "this job another --checkpoint-dir"
    )

    def __init__(self, directory: str) -> None:
        super().__init__(directory, ".chief.lock")


async def _room(directory: pathlib.Path) -> None:
    """Where the chief before may have left because it could not write its journal: waits until there is room."""
    deadline, is_told = time.monotonic() + ROOM_S, False
    while (directory / JOURNAL).exists():
        try:
            with tempfile.TemporaryFile(dir=directory) as file:  # which takes no room once it is closed
                file.write(bytes(ROOM_BYTES))
                file.flush()
                os.fsync(file.fileno())
            return
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() > deadline:
                return  # who writes there next says why that cannot be
            if not is_told:
                logger.warning("%s in %s; waiting up to %g s for room there", error.strerror, directory, ROOM_S)
            is_told = True
        await asyncio.sleep(LOOK_S)


def standing_by(directory: str) -> str:
    """Which process stands by for the journal in ``directory``, as ``"process 7 on host-b"``; empty: none does."""
    with contextlib.suppress(OSError):
        fd = os.open(pathlib.Path(directory) / STANDBY_NAME, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(fd, 256, 0).decode(errors="replace")
        finally:
            os.close(fd)
    return ""
