"""Applying an update: its gradient has arrived and its turn has come; then weights change in all groups or in none."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Sequence

from stratagem.cluster.units import Update
from stratagem.errors import ProtocolError, VariableError
from stratagem.measuring import measures
from stratagem.measuring.measures import labelled
from stratagem.ps.backup import AsItCame
from stratagem.ps.frames import COMMIT_UPDATE
from stratagem.ps.merge import facts_of, join_facts
from stratagem.ps.requests import (
    CommitUpdate,
    Facts,
    GroupCommit,
    GroupVersion,
    PrepareUpdate,
    Sender,
    TransferRef,
    Version,
)
from stratagem.ps.runs import covers, presence
from stratagem.ps.shard_group import Parts
from stratagem.ps.state import StoreState
from stratagem.ps.waiting import Call, check_counts, wait, wait_frames, wait_lane

_group_of = operator.attrgetter("group")
Gradient = dict[int, Parts]
Present = dict[int, tuple[bool, ...]]
"""Of each group of an update: which of its shards have a gradient."""


class Applying:
    """What asynchronous and synchronous commits have in common."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def take_gradient(self, sender: Sender, ref: TransferRef, present: Present, call: Call, *, keep: bool) -> Gradient:
        """With ``changed`` held: waits for a gradient and hands out its parts; lets go of them unless ``keep``."""
        state = self._state
        numbers = list(present)
        parts: Gradient = {}

        def covered() -> bool:
            for group in numbers:
                parts[group] = state.staging.parts(sender, ref.transfer, group)
                spec = state.locked_group(group).group.spec
                if not spec.is_table and not covers(  # a table's frames are all that came
                    [(offset, piece.numel()) for offset, piece in parts[group]], spec.shards, present[group]
                ):
                    return False
            return True

        wait_frames(state, sender, ref, numbers, covered, call)
        if not keep:
            state.staging.drop(sender, ref.transfer, numbers)
        return parts

    def facts(self, gradient: Gradient, present: Present) -> Facts:
        specs = {group: self._state.locked_group(group).spec for group in gradient}
        return join_facts([facts_of(specs[group], parts, present[group]) for group, parts in gradient.items()])

    def forget(self, request: PrepareUpdate | CommitUpdate) -> None:
        """With ``changed`` held: the gradient is not needed any more."""
        numbers = [commit.group for commit in request.groups]
        self._state.staging.drop(request.sender, request.gradients.transfer, numbers)

    def present(self, groups: Sequence[GroupCommit]) -> Present:
        """Decoded presence masks. VariableError: a group is unknown or has no values. ProtocolError: a group comes
        twice, or its mask is too long."""
        present: Present = {}
        for commit in sorted(groups, key=_group_of):
            group = self._state.locked_group(commit.group).group
            if not group.initialized:
                raise VariableError(f"group {commit.group} has no values yet; the lead assigns them first")
            present[commit.group] = presence(commit.present, len(group.spec.shards))
        if len(present) != len(groups):
            raise ProtocolError(f"expected each group once in an update, got {[commit.group for commit in groups]}")
        return present

    def apply(
        self,
        groups: Sequence[GroupCommit],
        gradient: Gradient,
        present: Present,
        scale: float,
        as_it_came: AsItCame | None = None,
    ) -> None:
        """Applies one update to several groups: all or, when one of them refuses it, none. A backup is told."""
        state = self._state
        commits = [(state.locked_group(commit.group), commit) for commit in sorted(groups, key=_group_of)]
        num_locked = 0
        try:
            for locked, _ in commits:
                if not locked.lock.acquire(blocking=False):
                    with state.totals.timed(measures.QUEUE):
                        locked.lock.acquire()
                num_locked += 1
            if state.memory.lent_bytes:
                state.memory.wait_left(state.shared_bytes)
            start = time.perf_counter_ns()
            for locked, commit in commits:
                locked.group.prepare(gradient[commit.group], present[commit.group], commit.hyper_parameters)
            if as_it_came is not None and state.backup is not None:
                state.backup.tell(COMMIT_UPDATE, as_it_came, gradient)
            self._note_staleness(groups)
            for locked, commit in commits:
                locked.publisher.outdate()
                begun = time.perf_counter_ns()
                group = commit.group
                locked.group.apply(gradient[group], present[group], scale)
                state.totals.add_span(locked.apply_measure, begun)
        finally:
            for locked, _ in commits[:num_locked]:
                locked.lock.release()
        state.totals.add_span(measures.APPLY, start)
        state.totals.add(measures.COMMITS, 1)

    def skip(self, groups: Iterable[GroupCommit]) -> None:
        """Notes that one update of several groups was skipped: a schedule counts it, and each worker has to know."""
        for locked in [self._state.locked_group(commit.group) for commit in groups]:
            with locked.lock:
                locked.group.num_skipped += 1

    def _note_staleness(self, groups: Sequence[GroupCommit]) -> None:
        """Counts by how many updates the weights lacked that a gradient was computed with."""
        for commit in groups:
            now = self._state.locked_group(commit.group).version
            if commit.have is not None and commit.have.epoch == now.epoch:
                bucket = measures.staleness_bucket(now.counter - commit.have.counter)
                self._state.totals.add(labelled(measures.STALENESS, bucket), 1)
                return

    def reply_weights(self, request: CommitUpdate, call: Call) -> tuple[GroupVersion, ...]:
        """Sends the weights of the request's groups that the sender does not have."""
        if self._state.backup is not None:
            self._state.backup.settle()
        wants = [(commit.group, commit.have) for commit in request.groups]
        begun = time.perf_counter_ns()
        versions = send_weights(self._state, request.sender, wants, request.reply_transfer, call)
        self._state.totals.add_span(measures.REPLY, begun)
        return versions


class Turn:
    """Around a change of weights. Waits for the gate and for the same update in progress elsewhere; from then on
    fences, holds and restores wait for it. Entering it tells whether the update must still be applied."""

    __slots__ = ("_call", "_pairs", "_sender", "_state", "_store_epoch", "_update")

    def __init__(self, state: StoreState, sender: Sender, update: Update, store_epoch: int, call: Call) -> None:
        self._state, self._sender, self._update = state, sender, update
        self._store_epoch, self._call = store_epoch, call
        self._pairs = {(unit, update.ordinal) for unit in update.units}

    def __enter__(self) -> bool:
        state = self._state
        with state.lock:
            check_counts(state, self._sender, self._store_epoch)
            if not self._is_free():
                held = not state.gate_lets_through(self._update)
                with state.totals.timed(measures.HELD if held else measures.QUEUE):
                    wait(state, self._is_free, self._sender, self._call, None, self._store_epoch)
            is_new = len(state.units.lacking(self._update)) == len(self._update.units)
            state.enter(self._sender)
            state.applying |= self._pairs
        return is_new

    def __exit__(self, *_: object) -> None:
        state = self._state
        with state.lock:
            state.applying -= self._pairs
            state.leave(self._sender)

    def _is_free(self) -> bool:
        state = self._state
        return self._pairs.isdisjoint(state.applying) and state.gate_lets_through(self._update)


def send_weights(
    state: StoreState, sender: Sender, wants: Iterable[tuple[int, Version | None]], transfer: int, call: Call
) -> tuple[GroupVersion, ...]:
    """Sends each group's weights unless the reader has them."""
    lane = wait_lane(state, sender, call)
    locked_groups = [(state.locked_group(group), have) for group, have in wants]
    return tuple([locked.send_weights(lane, transfer, have) for locked, have in locked_groups])
