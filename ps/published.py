"""Immutable version slots: the weights of one version as encoded frames, built once and shared by all readers.

Nobody reads a slot that is being written: frames are copies of the weights, made while the group's lock is held, and
never change. A reader that holds frames (a lane's queue does) pins them; the memory goes when the last reader lets go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from stratagem.ps.frames import readdress, weights_frame
from stratagem.ps.requests import Version

FRAME_BYTES = 4 << 20
"""Payload bytes of a frame; see ``WorkerConfig.frame_bytes`` for what was measured."""

Emit = Callable[[bytes], None]
"""Takes a frame as soon as it is built."""


@dataclasses.dataclass(frozen=True)
class PublishedVersion:
    """The weights of one group in one version."""

    version: Version
    transfer: int
    """Transfer id that the frames carry."""
    frames: tuple[bytes, ...]

    def frames_for(self, transfer: int) -> Iterator[bytes]:
        """The frames under another transfer id. Those that carry it already are shared, others copied one at a time."""
        for message in self.frames:
            if transfer == self.transfer:
                yield message
            else:
                yield readdress(message, transfer)


def num_frames(num_elements: int, dtype: torch.dtype) -> int:
    """Frames that a flat tensor travels in."""
    return -(-num_elements // (FRAME_BYTES // dtype.itemsize))


def cut_frames(flat: torch.Tensor, group: int, transfer: int) -> Iterator[bytes]:
    """Encodes a flat tensor, one frame at a time."""
    step = FRAME_BYTES // flat.dtype.itemsize
    for offset in range(0, flat.numel(), step):
        yield weights_frame(transfer, group, offset, flat[offset : offset + step])


class Publisher:
    """Keeps the newest version of one group. Called with the group's lock held."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._newest: PublishedVersion | None = None
        self.num_built = 0
        """Versions encoded so far."""

    def outdate(self) -> None:
        """The weights are about to change: lets go of the newest version, so that its memory serves the next."""
        self._newest = None

    def get(self, version: Version) -> PublishedVersion | None:
        """The frames of ``version`` if they exist."""
        return self._newest if self._newest is not None and self._newest.version == version else None

    def build(self, version: Version, flat: torch.Tensor, transfer: int, emit: Emit) -> PublishedVersion:
        """Encodes ``flat`` as ``version``; hands out each frame as soon as it exists."""
        frames = []
        for message in cut_frames(flat, self._group, transfer):
            frames.append(message)
            emit(message)
        self._newest = PublishedVersion(version, transfer, tuple(frames))
        self.num_built += 1
        return self._newest
