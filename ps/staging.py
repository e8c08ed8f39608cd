"""Frames that came and wait for the control message that uses them. Pure; bounded by the size of the groups.

A gradient that a newer transfer replaces is dropped: a worker never has two gradients of one group here.
"""

from __future__ import annotations

import dataclasses

import torch

from stratagem.errors import FrameError, LimitError, ProtocolError
from stratagem.ps.requests import FrameKind, Sender, TransferRef
from stratagem.ps.specs import GroupSpec

MAX_VALUE_TRANSFERS = 4
"""Transfers of values to assign that one sender may have under way."""


@dataclasses.dataclass
class _Transfer:
    kind: FrameKind
    num_frames: int = 0
    parts: dict[int, dict[int, torch.Tensor]] = dataclasses.field(default_factory=dict)
    group_bytes: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Desk:
    """Everything staged by one process life."""

    transfers: dict[int, _Transfer] = dataclasses.field(default_factory=dict)
    newest: dict[int, int] = dataclasses.field(default_factory=dict)
    """Newest gradient transfer of each group."""


class Staging:
    """Parts per (sender, transfer)."""

    def __init__(self) -> None:
        self._desks: dict[tuple[str, int], _Desk] = {}

    @property
    def num_bytes(self) -> int:
        """Payload bytes staged now."""
        return sum(
            num_bytes
            for desk in self._desks.values()
            for transfer in desk.transfers.values()
            for num_bytes in transfer.group_bytes.values()
        )

    def add(
        self, sender: Sender, kind: FrameKind, transfer: int, spec: GroupSpec, offset: int, piece: torch.Tensor
    ) -> None:
        """Stages one frame; a later one for the same group and offset replaces an earlier one.

        Raises:
            FrameError: wrong dtype or shape, or outside of the group.
            LimitError: more than the group can hold, or too many transfers at once.
        """
        if piece.dtype != spec.dtype or piece.dim() != 1:
            raise FrameError(
                f"group {spec.group}: expected one-dimensional pieces of {spec.dtype}, "
                f"got {piece.dim()} dimensions of {piece.dtype}"
            )
        if offset + piece.numel() > spec.num_elements:
            raise FrameError(
                f"group {spec.group}: expected elements below {spec.num_elements}, "
                f"got {offset} to {offset + piece.numel()}"
            )
        desk = self._desks.setdefault(sender.life, _Desk())
        if kind is FrameKind.GRADIENT and not self._is_newest(desk, spec.group, transfer):
            return
        entry = desk.transfers.get(transfer)
        if entry is None:
            num_values = sum(other.kind is FrameKind.VALUES for other in desk.transfers.values())
            if kind is FrameKind.VALUES and num_values >= MAX_VALUE_TRANSFERS:
                raise LimitError(
                    f"{sender}: at most {MAX_VALUE_TRANSFERS} transfers of values at once; assign some first"
                )
            entry = desk.transfers[transfer] = _Transfer(kind)
        if entry.kind is not kind:
            raise FrameError(f"transfer {transfer} carries {entry.kind.value}, a frame with {kind.value} came")
        parts = entry.parts.setdefault(spec.group, {})
        replaced = parts[offset].nbytes if offset in parts else 0
        num_bytes = entry.group_bytes.get(spec.group, 0) - replaced + piece.nbytes
        if num_bytes > spec.num_bytes:
            raise LimitError(f"group {spec.group}: at most {spec.num_bytes} bytes can be staged, got {num_bytes}")
        parts[offset] = piece
        entry.group_bytes[spec.group] = num_bytes
        entry.num_frames += 1

    def num_frames(self, sender: Sender, transfer: int) -> int:
        """Frames of a transfer that came so far."""
        desk = self._desks.get(sender.life)
        entry = desk.transfers.get(transfer) if desk is not None else None
        return entry.num_frames if entry is not None else 0

    def check_current(self, sender: Sender, ref: TransferRef, groups: list[int]) -> None:
        """Refuses to wait for frames that were replaced.

        Raises:
            ProtocolError: a newer transfer replaced this one.
        """
        desk = self._desks.get(sender.life, _Desk())
        for group in groups:
            newest = desk.newest.get(group, 0)
            if ref.num_frames and newest > ref.transfer:
                raise ProtocolError(
                    f"group {group}: transfer {ref.transfer} was replaced by transfer {newest}; commit that one"
                )

    def parts(self, sender: Sender, transfer: int, group: int) -> list[tuple[int, torch.Tensor]]:
        """The pieces of one group, in the order of the flat tensor."""
        desk = self._desks.get(sender.life)
        entry = desk.transfers.get(transfer) if desk is not None else None
        return sorted(entry.parts.get(group, {}).items()) if entry is not None else []

    def drop(self, sender: Sender, transfer: int, groups: list[int]) -> None:
        """Lets go of the pieces of ``groups`` in this transfer and in older ones of its kind."""
        desk = self._desks.get(sender.life)
        if desk is None or transfer not in desk.transfers:
            return
        kind = desk.transfers[transfer].kind
        for number in [number for number in desk.transfers if number <= transfer]:
            if kind is desk.transfers[number].kind and (kind is FrameKind.GRADIENT or number == transfer):
                for group in groups:
                    self._drop_group(desk, number, group)

    def drop_life(self, sender: Sender) -> None:
        """Lets go of everything staged by one process life."""
        self._desks.pop(sender.life, None)

    def drop_sender(self, task: str, incarnation: int) -> None:
        """Lets go of everything staged by process lives of ``task`` up to ``incarnation``."""
        for life in [life for life in self._desks if life[0] == task and life[1] <= incarnation]:
            del self._desks[life]

    def clear(self) -> None:
        """Lets go of everything."""
        self._desks.clear()

    @staticmethod
    def _drop_group(desk: _Desk, transfer: int, group: int) -> None:
        entry = desk.transfers[transfer]
        entry.parts.pop(group, None)
        entry.group_bytes.pop(group, None)
        if not entry.parts:
            del desk.transfers[transfer]

    def _is_newest(self, desk: _Desk, group: int, transfer: int) -> bool:
        newest = desk.newest.get(group, 0)
        if transfer < newest:
            return False
        if transfer > newest:
            desk.newest[group] = transfer
            for number in [number for number in desk.transfers if number < transfer]:
                if desk.transfers[number].kind is FrameKind.GRADIENT:
                    self._drop_group(desk, number, group)
        return True
