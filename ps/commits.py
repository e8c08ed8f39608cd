"""Commits: the path of an update from staged frames to new weights, exactly once.

Asynchronous updates here; staleness 0 in :mod:`stratagem.ps.sync_commits`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stratagem.errors import ProtocolError
from stratagem.ps.applying import Applying, Gradient
from stratagem.ps.merge import facts_of, join_facts
from stratagem.ps.requests import (
    CommitResult,
    CommitUpdate,
    Facts,
    PrepareUpdate,
    Sender,
    UpdateAction,
)
from stratagem.ps.sequences import Verdict
from stratagem.ps.state import Call, StoreState
from stratagem.ps.sync_commits import SyncCommits
from stratagem.ps.units import UnitClose


class Commits(Applying):
    """Prepares and applies updates.

    Args:
        state: of the store.
    """

    def __init__(self, state: StoreState) -> None:
        super().__init__(state)
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
