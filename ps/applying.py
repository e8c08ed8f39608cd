"""Applying an update: its gradient is there, its turn has come, then weights change in all groups or in none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from stratagem.cluster.units import Unit, Update
from stratagem.errors import ProtocolError
from stratagem.ps.requests import (
    CommitUpdate,
    GroupCommit,
    GroupVersion,
    Sender,
    TransferRef,
)
from stratagem.ps.runs import covers, presence
from stratagem.ps.shard_group import Parts
from stratagem.ps.state import Call, StoreState

Gradient = dict[int, Parts]


class Applying:
    """What asynchronous and synchronous commits have in common.

    Args:
        state: of the store.
    """

    def __init__(self, state: StoreState) -> None:
        self._state = state

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
