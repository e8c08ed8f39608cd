"""One chief at a time has a journal: a lock that the kernel, or an NFS server, releases when its process dies.

A chief that is stalled or unreachable keeps it: then none takes over, and there are never two.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import pathlib
import socket
import time

from stratagem.errors import ConfigurationError

logger = logging.getLogger(__name__)

NAME = "journal.lock"
STANDBY_NAME = "standby.lock"
"""Held by the chief that stands by, or by the first of several."""
LOOK_S = 0.1
"""Between two looks whether it is free."""
PREDECESSOR_S = 5.0
"""For the chief whose place is taken to end: its process may still be on its way out."""


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
        if self.acquire():
            return False
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
        return True

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
