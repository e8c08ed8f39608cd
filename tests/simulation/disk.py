"""The disk under journal and checkpoints: a folder in memory, whose writes are torn, fail, last, and are flipped, and
which at times cannot be read."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
import types
from collections.abc import Iterator
from typing import Any

from tests.simulation.threads import here


class Disk:
    """What is on the disk for good, and what goes wrong next.

    Args:
        folder: where the files really are.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.synced: dict[int, int] = {}
        """Bytes of each file, by its inode, that survive a crash of the machine."""
        self.flipped: set[str] = set()
        """Names of the checkpoints that are not whole any more."""
        self.full_until = 0.0
        """For checkpoints."""
        self.full_for = ""
        """The only task for which it is; empty: all."""
        self.full_errno = errno.ENOSPC
        """Or ``EROFS``: no file can be made there either."""
        self.unreadable_until = 0.0
        """For checkpoints, as the next three."""
        self.unreadable_for = ""
        self.unreadable_errno = errno.EIO
        self.was_unreadable_long = False
        """For longer than a chief tries again."""
        self.spoiled: set[int] = set()
        """Inodes of the folders of checkpoints that are not whole any more."""
        self.state_full_until = 0.0
        """For the chief's journal, and what else is in its folder."""
        self.has_lost = False
        """A chief could not write its journal, and none has followed it."""
        self.slow = 0.0
        """A sync takes up to so many seconds."""

    @property
    def has_refused(self) -> bool:
        """A checkpoint may not have been written: its disk was full, or a ps could not see the chief's draft."""
        return bool(self.full_until or self.unreadable_until)

    def sync(self, fd: int) -> None:
        """What ``fsync`` means.

        Raises:
            OSError: the disk is full.
        """
        world = here()
        process = world.process
        if world.closing or process is None or not process.alive:
            return
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode):
            is_state = self._is_state(fd)
            if world.now < self.state_full_until if is_state else self._is_full(world):
                self.refuse(is_state)
            self.synced[found.st_ino] = found.st_size
        if self.slow:
            took_s = self.slow * world.random.random()
            if world.thread is not None:
                world.block(took_s)
            else:
                process.paused_until = max(process.paused_until, world.now + took_s)

    def write(self, fd: int, data: Any) -> int:
        """As ``os.write``; of what is too long for a full disk a part may be there."""
        world = here()
        if world.now < self.state_full_until and self._is_state(fd):
            if world.random.random() < 0.6:
                os.write(fd, bytes(data)[: world.random.randrange(len(data))])
            self.refuse(True)
        return os.write(fd, data)

    def refuse(self, is_state: bool) -> None:
        self.has_lost |= is_state
        number = errno.ENOSPC if is_state else self.full_errno
        raise OSError(number, os.strerror(number))

    def _is_full(self, world: Any) -> bool:
        return bool(world.now < self.full_until and self.full_for in ("", world.process.name))

    def open(self, path: Any, flags: int, *more: Any, **named: Any) -> int:
        """As ``os.open``, which opens a file of a checkpoint to be read with ``O_NONBLOCK``."""
        world, number = here(), 0
        if not world.closing and world.process is not None and f"{self.folder}/checkpoints/" in os.fspath(path):
            if flags & os.O_CREAT and self.full_errno == errno.EROFS and self._is_full(world):
                number = errno.EROFS
            elif flags & os.O_NONBLOCK and self._is_unreadable(world):
                number = self.unreadable_errno
        if number:
            raise OSError(number, os.strerror(number), os.fspath(path))
        return os.open(path, flags, *more, **named)

    def _is_unreadable(self, world: Any) -> bool:
        return bool(world.now < self.unreadable_until and self.unreadable_for in ("", world.process.name))

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[None]:
        """Inside, the invariants read, in the middle of a process."""
        until, self.unreadable_until = self.unreadable_until, 0.0
        try:
            yield
        finally:
            self.unreadable_until = until

    def _is_state(self, fd: int) -> bool:
        return f"{self.folder}/state/" in os.readlink(f"/proc/self/fd/{fd}")

    def crash(self, path: pathlib.Path) -> bool:
        """The machine crashes: what was not synced may be there, in part or not at all. Whether something is gone."""
        if not path.exists():
            return False
        size, kept = path.stat().st_size, self.synced.get(path.stat().st_ino, 0)
        if kept < size:
            os.truncate(path, here().random.randint(kept, size))
        return kept < size

    def flip(self, path: pathlib.Path) -> None:
        """One byte of a file is another one from now on."""
        data = bytearray(path.read_bytes())
        if data:
            data[here().random.randrange(len(data))] ^= 1 << here().random.randrange(8)
            path.write_bytes(data)
            self._spoil(path.parent)

    def remove(self, path: pathlib.Path) -> None:
        """Somebody removes a file."""
        path.unlink()
        self._spoil(path.parent)

    def _spoil(self, checkpoint: pathlib.Path) -> None:
        self.flipped.add(checkpoint.name)
        self.spoiled.add(checkpoint.stat().st_ino)


def _fsync(fd: int) -> None:
    disk: Disk = here().disk  # type: ignore[attr-defined]
    disk.sync(fd)


def _write(fd: int, data: Any) -> int:
    """A process that was killed writes nothing any more."""
    world = here()
    if world.closing or world.process is None or not world.process.alive:
        return len(data)
    disk: Disk = world.disk  # type: ignore[attr-defined]
    return disk.write(fd, data)


def _open(path: Any, flags: int, *more: Any, **named: Any) -> int:
    disk: Disk = here().disk  # type: ignore[attr-defined]
    return disk.open(path, flags, *more, **named)


Os = types.SimpleNamespace(**{**vars(os), "fsync": _fsync, "write": _write, "open": _open})
"""In the place of the module ``os``, where files are written and read."""
