"""What the parts of the store share: control state under one condition; groups with their own locks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

from stratagem.cluster.units import Unit, Update
from stratagem.errors import StratagemError, VariableError
from stratagem.measuring.flight import RunningTotals
from stratagem.measuring.measures import ROW_SHARE, labelled
from stratagem.ps.backup import Backup
from stratagem.ps.commit_gate import CommitGate
from stratagem.ps.locked_group import LockedGroup
from stratagem.ps.origin import Origin
from stratagem.ps.requests import Sender
from stratagem.ps.senders import Senders
from stratagem.ps.shard_group import ShardGroup
from stratagem.ps.specs import GroupSpec, Limits
from stratagem.ps.staging import Staging
from stratagem.ps.sync_steps import SyncSteps
from stratagem.ps.table_group import TableGroup
from stratagem.ps.units import UnitLedger
from stratagem.rpc.frame_memory import FrameMemory
from stratagem.rpc.lane_meter import BytesMeter

MIN_SHARED_BYTES = 64 << 20
"""What senders may have staged beside the one that has most, however small the variables are."""


def new_epoch(previous: int) -> int:
    """A store epoch larger than ``previous``, and another one than any process had, though the clock may have gone
    back: milliseconds since 1970, and chance."""
    return max(previous, time.time_ns() // 1_000_000) + random.randint(1, 1 << 32)


class StoreState:
    """Control state of a store. ``changed`` guards everything here; a group's own lock guards its tensors.

    Lock order: ``changed`` is never taken while a group's lock is held. ``frames_timeout_s``: seconds that a control
    message waits for its frames, and for the sender's lane; ``task``: the ps, for messages.
    """

    def __init__(self, limits: Limits, store_epoch: int, frames_timeout_s: float, task: str = "ps:0") -> None:
        self.lock = threading.RLock()
        """Of ``changed``, which takes more calls to enter: for who does not wait inside."""
        self.changed = threading.Condition(self.lock)
        self.task = task
        self.limits = limits
        self.store_epoch = store_epoch
        self.frames_timeout_s = frames_timeout_s
        self.locked_groups: dict[int, LockedGroup] = {}
        self.units = UnitLedger()
        self.steps = SyncSteps()
        self.staging = Staging()
        self.memory = FrameMemory()
        """Of frames that came over sockets, and of weights that changed before they had left."""
        self.gate = CommitGate()
        self.senders = Senders(limits.max_peers)
        self.applying: set[tuple[Unit, int]] = set()
        self.inside: dict[tuple[str, int], int] = {}
        """Calls of each incarnation that are changing weights right now."""
        self.num_unanswered = 0
        """Updates whose gradients are forgotten while the weights that answer them are not lent yet."""
        self.totals = RunningTotals()
        self.lanes = BytesMeter()
        self.num_ps = 0
        """Of how many ps this is one; 0: as many as the job began with."""
        self.origin: Origin | None = None
        """Set where this ps began from a checkpoint that another number of ps made."""
        self.num_moved = 0
        """What the checkpoint of another number of ps, which this one or one before it began from, adds to the updates
        of the groups here: ps:0 has all of that checkpoint, and what a group took from it is nobody's. So the number of
        all ps together stays, whatever their number."""
        self.elsewhere: Sequence[GroupSpec] = ()
        """What other ps hold of the checkpoint that this one began from."""
        self.backup: Backup | None = None
        """Set where the job keeps copies of what a ps holds."""
        self.is_told = False
        """A worker that gives values, or a checkpoint of as many ps, has said what is to be here; it may be nothing."""

    @property
    def step(self) -> int:
        """Largest number of updates applied to any group."""
        before = self.origin.step if self.origin is not None else 0
        return max((locked.group.num_updates for locked in self.locked_groups.values()), default=before)

    @property
    def num_updates(self) -> int:
        """Of all groups together; with :attr:`num_moved`."""
        return self.num_moved + sum([locked.group.num_updates for locked in self.locked_groups.values()])

    @property
    def initialized(self) -> bool:
        """Whether there are variables, and all have values.

        A model that some workers have come to before the one that gives it values is not among them yet.
        """
        begun = self._begun
        return bool(begun or self.origin is not None) and all(group.initialized for group in begun)

    @property
    def complete(self) -> bool:
        """Whether all that is to be here has values."""
        return self.is_told and all(group.initialized for group in self._begun)

    @property
    def _begun(self) -> list[ShardGroup]:
        """The groups that have values, or are given them soon."""
        every = self.locked_groups.values()
        return [locked.group for locked in every if locked.is_awaited or locked.group.initialized]

    def trained(self) -> dict[int, int]:
        """Groups here that have values and an optimizer, with their updates."""
        groups = {number: one.group for number, one in self.locked_groups.items() if one.group.initialized}
        return {number: group.num_updates for number, group in groups.items() if group.spec.optimizer}

    @property
    def num_bytes(self) -> int:
        """Bytes of variables and slots."""
        return sum([locked.group.num_bytes for locked in [*self.locked_groups.values()]])  # lanes ask without the lock

    def hottest_rows(self) -> dict[str, float]:
        """As measures: the rows of tables that get most of the updates here."""
        tables = [one.group for one in [*self.locked_groups.values()] if isinstance(one.group, TableGroup)]
        return {labelled(ROW_SHARE, row): share for table in tables for row, share in table.hottest_rows()}

    def peer_bytes(self) -> int:
        """Bytes that one incarnation may have staged, and that may wait for it unread."""
        return self.limits.peer_bytes(self.num_bytes)

    def gate_lets_through(self, update: Update | None) -> bool:
        """Whether no hold on commits stands in the way of an update now."""
        return self.gate.lets_through(update, time.monotonic())

    def enter(self, sender: Sender) -> None:
        """With ``changed`` held: the sender's call begins to change weights. A fence waits for :meth:`leave`."""
        self.gate.num_inside += 1
        self.inside[sender.key] = self.inside.get(sender.key, 0) + 1

    def leave(self, sender: Sender) -> None:
        self.gate.num_inside -= 1
        self.inside[sender.key] -= 1
        if not self.inside[sender.key]:
            del self.inside[sender.key]
        self.changed.notify_all()

    def locked_group(self, group: int) -> LockedGroup:
        """The group with its lock; ``VariableError`` where there is none."""
        locked = self.locked_groups.get(group)
        if locked is None:
            known = ", ".join(map(str, sorted(self.locked_groups))) or "none"
            raise VariableError(f"group {group} is unknown here (known: {known}); call CreateVariables first")
        return locked

    @property
    def shared_bytes(self) -> int:
        """What all senders but one may have in flight together."""
        return max(
            MIN_SHARED_BYTES, sum(one.spec.num_bytes for one in self.locked_groups.values() if not one.spec.is_table)
        )

    def keeps_slots(self) -> bool:
        """Whether a worker gets the shared memory of its gradient again for the next one: those of two are as much as
        may be in flight; at staleness 0 the slices of all are here at once."""
        return len(self.senders.lanes) <= 2 or self.steps.are_used

    def copy_is_outdated(self) -> None:
        """Something has changed that a backup is not told: its copy is gone when this returns, and is made again."""
        if self.backup is not None:
            self.backup.outdate()
            self.backup.settle()

    def close_lanes(self, error: StratagemError) -> None:
        with self.changed:
            for lane in [*self.senders.lanes.values()]:
                lane.close(error)
