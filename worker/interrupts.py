"""SIGINT and SIGTERM: exceptions in the main thread at a safe moment or, if the script saves first, a request to end.

An exception between two lines of gRPC (after a call was made and before its thread runs, say) leaves a call that never
ends, and closing the channel would then wait for it for ever. So a signal that arrives there is sent again a moment
later.

Ranks in step must stop after the same step. In the small collective at the end of every backward each says whether it
has been asked to end (:mod:`stratagem.worker.reduction.backward_status`), so all know it in the same step.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from stratagem.cluster.exit_codes import EXIT_PREEMPTED
from stratagem.worker.ring.communicator import Communicator, any_says

logger = logging.getLogger(__name__)
AGAIN_S, END_S = 0.02, 3.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_before: dict[int, Callable[[int, FrameType | None], Any] | int] = {}
"""Handlers that were there when somebody began to watch."""


class PreemptionRequest:
    """A request to end this process soon; a training follows it once it has saved."""

    def __init__(self) -> None:
        self.requested = False
        """Whether this process has been asked to end."""
        self.agreed = False
        """Whether every rank knows by now that some rank has been asked."""
        self.is_leaving = False
        """Whether this process is about to end because of it."""
        self._num_watching = 0
        self._grace_s = 0.0
        self._process = 0
        self._timer: threading.Timer | None = None

    def watch(self, grace_s: float) -> None:
        """Somebody looks for requests from now on; without, :meth:`request` refuses. ``grace_s``: seconds from a
        request to a second SIGTERM, which this process sends itself."""
        if not self._num_watching:
            self.is_leaving = False
        self._num_watching += 1
        self._grace_s = grace_s
        self._process = os.getpid()

    @property
    def is_watched(self) -> bool:
        return self._num_watching > 0

    def unwatch(self) -> bool:
        """Undoes one :meth:`watch`. Returns whether nobody is left to follow a request that has been made."""
        self._num_watching -= 1
        if self._num_watching:
            return False
        was_left = self.requested and not self.is_leaving
        self._cancel()
        self.requested = self.agreed = False
        return was_left

    def request(self) -> bool:
        """Asks this process to end. Returns whether that is new to it and somebody watches; from any thread.

        A forked child has what it inherited, and nobody there follows it.
        """
        if self.requested or not self._num_watching or os.getpid() != self._process:
            return False
        self.requested = True
        self._timer = _send_after(self._grace_s, signal.SIGTERM)
        return True

    def end_soon(self, reason: str) -> None:
        """This process takes part no more: has it end within seconds, in the middle of a step if the script comes to
        nothing of the job sooner. From any thread; not where the script handles SIGTERM by itself."""
        if signal.getsignal(signal.SIGTERM) is not _on_signal:
            return
        logger.warning("This process ends, in the middle of a step if need be: %s", reason)
        _send_after(END_S, signal.SIGTERM)

    def agree(self, workers: Communicator | None) -> bool:
        """Whether any rank has been asked, by a collective of its own. Every rank has to call it. Without ``workers``
        this process decides alone."""
        if workers is None:
            return self.requested
        if any_says(workers, self.requested):
            self.agreed = True
        return self.agreed

    def is_due(self, workers: Communicator | None) -> bool:
        """Whether to save and to leave now, after a step: the same on every rank."""
        return self.requested if workers is None else self.agreed

    def leave(self) -> None:
        """The request is being followed: there is no hurry any more that the saving does not have by itself."""
        self.is_leaving = True
        self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


preemption = PreemptionRequest()
"""Of this process: signals are the process's too."""


class Preempted(SystemExit):
    """This process was asked to end and has saved what it needs to resume: exit code 143, "restart me"."""

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.message = message
        """What was saved, and where."""


def install() -> None:
    """From now on SIGINT raises ``KeyboardInterrupt`` and SIGTERM ``SystemExit(143)``, at a safe moment.

    While somebody watches :data:`preemption`, the first of them is a request only.
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
        _send_after(AGAIN_S, number)
        return
    preemption.leave()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(EXIT_PREEMPTED)


def _send_after(seconds: float, number: int) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()
    return timer


def inside_grpc(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs on behalf of gRPC's own code. Waiting on a condition does not: it may end early."""
    if frame is not None and frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "wait":
        return False
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "grpc":
            return True
        frame = frame.f_back
    return False
