"""What the parts of the store share: one condition for all control state, and the ways to wait on it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from stratagem.cluster.units import Unit, Update
from stratagem.errors import PeerUnavailableError, ProtocolError, StaleStoreError, StratagemError, VariableError
from stratagem.ps.commit_gate import CommitGate
from stratagem.ps.locked_group import LockedGroup
from stratagem.ps.published import ReplyLane
from stratagem.ps.requests import GroupVersion, Sender, TransferRef, Version
from stratagem.ps.senders import Senders
from stratagem.ps.sequences import SequenceDecision, Verdict
from stratagem.ps.specs import Limits
from stratagem.ps.staging import Staging
from stratagem.ps.sync_steps import SyncSteps
from stratagem.ps.units import UnitLedger

_TICK_S = 0.5  # how often a waiting call looks whether its caller is still there


class Call(Protocol):
    """The remote call that a method serves, as far as waiting needs to know it."""

    def is_active(self) -> bool:
        """False once the caller is gone or its deadline passed."""


class StoreState:
    """Control state of a store. ``changed`` guards everything here; a group's own lock guards its tensors.

    Lock order: ``changed`` is never taken while a group's lock is held.

    Args:
        limits: what to refuse.
        store_epoch: epoch of the first store.
        frames_timeout_s: seconds that a control message waits for its frames, and for the sender's lane.
    """

    def __init__(self, limits: Limits, store_epoch: int, frames_timeout_s: float) -> None:
        self.changed = threading.Condition()
        self.limits = limits
        self.store_epoch = store_epoch
        self.frames_timeout_s = frames_timeout_s
        self.locked_groups: dict[int, LockedGroup] = {}
        self.units = UnitLedger()
        self.steps = SyncSteps()
        self.staging = Staging()
        self.gate = CommitGate()
        self.senders = Senders(limits.max_peers)
        self.applying: set[tuple[Unit, int]] = set()
        self.inside: dict[tuple[str, int], int] = {}
        """Calls of each process life that are changing weights right now."""
        self.num_duplicates = 0
        """Updates that came again and applied nothing."""

    @property
    def step(self) -> int:
        """Largest number of updates applied to any group."""
        return max((locked.group.num_updates for locked in self.locked_groups.values()), default=0)

    @property
    def initialized(self) -> bool:
        """Whether there are variables, and all have values."""
        return bool(self.locked_groups) and all(locked.group.initialized for locked in self.locked_groups.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of variables and slots."""
        return sum(
            locked.group.num_bytes for locked in [*self.locked_groups.values()]
        )  # lanes ask without the condition

    @property
    def peer_bytes(self) -> int:
        """Bytes that one process life may have staged, and that may wait for it unread."""
        return self.limits.peer_bytes(self.num_bytes)

    def wait(
        self,
        ready: Callable[[], bool],
        sender: Sender,
        call: Call,
        timeout_s: float | None,
        store_epoch: int | None = None,
    ) -> bool:
        """Waits with ``changed`` held until ``ready()``; False after ``timeout_s`` seconds.

        Raises:
            FencedError: the sender was fenced meanwhile.
            StaleStoreError: the ps went back to a checkpoint meanwhile.
            PeerUnavailableError: the caller is gone.
        """
        epoch = self.store_epoch if store_epoch is None else store_epoch
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self.senders.check(sender)
            if self.store_epoch != epoch:
                raise StaleStoreError(
                    "this parameter server went back to a checkpoint; say Hello and look at its version"
                )
            if ready():
                return True
            left = _TICK_S if deadline is None else min(_TICK_S, deadline - time.monotonic())
            if left <= 0:
                return False
            if not call.is_active():
                raise PeerUnavailableError(f"{sender} left while its call waited")
            self.changed.wait(left)

    def begin(self, sender: Sender, call: Call) -> SequenceDecision:
        """Enters a state-changing request into its sender's sequence; waits while the same request is being done.

        Raises:
            SequenceError: out of the window.
            StaleStoreError: no Hello since the last restore.
        """
        with self.changed:
            self.senders.check(sender)
            if not sender.sequence:
                return SequenceDecision(Verdict.NEW)
            decision = self.senders.window(sender).begin(sender.sequence)
            while decision.verdict is Verdict.RUNNING:
                self.changed.wait(_TICK_S)
                self.senders.check(sender)
                if not call.is_active():
                    raise PeerUnavailableError(f"{sender} left while its call waited")
                decision = self.senders.window(sender).begin(sender.sequence)
            return decision

    @contextlib.contextmanager
    def noted(self, sender: Sender, call: Call) -> Iterator[None]:
        """Around a request that does no harm when it is repeated: only its place in the sequence is kept."""
        if self.begin(sender, call).verdict is Verdict.DONE:
            yield
            return
        with self.running(sender) as record:
            yield
            record.append(True)

    @contextlib.contextmanager
    def running(self, sender: Sender) -> Iterator[list[Any]]:
        """Around a request that :meth:`begin` called new: what is put into the list is its recorded result."""
        outcome: list[Any] = []
        try:
            yield outcome
        finally:
            with self.changed, contextlib.suppress(StaleStoreError):
                if sender.sequence:
                    window = self.senders.window(sender)
                    if outcome:
                        window.finish(sender.sequence, outcome[0])
                    else:
                        window.fail(sender.sequence)
                self.changed.notify_all()

    def gate_lets_through(self, update: Update | None) -> bool:
        """Whether no hold on commits stands in the way of an update now."""
        return self.gate.lets_through(update, time.monotonic())

    def enter(self, sender: Sender) -> None:
        """With ``changed`` held: the sender's call begins to change weights. A fence waits for :meth:`leave`."""
        self.gate.num_inside += 1
        self.inside[sender.life] = self.inside.get(sender.life, 0) + 1

    def leave(self, sender: Sender) -> None:
        """The reverse of :meth:`enter`."""
        self.gate.num_inside -= 1
        self.inside[sender.life] -= 1
        if not self.inside[sender.life]:
            del self.inside[sender.life]
        self.changed.notify_all()

    def initialized_shelves(self, groups: Iterable[int]) -> list[LockedGroup]:
        """Shelves of groups that have values, in the order of their ids.

        Raises:
            VariableError: a group is unknown or has no values yet.
        """
        locked_groups = [self.locked_group(group) for group in sorted(set(groups))]
        for locked in locked_groups:
            if not locked.group.initialized:
                raise VariableError(f"group {locked.spec.group} has no values yet; the lead assigns them first")
        return locked_groups

    def locked_group(self, group: int) -> LockedGroup:
        """The group with its lock.

        Raises:
            VariableError: the group is unknown.
        """
        locked = self.locked_groups.get(group)
        if locked is None:
            known = ", ".join(map(str, sorted(self.locked_groups))) or "none"
            raise VariableError(f"group {group} is unknown here (known: {known}); call CreateVariables first")
        return locked

    def wait_lane(self, sender: Sender, call: Call) -> ReplyLane:
        """The sender's lane, waited for: the stream may open a moment after the control message.

        Raises:
            StaleStoreError: none is open, and the sender has not introduced itself in this life of the ps: its channel
                found the address again by itself.
            ProtocolError: none was opened in time.
        """

        def is_open() -> bool:
            if self.senders.lane(sender) is not None:
                return True
            self.senders.window(sender)
            return False

        with self.changed:
            if not self.wait(is_open, sender, call, self.frames_timeout_s):
                raise ProtocolError(f"{sender} has no lane to send weights over; open the Transfer stream first")
            lane = self.senders.lane(sender)
            assert lane is not None
            return lane

    def wait_frames(
        self, sender: Sender, ref: TransferRef, groups: list[int], covered: Callable[[], bool], call: Call
    ) -> None:
        """With ``changed`` held: waits until a transfer is complete.

        Raises:
            ProtocolError: it was replaced by a newer one, or did not come in time; names the numbers.
        """

        def ready() -> bool:
            self.staging.check_current(sender, ref, groups)
            return self.staging.num_frames(sender, ref.transfer) >= ref.num_frames and covered()

        if not self.wait(ready, sender, call, self.frames_timeout_s):
            came = self.staging.num_frames(sender, ref.transfer)
            raise ProtocolError(
                f"expected {ref.num_frames} frames of transfer {ref.transfer} from {sender} that cover what is "
                "present, "
                f"got {came} within {self.frames_timeout_s:.0f} s; stage them again under a new transfer"
            )

    def send_weights(
        self, sender: Sender, wants: Iterable[tuple[int, Version | None]], transfer: int, call: Call
    ) -> tuple[GroupVersion, ...]:
        """Sends each group's weights unless the reader has them."""
        lane = self.wait_lane(sender, call)
        with self.changed:
            locked_groups = [(self.locked_group(group), have) for group, have in wants]
        return tuple(locked.send_weights(lane, transfer, have) for locked, have in locked_groups)

    def close_lanes(self, error: StratagemError) -> None:
        """Ends every lane."""
        with self.changed:
            for lane in self.senders.lanes():
                lane.close(error)
