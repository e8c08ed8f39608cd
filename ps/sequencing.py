"""Each state-changing request of a sender once: its place in the sequence, from its beginning to its result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from stratagem.errors import PeerUnavailableError, StaleStoreError
from stratagem.ps.requests import Sender
from stratagem.ps.sequences import NEW, SequenceDecision, SequenceWindow, Verdict
from stratagem.ps.state import StoreState
from stratagem.ps.waiting import TICK_S, Call


def begin(state: StoreState, sender: Sender, call: Call) -> SequenceDecision:
    """Enters a state-changing request into its sender's sequence; waits while the same request is being done.
    SequenceError: out of the window. StaleStoreError: no Hello since the last restore."""
    with state.lock:
        state.senders.check(sender)
        if not sender.sequence:
            return NEW
        while (decision := state.senders.window(sender).begin(sender.sequence)).verdict is Verdict.RUNNING:
            state.changed.wait(TICK_S)
            state.senders.check(sender)
            if not call.is_active():
                raise PeerUnavailableError(f"{sender} left while its call waited")
        return decision


@contextlib.contextmanager
def noted(state: StoreState, sender: Sender, call: Call) -> Iterator[None]:
    """Around a request that does no harm when it is repeated: only its place in the sequence is kept."""
    if begin(state, sender, call).verdict is Verdict.DONE:
        yield
        return
    with Running(state, sender) as running:
        yield
        running.done(True)


class Running:
    """Around a request that :func:`begin` called new: it failed and changed nothing, unless :meth:`done` says that it
    did what it was to do."""

    __slots__ = ("_is_done", "_sender", "_state")

    def __init__(self, state: StoreState, sender: Sender) -> None:
        self._state, self._sender = state, sender
        self._is_done = False

    def done(self, result: Any) -> None:
        """From here on a resend gets the result, whatever becomes of this call."""
        self._end(lambda window: window.finish(self._sender.sequence, result))
        self._is_done = True

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_done:
            self._end(lambda window: window.fail(self._sender.sequence))

    def _end(self, tell: Callable[[SequenceWindow], None]) -> None:
        with self._state.lock:
            if self._sender.sequence:
                with contextlib.suppress(StaleStoreError):  # the ps went back meanwhile
                    tell(self._state.senders.window(self._sender))
            self._state.changed.notify_all()
