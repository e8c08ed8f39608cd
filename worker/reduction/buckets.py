"""Which gradients travel together: a pure function from parameters to buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

ALIGNMENT = 64
"""Bytes; every gradient begins at a multiple of it, for vector instructions and cache lines."""
FIRST_BYTES = 1024**2
"""A small first bucket leaves early, so that the lanes begin to work while backward has just begun."""
BUCKET_BYTES = 25 * 1024**2
"""Large enough for full bandwidth, small enough to leave while backward goes on."""


@dataclasses.dataclass(frozen=True)
class ParameterSize:
    """What the cut needs to know about one parameter."""

    numel: int
    dtype: torch.dtype
    device: torch.device


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients of one dtype and device that are reduced by one collective."""

    dtype: torch.dtype
    device: torch.device
    parameters: tuple[int, ...]
    """Indices of the parameters, the last registered first."""
    offsets: tuple[int, ...]
    """Where each of them begins, in bytes from the begin of the bucket."""
    num_bytes: int
    """Size with the gaps between the gradients; a multiple of :data:`ALIGNMENT`."""


@dataclasses.dataclass
class _Open:
    parameters: list[int] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)
    num_bytes: int = 0


def cut_buckets(
    parameters: Sequence[ParameterSize], first_bytes: int = FIRST_BYTES, bucket_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Cuts parameters into buckets, in the order in which backward is expected to complete them.

    Backward reaches the parameters that were registered last first, so the buckets go through them in reverse.

    Args:
        parameters: in registration order.
        first_bytes: limit of the first bucket of each dtype and device, at most ``bucket_bytes``.
        bucket_bytes: limit of the others. A parameter above the limit has a bucket of its own.
    """
    opened: dict[tuple[torch.dtype, torch.device], _Open] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    closed: list[Bucket] = []

    def close(key: tuple[torch.dtype, torch.device]) -> None:
        bucket = opened.pop(key)
        closed.append(Bucket(*key, tuple(bucket.parameters), tuple(bucket.offsets), bucket.num_bytes))
        limits[key] = bucket_bytes

    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        key = (parameter.dtype, parameter.device)
        num_bytes = aligned(parameter.numel * parameter.dtype.itemsize)
        limit = limits.setdefault(key, min(first_bytes, bucket_bytes))
        if key in opened and opened[key].num_bytes + num_bytes > limit:
            close(key)
        bucket = opened.setdefault(key, _Open())
        bucket.parameters.append(index)
        bucket.offsets.append(bucket.num_bytes)
        bucket.num_bytes += num_bytes
    for key in list(opened):
        close(key)
    return sorted(closed, key=lambda bucket: -bucket.parameters[-1])


def aligned(num_bytes: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
