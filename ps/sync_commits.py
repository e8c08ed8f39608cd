"""Staleness 0: collects the slices of a step, merges them, applies the step once, and has every worker wait for it."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence

from stratagem.cluster.units import Unit, Update
from stratagem.errors import LimitError, ProtocolError
from stratagem.measuring import measures
from stratagem.ps.applying import Applying, Turn
from stratagem.ps.merge import SliceGradient, any_present, merge_slices
from stratagem.ps.requests import (
    CommitResult,
    CommitUpdate,
    Facts,
    GroupCommit,
    PrepareUpdate,
    RequestedSlice,
    Sender,
    UpdateAction,
)
from stratagem.ps.rows import merge_rows
from stratagem.ps.runs import presence
from stratagem.ps.shard_group import Parts
from stratagem.ps.state import StoreState
from stratagem.ps.sync_steps import Contribution, StepKey
from stratagem.ps.waiting import Call, wait, wait_lane


@dataclasses.dataclass(frozen=True)
class _Merged:
    """The gradient of a step, merged from the slices that counted then."""

    slices: tuple[Contribution, ...]
    groups: tuple[GroupCommit, ...]
    parts: dict[int, Parts]
    present: dict[int, tuple[bool, ...]]


class SyncCommits:
    """Synchronous updates; ``commits`` applies what is merged here."""

    def __init__(self, state: StoreState, commits: Applying) -> None:
        self._state = state
        self._commits = commits
        self._merging = threading.RLock()
        self._merged: _Merged | None = None

    def prepare(self, request: PrepareUpdate, part: RequestedSlice, call: Call) -> Facts:
        """Takes a slice; with ``want_facts`` waits for all that count and says what is in their sum."""
        state = self._state
        key, unit = _identify(request.update, part)
        with state.changed:
            if state.steps.is_applied(key) or state.steps.is_left_out(key, unit):
                return Facts()
            self._register(request, part, key, unit, call)
            state.changed.notify_all()
            if not request.want_facts:
                return Facts()
            wait(state, lambda: self._is_over(key, unit) or state.steps.all_prepared(key), request.sender, call, None)
        with self._merging:
            merged = self._merge(key)
            return self._commits.facts(merged.parts, merged.present) if merged is not None else Facts()

    def commit(self, request: CommitUpdate, part: RequestedSlice, store_epoch: int, call: Call) -> CommitResult:
        """Commits a slice, waits until the step is applied, sends the weights."""
        state, sender = self._state, request.sender
        key, unit = _identify(request.update, part)
        with state.changed:
            was_over = self._is_over(key, unit)
            if not was_over and not state.steps.is_prepared(key, unit):
                self._register(request, part, key, unit, call)
            was_over = self._is_over(key, unit)
        wait_lane(state, sender, call)
        if not was_over:
            self._commit_slice(request, key, unit, store_epoch, call)
            with state.changed:
                wait(state, lambda: self._is_over(key, unit), sender, call, None, store_epoch)
        with state.changed:
            left_out = state.steps.is_left_out(key, unit)
        versions = self._commits.reply_weights(request, call)
        applied = not was_over and not left_out and request.action is UpdateAction.APPLY
        return CommitResult(applied, versions, left_out)

    def close_step(
        self, sender: Sender, step: int, included: Sequence[Unit], committed: Sequence[Update], call: Call
    ) -> None:
        """The chief closes a step that a dead worker left incomplete; applies it here if that completes it."""
        state = self._state
        with state.changed:
            state.senders.check(sender)
            store_epoch = state.store_epoch
            keys = state.steps.close(sender, step, included, committed, state.units.is_applied)
            state.changed.notify_all()
        for key in keys:
            with Turn(state, sender, Update((), key[1]), store_epoch, call):
                self._close_step(key)

    def _register(
        self, request: PrepareUpdate | CommitUpdate, part: RequestedSlice, key: StepKey, unit: Unit, call: Call
    ) -> None:
        state = self._state
        contributes = state.units.is_new(request.update)
        gradient: dict[int, Parts] = {}
        skips = isinstance(request, CommitUpdate) and request.action is UpdateAction.SKIP
        if contributes and not skips:
            gradient = self._commits.take_gradient(
                request.sender, request.gradients, self._commits.present(request.groups), call, keep=False
            )
        else:
            self._commits.forget(request)
        if not math.isfinite(part.weight) or part.weight < 0:
            raise ProtocolError(f"step {key[0]}: expected a finite weight of at least 0, got {part.weight}")
        if not state.steps.is_applied(key):
            came = Contribution(
                request.sender, unit, request.update, part, request.groups, gradient, contributes=contributes
            )
            if (num_bytes := state.steps.num_bytes(request.sender.key) + came.num_bytes) > state.peer_bytes():
                raise LimitError(
                    f"the slices of {request.sender} in steps that wait here take {num_bytes:,} bytes, over "
                    f"max_peer_bytes of {state.peer_bytes():,}; commit earlier steps first"
                )
            state.steps.prepare(key, came)

    def _commit_slice(self, request: CommitUpdate, key: StepKey, unit: Unit, store_epoch: int, call: Call) -> None:
        state = self._state
        with Turn(state, request.sender, request.update, store_epoch, call):
            with state.changed:
                if state.steps.is_prepared(key, unit):
                    state.steps.commit(key, unit, request.action, request.scale, request.num_servers)
                state.changed.notify_all()
            self._close_step(key)

    def _is_over(self, key: StepKey, unit: Unit) -> bool:
        """Whether the sender has nothing to wait for: the step is applied, or went on without its slice."""
        error = self._state.steps.error(key)
        if error is not None:
            raise error
        return self._state.steps.is_applied(key) or self._state.steps.is_left_out(key, unit)

    def _close_step(self, key: StepKey) -> None:
        """Applies the step if it is ready and nobody else does."""
        state = self._state
        with state.changed:
            if not state.steps.claim(key):
                return
        try:
            self._apply(key)
        except Exception as error:  # no memory, say: nobody is to wait for ever
            with state.changed:
                state.steps.fail(key, error)
                state.changed.notify_all()
            return
        with state.changed:
            for one in state.steps.contributions(key):
                if one.contributes:
                    state.units.record(one.update, one.num_servers, (each.group for each in one.groups))
            state.steps.finish(key)
            state.changed.notify_all()

    def _apply(self, key: StepKey) -> None:
        state = self._state
        with state.changed:
            committed = [one for one in state.steps.contributions(key) if one.committed]
        action = committed[0].action if committed else UpdateAction.APPLY
        if action is UpdateAction.SKIP:
            return self._commits.skip(committed[0].groups)
        with self._merging:
            with state.totals.timed(measures.MERGE):
                merged = self._merge(key)
            if merged is not None and merged.parts:
                # Nobody left who knows the scale (every committer died here): the facts it came from are gone too.
                scale = committed[0].scale if committed else 1.0
                self._commits.apply(merged.groups, merged.parts, merged.present, scale)
            self._merged = None

    def _merge(self, key: StepKey) -> _Merged | None:
        """The gradient of a step; None when the step is gone. Called with ``_merging`` held."""
        state = self._state
        with state.changed:
            if not state.steps.is_open(key):
                return None
            slices = tuple(state.steps.contributions(key))
            factors = state.steps.coefficients(key)
        if self._merged is not None and self._merged.slices == slices:
            return self._merged
        adding = [(one, factor) for one, factor in zip(slices, factors, strict=True) if one.contributes]
        used = [pair for pair in adding if pair[1]] or adding  # all of weight 0: decay and momentum go on
        commits = {commit.group: commit for one, _ in reversed(used) for commit in one.groups}
        parts: dict[int, Parts] = {}
        present: dict[int, tuple[bool, ...]] = {}
        for group in sorted(commits):
            locked = state.locked_group(group)
            gradients = [
                SliceGradient(factor, one.parts[group], presence(commit.present, len(locked.spec.shards)))
                for one, factor in used
                for commit in one.groups
                if commit.group == group and group in one.parts
            ]
            if len(gradients) == 1 and gradients[0].coefficient == 1.0:
                parts[group], present[group] = gradients[0].parts, tuple(gradients[0].present)
            elif gradients and locked.spec.is_table:
                present[group] = any_present(gradients)
                parts[group] = merge_rows(locked.spec, [(one.coefficient, one.parts) for one in gradients])
            elif gradients:
                flat = locked.scratch()
                present[group] = merge_slices(locked.spec, gradients, flat)
                parts[group] = [(0, flat)]
        chosen = tuple(commit for group, commit in sorted(commits.items()) if group in parts)
        self._merged = _Merged(slices, chosen, parts, present)
        return self._merged


def _identify(update: Update, part: RequestedSlice) -> tuple[StepKey, Unit]:
    if not update.units:
        raise ProtocolError(f"step {part.step}: expected an update of a planned slice, got one without units")
    return (part.step, update.ordinal), update.units[-1]
