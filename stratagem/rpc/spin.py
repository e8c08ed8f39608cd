"""Waiting briefly without sleeping: an idle core, above all a virtual one, takes tens of microseconds to wake."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SPIN_S = 100e-6
"""Looks for so long before it sleeps: about what two changes of threads and a wake-up cost."""
LOOK_S = 1e-3
"""So long holds what the kernel said of the threads that want to run."""
MAX_PAUSE = 63
"""After a look in vain that many waits sleep at once, at most: one in vain 1, two in a row 3, and so on."""


class Cores:
    """Whether there is a core to spin on: this process has at least as many cores as threads want to run."""

    def __init__(self, path: str = "/proc/loadavg") -> None:
        self._path = path
        self._looked_s = -LOOK_S
        self._are_enough = False

    def are_enough(self) -> bool:
        """Counts the threads that run now, this one among them; where the kernel does not tell, there are too many."""
        now = time.monotonic()
        if now - self._looked_s >= LOOK_S:
            self._looked_s = now
            self._are_enough = 0 < self._num_runnable() <= len(os.sched_getaffinity(0))
        return self._are_enough

    def _num_runnable(self) -> int:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return 0
        try:
            return int(os.read(descriptor, 128).split()[3].partition(b"/")[0])
        except (OSError, ValueError, IndexError):
            return 0
        finally:
            os.close(descriptor)


cores = Cores()


class Spin:
    """The waits of one thread."""

    def __init__(self) -> None:
        self._pause = 0
        self._num_skipped = 0

    def until(self, look: Callable[[], T]) -> T:
        """What ``look`` finds now or within a moment; something false: sleep."""
        found = look()
        if found:
            return found
        if self._num_skipped < self._pause:
            self._num_skipped += 1
            return found
        self._num_skipped = 0
        if not cores.are_enough():
            return found
        end = time.monotonic() + SPIN_S
        while time.monotonic() < end:
            found = look()
            if found:
                self._pause = 0
                return found
        self._pause = min(2 * self._pause + 1, MAX_PAUSE)
        return found
