"""The steps of a dataset on a ring that continues without lost workers: divided again, with no example left out."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stratagem.data.readers import BatchSplit, DeviceCopies, IndexReader, Parts, cut
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.healing import Healing

logger = logging.getLogger(__name__)


class _Dealt(NamedTuple):
    """A step that may not have counted on all workers yet."""

    step: int
    """Of the job."""
    rows: Sequence[int]
    """Of the global batch."""
    members: tuple[str, ...]
    """Who have it, in the order of its slices."""


@dataclasses.dataclass(eq=False, repr=False)
class HealingReader:
    """Reads this worker's parts of global batches; from the step after a loss on they are cut for those who are left.

    What a lost worker had of a step that was trained without it comes again after the last step of the epoch, in
    further steps of at most ``batch_size`` examples, the same on every worker.
    """

    _reader: IndexReader
    _communicator: Communicator
    _healing: Healing
    _batch_size: int

    def __post_init__(self) -> None:
        self.left: list[int] = []
        """Examples that come again."""
        self._dealt: collections.deque[_Dealt] = collections.deque()

    def read(self, epoch: int, number: int, seed: int, copies: DeviceCopies) -> Iterator[Parts]:
        """The steps of an epoch from ``number`` on; each is read when it is asked for, or a little ahead."""
        if not number:  # what comes again belongs to a pass that the script has left
            self.left, self._dealt = [], collections.deque()
        members: tuple[str, ...] = ()
        parts: Iterator[Parts] = iter(())
        while True:
            now = self._members()
            if now != members:
                members, parts = now, copies.of(self._reader.read(epoch, number, seed, self._split(now)))
            if (step := next(parts, None)) is None:
                break
            yield self._noted(step, members)
            number += 1
        while self.note_losses(is_over=True):
            rows, self.left = self.left[: self._batch_size], self.left[self._batch_size :]
            members = self._members()
            split = self._split(members)
            for step in copies.of(self._reader.read_batches(iter([rows]), epoch, number, seed, split)):
                yield self._noted(step, members)
            number += 1

    def is_over(self, number: int) -> bool:
        """Whether there is no step ``number`` of the epoch; after the one before it."""
        steps = self._reader.num_steps
        return steps is not None and number >= steps and not self.note_losses(is_over=True)

    def note_losses(self, is_over: bool = False) -> list[int]:
        """What comes again, with what was lost in the steps that the script has made, and (``is_over``) in the newest
        one, whether anything was trained in it or not."""
        for dealt in [*self._dealt]:
            has_counted = dealt.step in self._healing.counted_steps
            if dealt.step in self._healing.pending_steps:
                if not is_over:
                    continue
                has_counted = True  # or will have, with the next pass
            if has_counted or dealt.step < self._communicator.step + is_over:  # the script trains on it no more
                self._dealt.remove(dealt)
                self._look_for_losses(dealt, has_counted)
        return self.left

    def _look_for_losses(self, dealt: _Dealt, has_counted: bool) -> None:
        for loss in self._healing.losses:
            if not loss.after_step < dealt.step <= loss.last_step:
                continue
            slices = cut(len(dealt.rows), len(dealt.members))
            for member, rows in zip(dealt.members, slices, strict=True):
                if member in loss.members and rows:
                    comes = "are repeated at the end of the epoch" if has_counted else "were lost; no update was made"
                    logger.warning("%d examples that %s had in step %d %s", len(rows), member, dealt.step, comes)
                    self.left += dealt.rows[rows.start : rows.stop] if has_counted else []

    def _noted(self, parts: Parts, members: tuple[str, ...]) -> Parts:
        self.note_losses()
        self._dealt.append(_Dealt(self._communicator.step + 1, parts.rows, members))
        return parts

    def _members(self) -> tuple[str, ...]:
        """Who share out the step that comes next."""
        return self._healing.placement(self._communicator.step + 1).members

    def _split(self, members: tuple[str, ...]) -> BatchSplit:
        return BatchSplit(len(members), members.index(self._healing.me), 1, alone=False)
