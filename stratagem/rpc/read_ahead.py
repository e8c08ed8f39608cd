"""Bytes of a socket, read ahead: small frames that came together take one read."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

AHEAD_BYTES = 8 << 10
"""Read together with a header, at most: what of a large frame comes with it is copied once more."""

Receive = Callable[[memoryview, bool, int, float], int]
"""One read into memory: whether to wait until it is full, for which transfer, until when. Gives at least a byte."""


class ReadAhead:
    """The bytes of a stream, headers by their form and payloads where they belong. For one thread at a time."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._memory = memoryview(bytearray(AHEAD_BYTES))
        self._first = self._stop = 0
        """Of ``_memory``, what was read and not asked for."""

    def __bool__(self) -> bool:
        """Whether bytes are here that nobody has asked for."""
        return self._first < self._stop

    def unpack(self, form: struct.Struct, transfer: int, deadline: float) -> tuple[Any, ...]:
        """The next fields; waits for them."""
        while (num_bytes := self._stop - self._first) < form.size:
            if self._first:
                self._memory[:num_bytes] = self._memory[self._first : self._stop]
                self._first, self._stop = 0, num_bytes
            self._stop += self._receive(self._memory[num_bytes:], False, transfer, deadline)
        fields = form.unpack_from(self._memory, self._first)
        self._first += form.size
        return fields

    def take(self, num_bytes: int) -> bytearray | None:
        """The next bytes if they are here already, as those of a small frame mostly are; else nothing."""
        stop = self._first + num_bytes
        if stop > self._stop:
            return None
        taken = bytearray(self._memory[self._first : stop])
        self._first = stop
        return taken

    def fill(self, view: memoryview, transfer: int, deadline: float) -> None:
        """Writes the next bytes into ``view``; waits for them."""
        wanted, num_bytes = view.nbytes, self._stop - self._first
        if num_bytes > wanted:
            num_bytes = wanted
        view[:num_bytes] = self._memory[self._first : self._first + num_bytes]
        self._first += num_bytes
        while num_bytes < wanted:
            num_bytes += self._receive(view[num_bytes:], True, transfer, deadline)
