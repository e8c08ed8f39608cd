"""Immutable versions: the weights of one version, shown to all readers (docs/protocol.md 9).

A version is never read while it is written. Over shared memory its frames are copies of the weights, made once under
the group's lock, in the memory that all readers map. Over sockets they are the weights themselves until these are about
to change; what has not left by then is copied first. A lane that holds frames pins them; the memory is freed when the
last reader is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from stratagem.errors import StratagemError
from stratagem.ps.requests import Version
from stratagem.rpc.lane import LentPiece

FRAME_BYTES = 4 << 20
"""Payload bytes of a frame; see ``WorkerConfig.frame_bytes`` for what was measured."""


class HeldFrame(NamedTuple):
    """A piece of a flat tensor, ready to be sent."""

    group: int
    offset: int
    tensor: torch.Tensor
    """The elements. Only who holds the group's lock may read those of a :class:`LentPiece`."""
    origin: Any = None
    """The piece that is lent, or what the lane that made the copy knows about it."""


class ReplyLane(Protocol):
    """The way back to one worker, or backup, for frames and replies (docs/protocol.md 34)."""

    def room(self, group: int, offset: int, num_elements: int, dtype: torch.dtype) -> HeldFrame:
        """Memory for a frame that the caller fills, once, before it is sent: where this lane sends from."""

    def hold(self, transfer: int, group: int, offset: int, piece: torch.Tensor) -> HeldFrame:
        """Copies a piece to where this lane sends from, or borrows it; ``transfer`` is the one it will most likely be
        sent under."""

    def send(self, transfer: int, frame: HeldFrame) -> None:
        """Queues a frame without waiting for the reader. A closed lane drops it."""

    def close(self, error: StratagemError) -> None:
        """Ends the lane for the given reason."""

    def answer(self, kind: int, transfer: int, message: bytes) -> None:
        """Queues a reply behind the frames it announces. A closed lane drops it."""

    def corked(self) -> contextlib.AbstractContextManager[None]:
        """Inside, what is sent may wait, to leave in one write at the end."""

    def is_active(self) -> bool:
        """Whether the other end is there, and the lane is its newest. Implements :class:`stratagem.ps.waiting.Call`."""


def num_frames(num_elements: int, dtype: torch.dtype) -> int:
    return -(-num_elements // (FRAME_BYTES // dtype.itemsize))


def cut_pieces(flat: torch.Tensor) -> Sequence[tuple[int, torch.Tensor]]:
    """First element and elements of each frame of a flat tensor."""
    step, num_elements = FRAME_BYTES // flat.dtype.itemsize, flat.numel()
    if 0 < num_elements <= step:
        return [(0, flat)]
    return [(offset, flat[offset : offset + step]) for offset in range(0, num_elements, step)]


def send_copy(lane: ReplyLane, transfer: int, group: int, flat: torch.Tensor) -> None:
    """Sends a flat tensor as it is now, copied once: to where the lane sends from."""
    for offset, piece in cut_pieces(flat):
        frame = lane.room(group, offset, piece.numel(), piece.dtype)
        frame.tensor.copy_(piece)
        lane.send(transfer, frame)


class Publisher:
    """Keeps the newest version of one group. Called with the group's lock held."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._newest: tuple[Version, list[HeldFrame]] | None = None

    def outdate(self) -> None:
        """The weights are about to change: lets go of the newest version, so that its memory serves the next."""
        for frame in self._newest[1] if self._newest is not None else ():
            if isinstance(frame.origin, LentPiece):
                frame.origin.keep()
        self._newest = None

    def send(self, version: Version, flat: torch.Tensor, lane: ReplyLane, transfer: int) -> None:
        """Sends ``flat``, which holds ``version``; a frame leaves as soon as it is copied."""
        if self._newest is not None and self._newest[0] == version:
            for frame in self._newest[1]:
                lane.send(transfer, frame)
            return
        frames = []
        for offset, piece in cut_pieces(flat):
            frames.append(lane.hold(transfer, self._group, offset, piece))
            lane.send(transfer, frames[-1])
        self._newest = version, frames
