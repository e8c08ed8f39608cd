"""The open process groups of this process, at its end and in its forks."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import Any

from stratagem.errors import ConfigurationError
from stratagem.worker.ring.communicator import Communicator

_SPAWN = 'start it by torch.multiprocessing.get_context("spawn"), and make a group there'
OPEN: weakref.WeakSet[Any] = weakref.WeakSet()
_forked: set[int] = set()
"""This process, if it was forked from one in which a group stood."""


def refuse_forked() -> None:
    """Raises ``ConfigurationError`` in a process that was forked while a group stood: gRPC, which the parent uses,
    would wait here for ever."""
    if os.getpid() in _forked:
        raise ConfigurationError(f"this process was forked from one that has a process group: {_SPAWN}")


def elsewhere(task: str, communicator: Communicator) -> str:
    """Which collective this process is in, as ``task``, of another group than that of ``communicator``; empty: none.
    Two ranks may come to two groups in another order."""
    for group in list(OPEN):
        other = group.communicator
        if other is not communicator and other.is_inside and group.tasks[other.rank] == task:
            return f", while it is in {other.position.what} of the group {', '.join(group.tasks)}"
    return ""


def _close_all() -> None:
    """A script has ended, well or not, and destroyed no group: a thread that waits for another rank would keep the
    process, and the other ranks would wait for it."""
    for group in list(OPEN):
        group.shutdown(getattr(sys, "last_value", None))


def _forget_all() -> None:
    """In a forked child (a DataLoader's worker), which comes by :func:`_close_all` too: the groups are not its own."""
    for group in list(OPEN):
        group._ended = f"the process group belongs to the process that this one was forked from: {_SPAWN}"
        group._close = lambda *_: None  # its threads are not here, and its server does not stand a fork
        _forked.add(os.getpid())
    OPEN.clear()


# Before Python waits for its threads; atexit's functions come after that.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_forget_all)
