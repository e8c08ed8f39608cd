"""Commits: the path of an update from staged frames to new weights, exactly once.

Asynchronous updates here; staleness 0 in :mod:`stratagem.ps.sync_commits`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from stratagem.cluster.units import Unit, Update
from stratagem.errors import ProtocolError
from stratagem.ps.merge import facts_of, join_facts
from stratagem.ps.requests import (
    CommitResult,
    CommitUpdate,
    Facts,
    GroupCommit,
    GroupVersion,
    PrepareUpdate,
    Sender,
    TransferRef,
    UpdateAction,
)
from stratagem.ps.runs import covers, presence
from stratagem.ps.sequences import Verdict
from stratagem.ps.shard_group import Parts
from stratagem.ps.state import Call, StoreState
from stratagem.ps.sync_commits import SyncCommits
from stratagem.ps.units import UnitClose

Gradient = dict[int, Parts]


class Commits:
    """Prepares and applies updates.

    Args:
        state: of the store.
    """

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self.sync = SyncCommits(state, self)

    def prepare_update(self, request: PrepareUpdate, call: Call) -> Facts:
        """Waits for the frames of an update; with ``want_facts`` says what is in its gradient.

        Repeating it does no harm, so its place in the sequence is only noted.

        Raises:
            ProtocolError: frames did not come, or do not fit.
        """
        with self._state.noted(request.sender, call):
            return self._prepare(request, call)

    def commit_update(self, request: CommitUpdate, call: Call) -> CommitResult:
        """Applies a staged update unless it is applied already, and sends the weights.

        Raises:
            ProtocolError: frames, presence or units that cannot be; nothing is applied.
            ConfigurationError: hyper-parameters that torch refuses, or that differ between slices.
        """
        self._check(request)
        decision = self._state.begin(request.sender, call)
        if decision.verdict is Verdict.DONE and (decision.result is not None or not request.update.units):
            known = decision.result_as(CommitResult) if decision.result is not None else None
            return self._repeat(request, known, call)
        if decision.verdict is Verdict.DONE:
            return self._commit(request, call)
        with self._state.running(request.sender) as record:
            result = self._commit(request, call)
            record.append(result)
        return result

    def close_units(self, sender: Sender, closes: Sequence[UnitClose], call: Call) -> None:
        """Closes units; repeating it does no harm."""
        with self._state.noted(sender, call), self._state.changed:
            self._state.units.close(closes)

    def take_gradient(
        self, sender: Sender, ref: TransferRef, groups: Sequence[GroupCommit], call: Call, *, keep: bool
    ) -> Gradient:
        """With ``changed`` held: waits for a gradient and hands out its parts; lets go of them unless ``keep``."""
        state = self._state
        present = self.present(groups)
        numbers = [commit.group for commit in groups]

        def covered() -> bool:
            return all(
                state.locked_group(group).spec.is_table  # its frames are all that came
                or covers(
                    [(offset, piece.numel()) for offset, piece in state.staging.parts(sender, ref.transfer, group)],
                    state.locked_group(group).spec.shards,
                    present[group],
                )
                for group in numbers
            )

        state.wait_frames(sender, ref, numbers, covered, call)
        parts: Gradient = {group: state.staging.parts(sender, ref.transfer, group) for group in numbers}
        if not keep:
            state.staging.drop(sender, ref.transfer, numbers)
        return parts

    def present(self, groups: Sequence[GroupCommit]) -> dict[int, tuple[bool, ...]]:
        """Decoded presence masks.

        Raises:
            VariableError: a group is unknown or has no values.
            ProtocolError: a group comes twice, or its mask is too long.
        """
        masks = {commit.group: commit.present for commit in groups}
        if len(masks) != len(groups):
            raise ProtocolError(f"expected each group once in an update, got {[commit.group for commit in groups]}")
        locked_groups = self._state.initialized_shelves(masks)
        return {
            locked.spec.group: presence(masks[locked.spec.group], len(locked.spec.shards)) for locked in locked_groups
        }

    @contextmanager
    def turn(self, sender: Sender, update: Update, store_epoch: int, call: Call) -> Iterator[bool]:
        """Waits for the gate and for the same update under way elsewhere; then fences, holds and restores wait for it.

        Yields:
            Whether the update must still be applied.
        """
        state = self._state
        pairs = {(unit, update.ordinal) for unit in update.units}
        with state.changed:
            self._wait_turn(sender, update, pairs, store_epoch, call)
            is_new = not update.units or state.units.is_new(update)
            state.enter(sender)
            state.applying |= pairs
        try:
            yield is_new
        finally:
            with state.changed:
                state.applying -= pairs
                state.leave(sender)

    def _wait_turn(
        self, sender: Sender, update: Update, pairs: set[tuple[Unit, int]], store_epoch: int, call: Call
    ) -> None:
        state = self._state

        def free() -> bool:
            return not pairs & state.applying and state.gate_lets_through(update)

        state.wait(free, sender, call, None, store_epoch)

    def _commit(self, request: CommitUpdate, call: Call) -> CommitResult:
        state = self._state
        with state.changed:
            store_epoch = state.store_epoch
            self.present(request.groups)
            state.units.close(request.closes)
            is_new = not request.update.units or state.units.is_new(request.update)
        if request.slice is not None:
            return self.sync.commit(request, request.slice, store_epoch, call)
        state.wait_lane(request.sender, call)
        applied = False
        if is_new:
            applied = self._apply_once(request, store_epoch, call)
        else:
            self._note_duplicate(request)
        return CommitResult(applied, self.reply_weights(request, call))

    def _apply_once(self, request: CommitUpdate, store_epoch: int, call: Call) -> bool:
        state = self._state
        gradient: Gradient = {}
        if request.action is UpdateAction.APPLY:
            with state.changed:
                gradient = self.take_gradient(request.sender, request.gradients, request.groups, call, keep=True)
        with self.turn(request.sender, request.update, store_epoch, call) as is_new:
            if is_new and request.action is UpdateAction.APPLY:
                self.apply(request.groups, gradient, self.present(request.groups), request.scale)
            self._forget(request)
            with state.changed:
                if is_new:
                    state.units.record(request.update, request.num_servers)
                else:
                    state.num_duplicates += 1
        return is_new and request.action is UpdateAction.APPLY

    def apply(
        self,
        groups: Sequence[GroupCommit],
        gradient: Gradient,
        present: dict[int, tuple[bool, ...]],
        scale: float,
    ) -> None:
        """Applies one update to several groups: all or, when one of them refuses it, none."""
        with ExitStack() as locks:
            locked_groups = [
                self._state.locked_group(commit.group) for commit in sorted(groups, key=lambda one: one.group)
            ]
            for locked in locked_groups:
                locks.enter_context(locked.lock)
            hyper = {commit.group: commit.hyper_parameters for commit in groups}
            for locked in locked_groups:
                group = locked.spec.group
                locked.group.prepare(gradient[group], present[group], hyper[group])
            for locked in locked_groups:
                group = locked.spec.group
                locked.publisher.outdate()
                locked.group.apply(gradient[group], present[group], hyper[group], scale)

    def reply_weights(self, request: CommitUpdate, call: Call) -> tuple[GroupVersion, ...]:
        """Sends the weights of the request's groups that the sender does not have."""
        wants = [(commit.group, commit.have) for commit in request.groups]
        return self._state.send_weights(request.sender, wants, request.reply_transfer, call)

    def _prepare(self, request: PrepareUpdate, call: Call) -> Facts:
        if request.slice is not None:
            return self.sync.prepare(request, request.slice, call)
        state = self._state
        with state.changed:
            gradient = self.take_gradient(request.sender, request.gradients, request.groups, call, keep=True)
            present = self.present(request.groups)
        if not request.want_facts:
            return Facts()
        return join_facts(
            [facts_of(state.locked_group(group).spec, parts, present[group]) for group, parts in gradient.items()]
        )

    def _repeat(self, request: CommitUpdate, recorded: CommitResult | None, call: Call) -> CommitResult:
        """A resend: applies nothing, and gets the weights as they are now."""
        self._note_duplicate(request)
        left_out = recorded is not None and recorded.left_out
        return CommitResult(False, self.reply_weights(request, call), left_out)

    def _note_duplicate(self, request: CommitUpdate) -> None:
        with self._state.changed:
            self._state.num_duplicates += 1
        self._forget(request)

    def _forget(self, request: CommitUpdate) -> None:
        with self._state.changed:
            numbers = [commit.group for commit in request.groups]
            self._state.staging.drop(request.sender, request.gradients.transfer, numbers)

    @staticmethod
    def _check(request: CommitUpdate) -> None:
        if not math.isfinite(request.scale) or request.scale < 0:
            raise ProtocolError(f"expected a finite scale of at least 0, got {request.scale}")
        if not request.update.units and not request.sender.sequence:
            raise ProtocolError(
                "an update without units needs a sequence number: nothing else tells a resend from a new one"
            )
        if request.slice is not None and not request.update.units:
            raise ProtocolError("a synchronous step needs the unit of its slice")
