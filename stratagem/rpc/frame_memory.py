"""Memory of received frames, reused: memory freed in the order of the network would fragment malloc's heap."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import torch

PATIENCE_S = 1.0
POLL_S = 0.005
MIN_BYTES = 1 << 20
"""Smaller frames are malloc's matter."""


def fresh(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """What :meth:`FrameMemory.take` gives, from malloc."""
    return torch.empty(num_elements, dtype=dtype)


class FrameMemory:
    """The most memory that was ever in use at once, in pieces of the received sizes. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Condition()  # of an RLock: the garbage collector may give a piece back at any point
        self._patient_from = 0.0
        self._looks: tuple[Callable[[], None], ...] = ()
        self._free: dict[int, list[torch.Tensor]] = {}
        self.num_bytes = 0
        """Of all pieces, in use or not."""
        self.lent_bytes = 0
        """Of what was lent (:class:`stratagem.rpc.lane.LentPiece`) and has not left for all its readers."""
        self.kept_bytes = 0
        """The part of it that had to be copied since."""

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor with whatever is in it; its memory comes back when the last view of it goes."""
        num_bytes = num_elements * dtype.itemsize
        if num_bytes < MIN_BYTES:
            return torch.empty(num_elements, dtype=dtype)
        with self._guard:
            free = self._free.setdefault(num_bytes, [])
            if free:
                memory = free.pop()
            else:
                memory = torch.empty(num_bytes, dtype=torch.uint8)
                self.num_bytes += num_bytes
        array = memory.numpy()  # an object of its own each time
        weakref.finalize(array, self._give_back, memory).atexit = False
        return torch.from_numpy(array).view(dtype)

    def note(self, lent_bytes: int, kept_bytes: int) -> None:
        """So much more, or less, is lent and kept."""
        with self._guard:
            self.lent_bytes += lent_bytes
            self.kept_bytes += kept_bytes
            self._guard.notify_all()

    def wait_left(self, max_bytes: int) -> None:
        """Waits until no more than that is lent: it will have to be kept when the weights change. No longer than
        :data:`PATIENCE_S`: a reader may be stopped."""
        deadline = time.monotonic() + PATIENCE_S
        while self.awaited_bytes > max_bytes:
            self.look()
            with self._guard:
                if self._guard.wait_for(lambda: self.awaited_bytes <= max_bytes, POLL_S if self._looks else PATIENCE_S):
                    return
            if time.monotonic() >= deadline:
                self.wait_no_more()

    def watch(self, look: Callable[[], None]) -> None:
        """Of what is lent in shared memory nobody hears by itself that it has been read: ``look`` finds out."""
        with self._guard:
            self._looks = (*self._looks, look)

    def watch_no_more(self, look: Callable[[], None]) -> None:
        with self._guard:
            self._looks = tuple([one for one in self._looks if one != look])

    def look(self) -> None:
        """Finds out what has been read."""
        for look in self._looks:
            look()

    @property
    def awaited_bytes(self) -> int:
        """What is lent, unless nobody waits for its readers now."""
        return self.lent_bytes if time.monotonic() >= self._patient_from else 0

    def wait_no_more(self) -> None:
        """A reader does not read: for a minute nobody waits for any."""
        self._patient_from = time.monotonic() + 60 * PATIENCE_S

    def empty(self) -> None:
        """Keeps no piece that is not in use."""
        with self._guard:
            self.num_bytes -= sum(piece.nbytes for pieces in self._free.values() for piece in pieces)
            self._free.clear()

    def _give_back(self, memory: torch.Tensor) -> None:
        with self._guard:
            self._free.setdefault(memory.nbytes, []).append(memory)
