"""Partitioners: how many shards a variable is cut into. Axis 0 only, contiguous rows, as in ``tf.distribute``."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import torch

from stratagem.arguments import known_arguments, whole_number, whole_numbers
from stratagem.errors import ConfigurationError
from stratagem.worker.ring.schedule import cut

Partitioner = Callable[[Sequence[int], torch.dtype], list[int]]
"""``(shape, dtype) -> shards per axis``, for example ``[6, 1]``."""


def _per_axis(shape: Sequence[int], shards: int) -> list[int]:
    return [max(1, shards), *[1] * (len(shape) - 1)]


@known_arguments
class FixedShardsPartitioner:
    """``min(num_shards, rows)`` shards."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = whole_number("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> list[int]:
        return _per_axis(shape, min(self._num_shards, shape[0]))


@known_arguments
class MinSizePartitioner:
    """As many shards as possible of at least ``min_shard_bytes`` each, at most ``max_shards`` and one per row."""

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1) -> None:
        self._min_shard_bytes = whole_number("min_shard_bytes", min_shard_bytes)
        self._max_shards = whole_number("max_shards", max_shards)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> list[int]:
        num_bytes = math.prod(shape) * dtype.itemsize
        return _per_axis(shape, min(self._max_shards, shape[0], math.ceil(num_bytes / self._min_shard_bytes)))


@known_arguments
class MaxSizePartitioner:
    """As few shards as possible of at most ``max_shard_bytes`` each (a row is never cut), at most ``max_shards``."""

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None) -> None:
        whole_numbers(max_shards=max_shards)
        self._max_shard_bytes = whole_number("max_shard_bytes", max_shard_bytes)
        self._max_shards = max_shards

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> list[int]:
        row_bytes = max(1, math.prod(shape[1:]) * dtype.itemsize)
        rows_per_shard = max(1, self._max_shard_bytes // row_bytes)
        shards = math.ceil(shape[0] / rows_per_shard)
        return _per_axis(shape, shards if self._max_shards is None else min(self._max_shards, shards))


def place(
    variables: Sequence[tuple[Sequence[int], torch.dtype]], partitioner: Partitioner | None, load_bytes: list[int]
) -> list[list[tuple[int, int, int]]]:
    """Which rows of which variable live on which ps. By variable: ``(ps, first_row, num_rows)`` of each shard.

    Without a partitioner a variable lies whole on one ps. The largest are placed first, each on the ps that holds the
    fewest bytes (the first of several); the shards of a cut variable go to the ps in turn, from the emptiest on.
    ``partitioner``: cuts variables of rank 1 and more; never a scalar; ``load_bytes``: bytes that each ps holds;
    changed in place. Raises ConfigurationError: the partitioner cuts another axis than 0, or into no shards at all.
    """
    placed: list[list[tuple[int, int, int]]] = [[] for _ in variables]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in variables]
    for index in sorted(range(len(variables)), key=lambda i: (-sizes[i], i)):
        shape, dtype = variables[index]
        rows = shape[0] if shape else 1
        shards = 1
        if partitioner is not None and shape and rows:
            given: Any = partitioner(shape, dtype)
            is_list = isinstance(given, Iterable) and all(isinstance(count, SupportsIndex) for count in given)
            counts = list(map(operator.index, given)) if is_list else []
            if len(counts) != len(shape) or any(count != 1 for count in counts[1:]) or not 1 <= counts[0] <= rows:
                raise ConfigurationError(
                    f"expected a partitioner that cuts axis 0 only, {_per_axis(shape, rows)} at most for shape "
                    f"{list(shape)}, got {given}"
                )
            shards = counts[0]
        row_bytes = sizes[index] // max(1, rows)
        by_load = sorted(range(len(load_bytes)), key=lambda ps: (load_bytes[ps], ps))
        for number, (start, stop) in enumerate(cut(rows, shards)):
            ps = by_load[number % len(by_load)]
            placed[index].append((ps, start, stop - start))
            load_bytes[ps] += (stop - start) * row_bytes
    return placed
