"""What a request waits for in the store, and what ends the wait: a fence, a restore, a caller that is gone. Also the
place of each state-changing request in its sender's sequence, from its beginning to its result: each takes effect
once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from stratagem.errors import LimitError, PeerUnavailableError, ProtocolError, StaleStoreError
from stratagem.ps.published import ReplyLane
from stratagem.ps.requests import Sender, TransferRef
from stratagem.ps.sequences import NEW, SequenceDecision, SequenceWindow, Verdict
from stratagem.ps.state import StoreState

ROOM_S = 5.0
"""Then rather memory than time: the sender that has most here may be in a long backward, or stopped."""
POLL_S = 0.01
LANE_S = 3.0
"""For the lane of a request that came before it."""
TICK_S = 0.5
"""How often a waiting call looks whether its caller is still there."""


class Call(Protocol):
    """The remote call that a method serves, as far as waiting needs it."""

    def is_active(self) -> bool:
        """False once the caller is gone or its deadline passed."""


def check_counts(state: StoreState, sender: Sender, store_epoch: int) -> None:
    """With the lock held: refuses a call whose sender or store is no more. Errors as :func:`wait`."""
    state.senders.check(sender)
    if state.store_epoch != store_epoch:
        raise StaleStoreError("this parameter server begins from a checkpoint; send Hello and check its version")


def wait(
    state: StoreState,
    ready: Callable[[], bool],
    sender: Sender,
    call: Call,
    timeout_s: float | None,
    store_epoch: int | None = None,
) -> bool:
    """Waits with ``changed`` held until ``ready()``; False after ``timeout_s`` seconds. FencedError: the sender was
    fenced meanwhile. StaleStoreError: the ps went back to a checkpoint meanwhile. PeerUnavailableError: the caller is
    gone."""
    epoch = state.store_epoch if store_epoch is None else store_epoch
    deadline: float | None = None
    while True:
        check_counts(state, sender, epoch)
        if ready():
            return True
        if deadline is None and timeout_s is not None:
            deadline = time.monotonic() + timeout_s
        left = TICK_S if deadline is None else min(TICK_S, deadline - time.monotonic())
        if left <= 0:
            return False
        if not call.is_active():
            raise PeerUnavailableError(f"{sender} left while its call waited")
        state.changed.wait(left)


def wait_frames(
    state: StoreState, sender: Sender, ref: TransferRef, groups: list[int], covered: Callable[[], bool], call: Call
) -> None:
    """With ``changed`` held: waits until a transfer is complete. ProtocolError: it was replaced by a newer one, or did
    not come in time; names the numbers. StaleStoreError: the lane on which it was to come is gone."""
    seen_at = time.monotonic()

    def ready() -> bool:
        nonlocal seen_at
        state.staging.check_current(sender, ref, groups)
        if state.staging.num_frames(sender, ref.transfer) >= ref.num_frames and covered():
            return True
        if sender.key in state.senders.lanes:
            seen_at = time.monotonic()
        elif time.monotonic() - seen_at > LANE_S:
            if isinstance(refused := state.senders.refused.get(sender.key), LimitError):
                raise refused  # a new lane helps nobody
            raise StaleStoreError(f"the lane of {sender} broke before all of transfer {ref.transfer} had come")
        return False

    if not wait(state, ready, sender, call, state.frames_timeout_s):
        came = state.staging.num_frames(sender, ref.transfer)
        raise ProtocolError(
            f"{state.task} expected {ref.num_frames} frames of transfer {ref.transfer} from {sender} that cover what "
            f"is present, got {came} within {state.frames_timeout_s:.0f} s (a network that drops large packets lets "
            "none through, so look at its MTU); stage them again under a new transfer"
        )


def wait_lane(state: StoreState, sender: Sender, call: Call) -> ReplyLane:
    """The sender's lane, waited for: the stream may open a moment after the control message. StaleStoreError: none is
    open, and the sender has not introduced itself since this ps started: its channel found the address again by itself.
    ProtocolError: none was opened in time."""

    def is_open() -> bool:
        if sender.key in state.senders.lanes:
            return True
        state.senders.window(sender)
        return False

    lane = state.senders.lanes.get(sender.key)
    if lane is None:
        with state.lock:
            if not wait(state, is_open, sender, call, state.frames_timeout_s):
                raise ProtocolError(f"{sender} has no lane to send weights over; open the Transfer stream first")
            lane = state.senders.lanes[sender.key]
    return lane


def wait_room(state: StoreState, sender: Sender, num_bytes: int, call: Call) -> None:
    """With ``changed`` held: waits while there is no room for a frame of a gradient.

    In flight are gradients that are staged and weights that have not left. One gradient has room, and all others
    together with these weights have as much again. So a ps needs weights, slots and twice the weights, however many
    workers there are; two of them never wait. A sender that has waited for :data:`ROOM_S` goes on regardless.
    """

    def fits() -> bool:
        is_due = state.num_unanswered and state.backup is None  # a backup may take long to confirm
        shared_bytes = 0 if is_due else state.shared_bytes - state.memory.awaited_bytes
        return state.staging.has_room(sender, num_bytes, shared_bytes)

    def has_room() -> bool:
        if fits():
            return True
        state.memory.look()
        return fits()

    deadline = time.monotonic() + ROOM_S
    while not wait(state, has_room, sender, call, POLL_S):  # nobody announces it
        if time.monotonic() > deadline:
            state.staging.waive(sender)
            state.memory.wait_no_more()
            return


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
    took effect."""

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
