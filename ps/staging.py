"""Frames that have arrived and wait for the control message that uses them. Pure; bounded by the size of the groups.

A newer transfer replaces an older gradient: a worker never has two gradients of one group here.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import torch

from stratagem.errors import FrameError, LimitError, ProtocolError
from stratagem.ps.requests import FrameKind, Sender, TransferRef, is_fenced
from stratagem.ps.rows import check_piece, max_bytes
from stratagem.ps.specs import GroupSpec

MAX_VALUE_TRANSFERS = 4
"""Transfers of values to assign that one sender may have under way."""
FRAME_OVERHEAD_BYTES = 1024
"""What a staged frame costs beyond its elements, at most: its message and the objects around it."""


@dataclasses.dataclass
class _Transfer:
    kind: FrameKind
    num_frames: int = 0
    parts: dict[int, dict[int, torch.Tensor]] = dataclasses.field(default_factory=dict)
    group_bytes: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _SenderBuffers:
    transfers: dict[int, _Transfer] = dataclasses.field(default_factory=dict)
    newest: dict[int, int] = dataclasses.field(default_factory=dict)
    """Newest gradient transfer of each group."""
    num_bytes: int = 0
    """Of everything staged, overhead included."""
    waived: bool = False
    """Whether it need not wait for room until all of this is gone."""


class Staging:
    """Parts per (sender, transfer)."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], _SenderBuffers] = collections.defaultdict(_SenderBuffers)
        self._peer_bytes = 0
        """What one sender may have staged, as it was when it mattered last: it grows with what the ps holds."""

    def add(
        self,
        sender: Sender,
        kind: FrameKind,
        transfer: int,
        spec: GroupSpec,
        offset: int,
        piece: torch.Tensor,
        max_peer_bytes: Callable[[], int] = lambda: 1 << 40,
    ) -> None:
        """Stages one frame; a later one for the same group and offset replaces an earlier one. FrameError: wrong dtype
        or shape, or outside of the group. LimitError: more than the group can hold, too many transfers at once, or over
        ``max_peer_bytes``, which is asked when it matters."""
        by_rows = spec.is_table and kind is FrameKind.GRADIENT
        if by_rows:
            check_piece(spec, offset, piece)
        else:
            _check_elements(spec, offset, piece)
        buffers = self._buffers[sender.key]
        if kind is FrameKind.GRADIENT and not self._is_newest(buffers, spec.group, transfer):
            return
        entry = buffers.transfers.get(transfer)
        if entry is None:
            num_values = sum(other.kind is FrameKind.VALUES for other in buffers.transfers.values())
            if kind is FrameKind.VALUES and num_values >= MAX_VALUE_TRANSFERS:
                raise LimitError(
                    f"{sender}: at most {MAX_VALUE_TRANSFERS} transfers of values at once; assign some first"
                )
            entry = buffers.transfers[transfer] = _Transfer(kind)
        if entry.kind is not kind:
            raise FrameError(f"transfer {transfer} carries {entry.kind.value}, a frame with {kind.value} came")
        parts = entry.parts.setdefault(spec.group, {})
        if by_rows and offset == 0:  # the gradient begins anew
            buffers.num_bytes -= entry.group_bytes.pop(spec.group, 0) + len(parts) * FRAME_OVERHEAD_BYTES
            parts.clear()
        replaced = parts[offset].nbytes if offset in parts else 0
        num_bytes = entry.group_bytes.get(spec.group, 0) - replaced + piece.nbytes
        limit = max_bytes(spec) if by_rows else spec.num_bytes
        if num_bytes > limit:
            raise LimitError(f"group {spec.group}: at most {limit} bytes can be staged, got {num_bytes}")
        num_more = piece.nbytes - replaced + (0 if offset in parts else FRAME_OVERHEAD_BYTES)
        if buffers.num_bytes + num_more > self._peer_bytes:
            self._peer_bytes = max_peer_bytes()
            if buffers.num_bytes + num_more > self._peer_bytes:
                raise LimitError(
                    f"{sender} has {buffers.num_bytes:,} bytes staged and sends {num_more:,} more, over max_peer_bytes "
                    f"of {self._peer_bytes:,}; commit some first, send larger frames, or raise it"
                )
        parts[offset] = piece
        entry.group_bytes[spec.group] = num_bytes
        entry.num_frames += 1
        buffers.num_bytes += num_more

    def has_room(self, sender: Sender, num_bytes: int, shared_bytes: int) -> bool:
        """Whether so much more may be staged: whoever has most here may go on, so that a gradient becomes complete, as
        long as all others together have no more than ``shared_bytes``; the others may go on up to that."""
        own = self._buffers[sender.key]
        if own.waived:
            return True
        staged = [buffers.num_bytes for buffers in self._buffers.values()]
        most = max(staged, default=0)
        others = sum(staged) - most
        return others + (num_bytes if own.num_bytes < most else 0) <= shared_bytes

    def waive(self, sender: Sender) -> None:
        """The sender has waited long enough: it has room until nothing of it is staged."""
        self._buffers[sender.key].waived = True

    def num_frames(self, sender: Sender, transfer: int) -> int:
        buffers = self._buffers.get(sender.key)
        entry = buffers.transfers.get(transfer) if buffers is not None else None
        return entry.num_frames if entry is not None else 0

    def check_current(self, sender: Sender, ref: TransferRef, groups: list[int]) -> None:
        """Raises ``ProtocolError`` where a newer transfer replaced the frames to wait for."""
        buffers = self._buffers[sender.key]
        for group in groups:
            newest = buffers.newest.get(group, 0)
            if ref.num_frames and newest > ref.transfer:
                raise ProtocolError(
                    f"group {group}: transfer {ref.transfer} was replaced by transfer {newest}; commit that one"
                )

    def parts(self, sender: Sender, transfer: int, group: int) -> list[tuple[int, torch.Tensor]]:
        """The pieces of one group, in the order of the flat tensor."""
        buffers = self._buffers.get(sender.key)
        entry = buffers.transfers.get(transfer) if buffers is not None else None
        return sorted(entry.parts.get(group, {}).items()) if entry is not None else []

    def drop(self, sender: Sender, transfer: int, groups: list[int]) -> None:
        """Lets go of the pieces of ``groups`` in this transfer and in older ones of its kind."""
        buffers = self._buffers.get(sender.key)
        if buffers is None or transfer not in buffers.transfers:
            return
        kind = buffers.transfers[transfer].kind
        for number in [number for number in buffers.transfers if number <= transfer]:
            if kind is buffers.transfers[number].kind and (kind is FrameKind.GRADIENT or number == transfer):
                for group in groups:
                    self._drop_group(buffers, number, group)

    def drop_all(self, sender: Sender) -> None:
        self._buffers.pop(sender.key, None)

    def drop_sender(self, task: str, incarnation: int) -> None:
        """Lets go of everything staged by incarnations of ``task`` up to ``incarnation``."""
        for key in [key for key in self._buffers if is_fenced(key, task, incarnation)]:
            del self._buffers[key]

    def clear(self) -> None:
        self._buffers.clear()

    @staticmethod
    def _drop_group(buffers: _SenderBuffers, transfer: int, group: int) -> None:
        entry = buffers.transfers.get(transfer)
        if entry is None:
            return  # this group had no frames, and those of the others are gone
        num_frames = len(entry.parts.pop(group, ()))
        buffers.num_bytes -= entry.group_bytes.pop(group, 0) + num_frames * FRAME_OVERHEAD_BYTES
        if not entry.parts:
            del buffers.transfers[transfer]
            buffers.waived = buffers.waived and bool(buffers.transfers)

    def _is_newest(self, buffers: _SenderBuffers, group: int, transfer: int) -> bool:
        newest = buffers.newest.get(group, 0)
        if transfer < newest:
            return False
        if transfer > newest:
            buffers.newest[group] = transfer
            for number in [number for number in buffers.transfers if number < transfer]:
                if buffers.transfers[number].kind is FrameKind.GRADIENT:
                    self._drop_group(buffers, number, group)
        return True


def _check_elements(spec: GroupSpec, offset: int, piece: torch.Tensor) -> None:
    if piece.dtype != spec.dtype or piece.dim() != 1:
        raise FrameError(
            f"group {spec.group}: expected one-dimensional pieces of {spec.dtype}, "
            f"got {piece.dim()} dimensions of {piece.dtype}"
        )
    if offset + piece.numel() > spec.num_elements:
        raise FrameError(
            f"group {spec.group}: expected elements below {spec.num_elements}, got {offset} to {offset + piece.numel()}"
        )
