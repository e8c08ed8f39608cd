"""Whole stores that travel: the initial image of a backup, the copy that it keeps, and who may take it over."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from stratagem.errors import CheckpointError, PeerUnavailableError, ProtocolError, StaleStoreError
from stratagem.ps.applying import Applying
from stratagem.ps.checkpointing import Checkpointing
from stratagem.ps.locked_group import LockedGroup
from stratagem.ps.published import HeldFrame, ReplyLane, cut_pieces, send_copy
from stratagem.ps.requests import CommitUpdate, Sender, UpdateAction
from stratagem.ps.shard_group import Parts, ShardGroup
from stratagem.ps.snapshot import Content
from stratagem.ps.specs import check_group, check_new_groups
from stratagem.ps.state import StoreState
from stratagem.ps.waiting import wait


@dataclasses.dataclass(frozen=True)
class StoreImage:
    source: Sender
    """The process whose store it is."""
    content: Content
    done: tuple[Sender, ...]
    """Requests that count as done, by their senders and numbers."""
    number: int
    """Changes told before."""


def tensors_of(groups: Sequence[ShardGroup]) -> Iterator[tuple[int, torch.Tensor]]:
    """Group and tensor, in the order in which they travel."""
    for group in groups:
        yield group.spec.group, group.weights
        for _, flat in sorted(group.slots.items()):
            yield group.spec.group, flat


Answer = Callable[[StoreImage], None]
"""Sends the image without its tensors, which follow."""


class StoreCopy:
    """The copy of another ps's store, in an empty ``state``. LimitError: there is no room for it here."""

    def __init__(self, image: StoreImage, state: StoreState) -> None:
        groups = image.content.groups
        for group in groups:
            check_group(group.spec)
        check_new_groups([group.spec for group in groups], [], state.limits)
        self.source = image.source
        self.is_whole = False
        """Everything that the ps has acknowledged is here."""
        self.is_taken = False
        """Somebody goes on from it: nothing of the process that it is of is believed any more."""
        self.state = state
        self._applying = Applying(state)
        state.locked_groups = {group.spec.group: LockedGroup(group) for group in groups}
        state.units, state.num_moved, state.is_told = image.content.units, image.content.num_moved, True
        state.senders.inherit(image.done)

    def commit(self, request: CommitUpdate, gradient: Mapping[int, Parts]) -> None:
        """Does what the ps did; ``PeerUnavailableError`` once the copy was taken over."""
        state, sender = self.state, request.sender
        with self._entered(sender):
            with state.changed:
                present = self._applying.present(request.groups)
                state.units.close(request.closes, state.trained)
                is_new = len(state.units.lacking(request.update)) == len(request.update.units)
            if is_new and request.action is UpdateAction.APPLY:
                self._applying.apply(request.groups, dict(gradient), present, request.scale)
            elif is_new:
                self._applying.skip(request.groups)
            note = state.units.record if is_new else state.units.drop
            with state.changed:
                note(request.update, request.num_servers, [each.group for each in request.groups])
                state.senders.inherit((sender,))

    @contextlib.contextmanager
    def _entered(self, sender: Sender) -> Iterator[None]:
        state = self.state
        with state.changed:
            if self.is_taken:
                raise PeerUnavailableError(f"the copy of {self.source} was taken over")
            state.enter(sender)
        try:
            yield
        finally:
            with state.changed:
                state.leave(sender)

    def give(self, lane: ReplyLane, transfer: int, answer: Answer) -> None:
        """Sends all of it; it changes no more."""
        state = self.state
        with state.changed:
            self.is_taken = True
            state.changed.wait_for(lambda: state.gate.num_inside == 0)
            send_image(state, self.source, 0, lane, transfer, answer, is_still=True)


class StoreCopies:
    """The copies of this ps's store, and those that it keeps of others."""

    def __init__(
        self, task: str, state: StoreState, checkpoints: Checkpointing, incarnation: Callable[[], int]
    ) -> None:
        self.kept: dict[str, StoreCopy] = {}
        """By the ps that they are of."""
        self._task = task
        self._state = state
        self._checkpoints = checkpoints
        self._incarnation = incarnation

    def new_copy(self, image: StoreImage) -> StoreCopy:
        """Begins to keep a copy. Errors as :class:`StoreCopy`."""
        limits, timeout_s = self._state.limits, self._state.frames_timeout_s
        copy = StoreCopy(image, StoreState(limits, image.content.store_epoch, timeout_s))
        self.kept[image.source.task] = copy
        return copy

    def follow(
        self,
        asker: Sender,
        whose: str,
        incarnation: int,
        number: int,
        dropped: int,
        lane: ReplyLane,
        transfer: int,
        answer: Answer,
    ) -> None:
        """Sends a store; of the own one also everything that changes from then on. ``number``: of the following;
        ``dropped``: copies made in those up to this one are gone. CheckpointError: there is no whole copy of that
        process here. ProtocolError: the job keeps no copies. StaleStoreError: values of something are still to come."""
        if whose == self._task:
            self._begin(asker, number, dropped, lane, transfer, answer)
            return
        copy = self.kept.get(whose)
        if copy is None or not copy.is_whole or copy.source != Sender(whose, incarnation):
            raise CheckpointError(f"{self._task} has no complete copy of {Sender(whose, incarnation)}")
        copy.give(lane, transfer, answer)

    def take(self, image: StoreImage) -> None:
        """Goes on from an image, as if this process had been the one it is of."""
        state = self._state
        with state.changed:
            self._checkpoints.become(image.content, image.content.store_epoch)
            state.senders.inherit(image.done)

    def _begin(self, asker: Sender, number: int, dropped: int, lane: ReplyLane, transfer: int, answer: Answer) -> None:
        state, backup = self._state, self._state.backup
        if backup is None:
            raise ProtocolError("expected nobody to follow: this job keeps no copies of what a ps holds")
        source = Sender(self._task, self._incarnation())
        backup.has_dropped(asker, dropped)
        with state.changed:
            if not state.initialized:
                raise StaleStoreError(f"{self._task} has no values of all its variables yet")
            state.gate.is_paused = True
            try:
                wait(state, lambda: state.gate.num_inside == 0, asker, lane, None)
                backup.begin(
                    asker, number, lane, transfer, lambda told: send_image(state, source, told, lane, transfer, answer)
                )
            finally:
                state.gate.is_paused = False
                state.changed.notify_all()


def send_image(
    state: StoreState,
    source: Sender,
    number: int,
    lane: ReplyLane,
    transfer: int,
    answer: Answer,
    *,
    is_still: bool = False,
) -> None:
    """With ``changed`` held and nobody inside: sends a copy of everything, without waiting for the reader. What
    ``is_still``, changing no more, is sent as it lies."""
    groups = [locked.group for _, locked in sorted(state.locked_groups.items())]
    content = Content(groups, state.units, state.store_epoch, state.num_moved)
    answer(StoreImage(source, content, state.senders.done(), number))
    for number_of_group, flat in tensors_of(groups):
        if not is_still:
            send_copy(lane, transfer, number_of_group, flat)
            continue
        for offset, piece in cut_pieces(flat):
            lane.send(transfer, HeldFrame(number_of_group, offset, piece))
