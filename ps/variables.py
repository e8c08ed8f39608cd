"""Variables on this ps: created once, attached to by all other workers, assigned, pulled."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from stratagem.errors import PeerUnavailableError, ProtocolError, StaleStoreError
from stratagem.ps.applying import send_weights
from stratagem.ps.locked_group import LockedGroup
from stratagem.ps.requests import AssignValues, FrameKind, GroupVersion, PullResult, PullWeights, Sender
from stratagem.ps.sequences import Verdict
from stratagem.ps.specs import GroupSpec, check_group, check_new_groups, check_same
from stratagem.ps.state import StoreState
from stratagem.ps.table_group import TableGroup, new_group
from stratagem.ps.waiting import Call, Running, begin, noted, wait, wait_frames, wait_lane, wait_room
from stratagem.rpc.codec import Frame

MIN_AWAITED_BYTES = 1 << 20
"""Smaller frames never wait for room."""


class Variables:
    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._taking = threading.Lock()
        """Held while rows are read that workers attach to."""

    def create_variables(
        self, sender: Sender, groups: Sequence[GroupSpec], can_initialize: bool, call: Call, num_ps: int = 0
    ) -> tuple[list[int], list[int]]:
        """Creates groups, or attaches to those that exist: all shards that this ps is to hold for the sender's model.
        ``num_ps``: of how many ps the sender takes this one to be one; 0: it does not say.

        Returns:
            Groups whose initial values the sender must assign (it holds the init-once token), and groups that
            have values. Tables get their values here, unless their rows are assigned.

        Raises:
            VariableError: a group exists with other shards, or a spec cannot be; nothing is created.
            LimitError: over this ps's limits; nothing is created.
            UnsupportedOptimizerError: the ps cannot run an optimizer; nothing is created.
            StaleStoreError: this is one of another number of ps.
        """
        state = self._state
        with noted(state, sender, call):
            self._take_from_origin(sender, groups, num_ps)
            with state.lock:
                self._check_num_ps(sender, num_ps)
                new = self._make_new(groups)
                empty = [spec.group for spec in groups if not state.locked_groups[spec.group].group.initialized]
                state.changed.notify_all()
                locked_groups = [state.locked_groups[spec.group] for spec in groups]
                tokens = state.senders.tokens
                if can_initialize:
                    state.is_told = True
                    for group in empty:
                        tokens.setdefault(group, sender.key)
                    for locked in locked_groups:
                        locked.is_awaited = True
                # Also of a sender that was the lead when it took the token, and is not any more.
                initialize = [group for group in empty if tokens.get(group) == sender.key]
                for locked, spec in zip(locked_groups, groups, strict=True):
                    if spec.group in initialize:  # whose initial rows count, not those of who was here first
                        locked.group.spec = spec
        made = [locked for locked in locked_groups if locked.spec.group in initialize and locked.spec.made]
        if made:
            self._make_tables(sender, made, call)
        if new or initialize:
            state.copy_is_outdated()
        initialized = [locked.spec.group for locked in locked_groups if locked.group.initialized]
        return [group for group in initialize if group not in initialized], initialized

    def assign_values(self, request: AssignValues, call: Call) -> tuple[GroupVersion, ...]:
        """Assigns weights, or a slot with the optimizer's progress, from frames that went before. ProtocolError: frames
        did not come, do not cover a group without values, or another sender must give them. VariableError: a group or
        slot is unknown."""
        decision = begin(self._state, request.sender, call)
        if decision.verdict is Verdict.DONE and decision.result is not None:
            return decision.result_as(tuple)
        with Running(self._state, request.sender) as running:
            versions = self._assign(request, call)
            self._state.copy_is_outdated()
            running.done(versions)
        return versions

    def pull_weights(self, request: PullWeights, call: Call) -> PullResult:
        """Sends weights that the caller does not have, or a slot. Without initial values after ``wait_s``: no versions.
        VariableError: a group is unknown. ProtocolError: the slot does not exist, or the caller has no lane."""
        state = self._state
        with state.lock:
            state.senders.check(request.sender)
            locked_groups = [state.locked_group(group) for group, _ in request.groups]
            if not wait(
                state,
                lambda: all(locked.group.initialized for locked in locked_groups),
                request.sender,
                call,
                request.wait_s,
            ):
                return PullResult(())
        if request.slot:
            lane = wait_lane(state, request.sender, call)
            versions = tuple(locked.send_slot(lane, request.reply_transfer, request.slot) for locked in locked_groups)
        else:
            versions = send_weights(state, request.sender, request.groups, request.reply_transfer, call)
        if not locked_groups:
            return PullResult(versions)
        with locked_groups[0].lock:
            first = locked_groups[0].group
            scalars = {name: tuple(values) for name, values in first.scalars.items()}
            if first.counts_steps:
                scalars["step"] = tuple(float(count) for count in first.counts)
            return PullResult(versions, tuple(first.slots), tuple(first.counts), scalars)

    def stage(self, sender: Sender, kind: FrameKind, frame: Frame, call: Call | None = None) -> None:
        """Takes one frame that came over a lane: keeps it until a request names it, or answers it. Waits while there is
        no room for it, unless there is no ``call``: the lane is not read meanwhile, its sender keeps what is in it.
        PeerUnavailableError: that lane is over. FencedError: the sender has been declared dead. FrameError: the piece
        does not fit its group. LimitError: more than the group can hold, or than one sender may have here."""
        state = self._state
        if kind is FrameKind.WANTED_ROWS:
            self._send_rows(sender, frame, call)
            return
        with state.lock:
            self._check_lane(sender, call)
            spec = state.locked_group(frame.group).spec
            may_wait = kind is FrameKind.GRADIENT and frame.tensor.nbytes >= MIN_AWAITED_BYTES
            if call is not None and may_wait and not spec.is_table:
                wait_room(state, sender, frame.tensor.nbytes, call)
            state.staging.add(sender, kind, frame.transfer, spec, frame.offset, frame.tensor, state.peer_bytes)
            state.changed.notify_all()

    def _make_new(self, groups: Sequence[GroupSpec]) -> list[GroupSpec]:
        """With the store locked: makes the groups that are not there, and returns them; none if one is refused."""
        held = self._state.locked_groups
        new = [spec for spec in groups if spec.group not in held]
        if len({spec.group for spec in groups}) != len(groups):
            raise ProtocolError(f"expected each group once, got {[spec.group for spec in groups]}")
        for spec in groups:
            if spec.group in held:
                check_same(held[spec.group].spec, spec)
            else:
                check_group(spec)
        check_new_groups(new, [locked.spec for locked in held.values()], self._state.limits, self._state.elsewhere)
        for spec in new:
            held[spec.group] = LockedGroup(new_group(spec))
        return new

    def _check_num_ps(self, sender: Sender, num_ps: int) -> None:
        """With the store locked: the number of ps may change while a call is under way."""
        if num_ps and self._state.num_ps not in (0, num_ps):
            raise StaleStoreError(f"this is one of {self._state.num_ps} ps, and {sender} divides them among {num_ps}")

    def _take_from_origin(self, sender: Sender, groups: Sequence[GroupSpec], num_ps: int) -> None:
        """Groups whose rows are in a checkpoint that another number of ps made."""
        state = self._state
        with state.lock:
            self._check_num_ps(sender, num_ps)
            origin = state.origin
        if origin is None:
            return
        with self._taking:
            for spec in groups:
                if spec.group in state.locked_groups or not spec.shards:
                    continue
                check_group(spec)
                with state.lock:
                    check_new_groups([spec], [locked.spec for locked in state.locked_groups.values()], state.limits)
                taken = origin.take(spec)
                with state.changed:
                    if taken is not None and state.origin is origin:
                        state.locked_groups[spec.group] = LockedGroup(taken)
                        state.num_moved -= taken.num_updates
                        state.changed.notify_all()

    def _make_tables(self, sender: Sender, locked_groups: Sequence[LockedGroup], call: Call) -> None:
        state = self._state
        with state.lock:
            wait(state, lambda: state.gate_lets_through(None), sender, call, None)
            state.enter(sender)
        try:
            for locked in locked_groups:
                with locked.lock:
                    if isinstance(locked.group, TableGroup) and not locked.group.initialized:
                        locked.group.make_values()
        finally:
            with state.lock:
                for locked in locked_groups:
                    if locked.group.initialized:
                        state.senders.tokens.pop(locked.spec.group, None)
                state.leave(sender)

    def _check_lane(self, sender: Sender, lane: Call | None) -> None:
        """With the store locked. After a restore frames still come that were read before it: groups that they name may
        not be here any more, or be others."""
        self._state.senders.check(sender)
        if lane is not None and not lane.is_active():
            raise PeerUnavailableError(f"the lane of {sender} is over")

    def _send_rows(self, sender: Sender, frame: Frame, call: Call | None) -> None:
        state = self._state
        with state.lock:
            self._check_lane(sender, call)
            locked, lane = state.locked_group(frame.group), state.senders.lanes.get(sender.key)
        if lane is not None:
            locked.send_rows(lane, frame.transfer, frame.offset, frame.tensor)

    def _assign(self, request: AssignValues, call: Call) -> tuple[GroupVersion, ...]:
        state, sender = self._state, request.sender
        with state.lock:
            locked_groups = [state.locked_group(group) for group in request.groups]
            self._check_tokens(sender, locked_groups)
            wait_frames(state, sender, request.values, [], lambda: True, call)
            parts = {
                group: pieces
                for group in state.locked_groups
                if (pieces := state.staging.parts(sender, request.values.transfer, group))
            }
            if set(parts) - set(request.groups):
                raise ProtocolError(f"expected values of groups {list(request.groups)}, got frames of {sorted(parts)}")
            self._check_tokens(sender, locked_groups)
            for locked in locked_groups:
                if not locked.group.initialized and not request.slot:
                    locked.group.check_first_values(parts.get(locked.spec.group, ()))
            wait(state, lambda: state.gate_lets_through(None), sender, call, None)
            state.enter(sender)
        try:
            for locked in locked_groups:
                locked.assign(parts.get(locked.spec.group, ()), request.slot)
            if request.slot and locked_groups:
                with locked_groups[0].lock:
                    first = locked_groups[0].group
                    counts = first.counts_with(request.step_counts, parts.get(first.spec.group, ()))
                    first.set_progress(counts, request.scalars)
            return tuple(GroupVersion(locked.spec.group, locked.version, 0) for locked in locked_groups)
        finally:
            with state.lock:
                for locked in locked_groups:
                    if locked.group.initialized and not request.slot:
                        state.senders.tokens.pop(locked.spec.group, None)
                state.staging.drop(sender, request.values.transfer, list(parts))
                state.leave(sender)

    def _check_tokens(self, sender: Sender, locked_groups: Sequence[LockedGroup]) -> None:
        for locked in locked_groups:
            holder = self._state.senders.tokens.get(locked.spec.group)
            if not locked.group.initialized and holder != sender.key:
                who = f"{holder[0]} (incarnation {holder[1]})" if holder else "nobody yet"
                raise ProtocolError(
                    f"group {locked.spec.group}: {who} supplies the initial values, not {sender}; "
                    "call CreateVariables with can_initialize first"
                )
