"""One shard group with its lock and its published version: where updates and readers of one group meet."""

from __future__ import annotations

import secrets
import threading

import torch

from stratagem.errors import ProtocolError, VariableError
from stratagem.measuring import measures
from stratagem.measuring.measures import labelled
from stratagem.ps.published import Publisher, ReplyLane, num_frames, send_copy
from stratagem.ps.requests import GroupVersion, Version
from stratagem.ps.shard_group import Parts, ShardGroup
from stratagem.ps.specs import GroupSpec
from stratagem.ps.table_group import TableGroup


class LockedGroup:
    def __init__(self, group: ShardGroup) -> None:
        self.group = group
        self.publisher = Publisher(group.spec.group)
        self.lock = threading.RLock()
        self.is_awaited = False
        """Somebody who can give it values has told of it: they are on their way."""
        self.apply_measure = labelled(measures.GROUP_APPLY, str(group.spec.group))
        self._epoch = secrets.randbits(63)  # a script that is ps too may have seeded `random`, in each process alike
        self._scratch: torch.Tensor | None = None

    @property
    def spec(self) -> GroupSpec:
        return self.group.spec

    @property
    def version(self) -> Version:
        return Version(self._epoch, self.group.counter)

    def scratch(self) -> torch.Tensor:
        """A flat tensor of the group's size to merge slices in; kept, because fresh memory costs page faults."""
        if self._scratch is None:
            self._scratch = torch.empty_like(self.group.weights)
        return self._scratch

    def assign(self, parts: Parts, slot: str) -> None:
        with self.lock:
            flat = self.group.slot(slot) if slot else self.group.weights
            self.publisher.outdate()
            for offset, piece in parts:
                flat[offset : offset + piece.numel()] = piece
            if not slot:
                self.group.touch()
                if not self.group.initialized:
                    self.group.take_first_values(parts)

    def send_weights(self, lane: ReplyLane, transfer: int, have: Version | None) -> GroupVersion:
        """Sends the weights unless the reader has them. A version is copied once, whoever reads it.

        Of tables only the version is told: its rows are asked for by number.
        """
        group = self.group
        spec = group.spec
        with self.lock:
            version = self.version
            frames = 0
            if have != version and not spec.is_table:
                self.publisher.send(version, group.weights, lane, transfer)
                frames = num_frames(spec.num_elements, spec.dtype)
            return GroupVersion(spec.group, version, frames, group.num_updates, group.num_skipped)

    def send_rows(self, lane: ReplyLane, transfer: int, offset: int, numbers: torch.Tensor) -> None:
        """Sends some rows of a table, one after the other, in one frame. VariableError: it is no table, or has no
        values yet. FrameError: a row is not held here. LimitError: more than go into one frame."""
        if not isinstance(self.group, TableGroup):
            raise VariableError(f"group {self.spec.group} is no table: its weights are not asked for by row")
        self.group.check_rows(numbers)
        frame = lane.room(self.spec.group, offset, numbers.numel() * self.spec.row_elements, self.spec.dtype)
        with self.lock:
            self.group.copy_rows(numbers, frame.tensor)
        lane.send(transfer, frame)

    def send_slot(self, lane: ReplyLane, transfer: int, slot: str) -> GroupVersion:
        """Sends an optimizer slot. Slots are read rarely, so their frames are not kept. ProtocolError: no update has
        made the slot yet."""
        with self.lock:
            if slot not in self.group.slots:
                known = ", ".join(self.group.slots) or "none yet"
                raise ProtocolError(f"group {self.spec.group}: expected one of its slots ({known}), got {slot!r}")
            send_copy(lane, transfer, self.spec.group, self.group.slots[slot])
            return GroupVersion(self.spec.group, self.version, num_frames(self.spec.num_elements, self.spec.dtype))
