"""Compression to 16 bits: half the bytes, no state."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from stratagem.worker.reduction.compress_interface import FullBucket, GradientCompression
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.group import Arena


class CastCompression(GradientCompression):
    """Reduces in another floating dtype; groups sum halves in float32.

    bfloat16 keeps the range of float32 and 8 bits of precision. float16 keeps 11 bits but ends at 65,504 and loses what
    is below 6e-8: use it with a loss scale (``torch.amp.GradScaler``).
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype
        self._arenas: dict[int, Arena] = {}

    def reduce(self, bucket: FullBucket, communicator: Communicator) -> None:
        if bucket.index not in self._arenas:
            self._arenas[bucket.index] = communicator.arena(bucket.source.numel() * self._dtype.itemsize)
        arena = self._arenas[bucket.index]
        half, total = arena.source.view(self._dtype), arena.result.view(self._dtype)
        half.copy_(bucket.source)
        communicator.all_reduce(half, out=total)
        bucket.result.copy_(total)

    def commit(self, buckets: Iterable[int]) -> None:
        """Nothing to do: nothing is owed."""

    def reset(self) -> None:
        self._arenas.clear()
