"""A condition that wakes only those who can go on."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SelectiveCondition:
    """As ``threading.Condition``, but who tells of a change asks for each who waits whether it is what that one waits
    for, which takes a microsecond; to wake a thread that goes to sleep again takes fifty, and the interpreter's lock.

    ``with`` it, which may be nested, around all that it guards. Predicates are called by other threads, with the lock
    held: they look at what it guards, and raise nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[tuple[Callable[[], bool], threading.Condition]] = []

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Whether the predicate is true; waits until it is, at most ``timeout_s`` seconds."""
        if predicate():
            return True
        own = threading.Condition(self._lock)
        self._waiting.append(entry := (predicate, own))
        try:
            return own.wait_for(predicate, timeout_s)
        finally:
            self._waiting.remove(entry)

    def notify_all(self) -> None:
        """What it guards has changed."""
        for predicate, own in self._waiting:
            if predicate():
                own.notify()
