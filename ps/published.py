"""Immutable versions: the weights of one version, copied once and shown to all readers (docs/protocol.md 9).

Nobody reads a version that is being written: its frames are copies of the weights, made while the group's lock is held,
and never change. They lie in the memory from which the lane of the first reader sends without another copy. A lane
that holds frames pins them; the memory goes when the last reader lets go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from stratagem.errors import StratagemError
from stratagem.ps.requests import Version

FRAME_BYTES = 4 << 20
"""Payload bytes of a frame; see ``WorkerConfig.frame_bytes`` for what was measured."""


@dataclasses.dataclass(frozen=True)
class HeldFrame:
    """A copy of a piece of a flat tensor, in the memory of some lane."""

    group: int
    offset: int
    tensor: torch.Tensor
    """The elements. Never written to."""
    origin: Any = None
    """What the lane that made the copy knows about it; other lanes look at ``tensor`` only."""


class ReplyLane(Protocol):
    """The way back to one worker. Whatever moves payload implements it (docs/protocol.md 34)."""

    def hold(self, transfer: int, group: int, offset: int, piece: torch.Tensor) -> HeldFrame:
        """Copies a piece to where this lane sends from; ``transfer`` is the one it will most likely be sent under."""

    def send(self, transfer: int, frame: HeldFrame) -> None:
        """Queues a frame without waiting for the reader. A closed lane drops it."""

    def close(self, error: StratagemError) -> None:
        """Ends the lane for the given reason."""


def num_frames(num_elements: int, dtype: torch.dtype) -> int:
    """Frames that a flat tensor travels in."""
    return -(-num_elements // (FRAME_BYTES // dtype.itemsize))


def cut_pieces(flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """First element and elements of each frame of a flat tensor."""
    step = FRAME_BYTES // flat.dtype.itemsize
    for offset in range(0, flat.numel(), step):
        yield offset, flat[offset : offset + step]


class Publisher:
    """Keeps the newest version of one group. Called with the group's lock held."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._newest: tuple[Version, list[HeldFrame]] | None = None
        self.num_built = 0
        """Versions copied so far."""

    def outdate(self) -> None:
        """The weights are about to change: lets go of the newest version, so that its memory serves the next."""
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
        self.num_built += 1
