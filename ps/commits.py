"""Commits: the path of an update from staged frames to new weights, exactly once.

Asynchronous updates here; staleness 0 in :mod:`stratagem.ps.sync_commits`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stratagem.errors import ConfigurationError, ProtocolError
from stratagem.measuring.flight import FLIGHT
from stratagem.ps.applying import Applying, Gradient, Present, Turn
from stratagem.ps.backup import AsItCame
from stratagem.ps.frames import CLOSE_UNITS, COMMIT_UPDATE
from stratagem.ps.requests import CommitResult, CommitUpdate, Facts, PrepareUpdate, Sender, UpdateAction
from stratagem.ps.sequences import Verdict
from stratagem.ps.state import StoreState
from stratagem.ps.sync_commits import SyncCommits
from stratagem.ps.units import UnitClose
from stratagem.ps.waiting import Call, Running, begin, noted, wait_lane


class Commits(Applying):
    def __init__(self, state: StoreState) -> None:
        super().__init__(state)
        self.sync = SyncCommits(state, self)

    def prepare_update(self, request: PrepareUpdate, call: Call) -> Facts:
        """Waits for the frames of an update; with ``want_facts`` says what is in its gradient.

        Repeating it does no harm, so its place in the sequence is only noted. ProtocolError: frames did not come, or do
        not fit.
        """
        state = self._state
        with noted(state, request.sender, call):
            if request.slice is not None:
                return self.sync.prepare(request, request.slice, call)
            with state.lock:
                present = self.present(request.groups)
                gradient = self.take_gradient(request.sender, request.gradients, present, call, keep=True)
            return self.facts(gradient, present) if request.want_facts else Facts()

    def commit_update(self, request: CommitUpdate, call: Call) -> CommitResult:
        """Applies a staged update unless it is applied already, and sends the weights. ProtocolError: frames, presence
        or units that cannot be; nothing is applied. ConfigurationError: hyper-parameters that torch refuses, or that
        differ between slices."""
        self._check(request)
        decision = begin(self._state, request.sender, call)
        if decision.verdict is Verdict.DONE and (decision.result is not None or not request.update.units):
            known = decision.result_as(CommitResult) if decision.result is not None else None
            return self._repeat(request, known, call)
        if decision.verdict is Verdict.DONE:  # longer ago than results are kept: the ledger of units knows
            return self._commit(request, None, call)
        what = FLIGHT.happening(f"commit from {request.sender.task},", request.update)
        with Running(self._state, request.sender) as running, what:
            return self._commit(request, running, call)

    def close_units(
        self, sender: Sender, closes: Sequence[UnitClose], call: Call, as_it_came: AsItCame = bytes
    ) -> None:
        """Closes units; repeating it does no harm."""
        with noted(self._state, sender, call):
            with self._state.lock:
                self._state.units.close(closes, self._state.trained)
                if self._state.steps.leave(sender, closes):
                    self._state.changed.notify_all()
                if self._state.backup is not None:
                    self._state.backup.tell(CLOSE_UNITS, as_it_came, {})
            if self._state.backup is not None:
                self._state.backup.settle()

    def _commit(self, request: CommitUpdate, running: Running | None, call: Call) -> CommitResult:
        state, update = self._state, request.update
        with state.lock:
            store_epoch = state.store_epoch
            present = self.present(request.groups)
            state.units.close(request.closes, state.trained)
            is_new = not update.units or bool(state.units.lacking(update))
            if request.slice is not None and state.steps.leave(request.sender, request.closes):
                state.changed.notify_all()
        if request.slice is not None:
            if state.backup is not None:
                raise ConfigurationError("copies of what a ps holds (ps_replicas 2) are for a staleness above 0")
            result = self.sync.commit(request, request.slice, store_epoch, call)
            if running is not None:
                running.done(result)
            return result
        wait_lane(state, request.sender, call)
        applied = False
        if is_new:
            applied = self._apply_once(request, present, store_epoch, running, call)
        else:
            self._drop_duplicate(request, running)
            if state.backup is not None and request.closes:
                state.backup.tell(COMMIT_UPDATE, request.as_it_came, {})
        try:
            return CommitResult(applied, self.reply_weights(request, call))
        finally:
            if applied:
                with state.lock:
                    state.num_unanswered -= 1
                    state.changed.notify_all()

    def _apply_once(
        self, request: CommitUpdate, present: Present, store_epoch: int, running: Running | None, call: Call
    ) -> bool:
        state = self._state
        applies = request.action is UpdateAction.APPLY
        gradient: Gradient = {}
        if applies:
            with state.lock:
                gradient = self.take_gradient(request.sender, request.gradients, present, call, keep=True)
        with Turn(state, request.sender, request.update, store_epoch, call) as is_new:
            applies = applies and is_new
            if applies:
                self.apply(request.groups, gradient, present, request.scale, request.as_it_came)
            elif is_new:
                self.skip(request.groups)
            gradient = {}  # its memory is free when staging forgets it, not when others have used the room
            groups = [each.group for each in request.groups]
            with state.lock:
                if not is_new:
                    self._drop_duplicate(request, running)
                    state.units.drop(request.update, request.num_servers, groups)
                    if state.backup is not None:
                        state.backup.tell(COMMIT_UPDATE, request.as_it_came, {})
                    return False
                self.forget(request)
                state.units.record(request.update, request.num_servers, groups)
                if state.backup is not None and not applies:
                    state.backup.tell(COMMIT_UPDATE, request.as_it_came, {})
                if running is not None:  # before the reply: who does not get it has been applied all the same
                    running.done(CommitResult(applies, ()))
                state.num_unanswered += applies
        return applies

    def _repeat(self, request: CommitUpdate, recorded: CommitResult | None, call: Call) -> CommitResult:
        """A resend: applies nothing, and gets the weights as they are now."""
        self._drop_duplicate(request, None)
        left_out = recorded is not None and recorded.left_out
        return CommitResult(False, self.reply_weights(request, call), left_out)

    def _drop_duplicate(self, request: CommitUpdate, running: Running | None) -> None:
        with self._state.lock:
            self.forget(request)
            if running is not None:
                running.done(CommitResult(False, ()))

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
