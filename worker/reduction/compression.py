"""Compressions of gradients by name, and the two that are short: to 16 bits, and to the largest elements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from stratagem.cluster.spec import refuse_unknown
from stratagem.errors import ConfigurationError
from stratagem.worker.reduction.compress_int8 import Int8Compression
from stratagem.worker.reduction.compress_interface import ErrorFeedback, FullBucket, GradientCompression
from stratagem.worker.reduction.compress_powersgd import PowerSGDCompression
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
        for arena in self._arenas.values():
            arena.free()
        self._arenas.clear()


class TopKCompression(ErrorFeedback):
    """Indices and values of the elements of largest magnitude; all ranks add up all of them in rank order.

    Source: Stich, Cordonnier, Jaggi: "Sparsified SGD with Memory", 2018.

    Args:
        ratio: part of a bucket that is sent, above 0, at most 1. Each element sent costs 8 bytes to every other rank.
    """

    name = "topk"

    def __init__(self, ratio: float = 0.01) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise ConfigurationError(f"expected a ratio above 0 and at most 1, got {ratio!r}")
        self._ratio = ratio

    def reduce(self, bucket: FullBucket, communicator: Communicator) -> None:
        owed = self.owed(bucket)
        count = min(owed.numel(), max(1, round(owed.numel() * self._ratio)))
        chosen = owed.abs().topk(count, sorted=False).indices  # NaN counts as largest, so it is never left out
        message = torch.cat([chosen.to(torch.int32), owed[chosen].view(torch.int32)])
        owed[chosen] = 0.0
        bucket.result.zero_()
        for theirs in communicator.all_gather(message):
            indices, values = theirs.view(2, -1)
            bucket.result.index_add_(0, indices, values.view(torch.float32))
        self.residuals.put(bucket.index, owed)


_COMPRESSIONS: dict[str, Callable[..., GradientCompression]] = {
    "bf16": functools.partial(CastCompression, "bf16", torch.bfloat16),
    "fp16": functools.partial(CastCompression, "fp16", torch.float16),
    "int8": Int8Compression,
    "powersgd": PowerSGDCompression,
    "topk": TopKCompression,
}


def compression_named(name: str) -> GradientCompression:
    """A new compression: bf16, fp16, int8, powersgd or topk.

    Raises:
        ConfigurationError: no such compression.
    """
    refuse_unknown("compression", [name], _COMPRESSIONS)
    return _COMPRESSIONS[name]()
