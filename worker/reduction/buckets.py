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


@dataclasses.dataclass
class Bucket:
    """Gradients of one dtype and device that are reduced by one collective."""

    dtype: torch.dtype
    device: torch.device
    parameters: list[int] = dataclasses.field(default_factory=list)
    """Indices of the parameters, the last registered first."""
    offsets: list[int] = dataclasses.field(default_factory=list)
    """Where each of them begins, in bytes from the begin of the bucket."""
    num_bytes: int = 0
    """Size with the gaps between the gradients; a multiple of :data:`ALIGNMENT`."""


def cut_buckets(
    parameters: Sequence[torch.Tensor], first_bytes: int = FIRST_BYTES, bucket_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Cuts parameters into buckets, in the order in which backward is expected to complete them.

    Backward reaches the parameters that were registered last first, so the buckets go through them in reverse.

    Args:
        parameters: in registration order.
        first_bytes: limit of the first bucket of each dtype and device, at most ``bucket_bytes``.
        bucket_bytes: limit of the others. A parameter above the limit has a bucket of its own.
    """
    opened: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    buckets: list[Bucket] = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        key = (parameter.dtype, parameter.device)
        num_bytes = aligned(parameter.numel() * parameter.dtype.itemsize)
        bucket = opened.get(key)
        if bucket is None or bucket.num_bytes + num_bytes > limits[key]:
            limits[key] = min(first_bytes, bucket_bytes) if bucket is None else bucket_bytes
            bucket = opened[key] = Bucket(*key)
            buckets.append(bucket)
        bucket.parameters.append(index)
        bucket.offsets.append(bucket.num_bytes)
        bucket.num_bytes += num_bytes
    return sorted(buckets, key=lambda bucket: -bucket.parameters[-1])


def aligned(num_bytes: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
