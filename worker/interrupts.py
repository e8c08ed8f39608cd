"""SIGINT and SIGTERM: exceptions in the main thread at a safe moment, or, where somebody saves first, a request to end.

An exception between two lines of gRPC (after a call was made and before its thread runs, say) leaves a call that nobody
ends, and closing the channel then waits for it for ever. So a signal that arrives there is sent again a moment later.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from stratagem.worker.preemption_request import preemption

EXIT_TERMINATED = 143
AGAIN_S = 0.02
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_before: dict[int, Callable[[int, FrameType | None], Any] | int] = {}
"""Handlers that were there when somebody began to watch."""


class Preempted(SystemExit):
    """This process was asked to end and has saved what it needs to go on: exit code 143, "start me again"."""

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_TERMINATED)
        self.message = message
        """What was saved, and where."""


def install() -> None:
    """From now on SIGINT raises ``KeyboardInterrupt`` and SIGTERM ``SystemExit(143)``, at a safe moment.

    While somebody watches :data:`~stratagem.worker.preemption_request.preemption`, the first of them is a request only.
    """
    for number in _SIGNALS:
        signal.signal(number, _on_signal)


def watch(grace_s: float) -> None:
    """From now on, until as many calls of :func:`unwatch`, the first SIGINT or SIGTERM is a request to end.

    A second one ends this process at once, as does the end of the grace. Does nothing about signals in a thread other
    than the main one: Python allows that there alone. ``grace_s``: seconds from the request to the end, if nobody has
    begun to save.
    """
    if not _before and threading.current_thread() is threading.main_thread():
        _before.update((number, signal.getsignal(number) or signal.SIG_DFL) for number in _SIGNALS)
        install()
    preemption.watch(grace_s)


def unwatch() -> None:
    """Undoes one :func:`watch`. A request that nobody has followed becomes a signal again."""
    was_left = preemption.unwatch()
    if not preemption.is_watched and threading.current_thread() is threading.main_thread():
        for number, handler in _before.items():
            signal.signal(number, handler)
        _before.clear()
    if was_left:
        os.kill(os.getpid(), signal.SIGTERM)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if preemption.request():
        return
    if inside_grpc(frame):
        again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
        return
    preemption.leave()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(EXIT_TERMINATED)


def inside_grpc(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs on behalf of gRPC's own code. Waiting on a condition does not: it may end early."""
    if frame is not None and frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "wait":
        return False
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "grpc":
            return True
        frame = frame.f_back
    return False
