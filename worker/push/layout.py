"""Where each row of each variable lives: shard groups, their flat tensors, and the frames they are cut into. Pure.

A *group* holds the shards of one optimizer and one dtype. On each ps its shards follow one another in one flat tensor,
in reverse order of registration: the order in which backward makes gradients ready.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch


@dataclasses.dataclass(frozen=True)
class VariableSpec:
    """A named tensor of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int
    param_group: int = 0
    """Index of the optimizer's param_group; 0 without an optimizer."""

    @property
    def row_elements(self) -> int:
        return math.prod(self.shape[1:])


@dataclasses.dataclass(frozen=True)
class Shard:
    """Contiguous rows of one variable on one ps."""

    variable: int
    """Index of the variable in the layout."""
    first_row: int
    num_rows: int
    offset: int
    """First element in the flat tensor of (group, ps)."""
    start: int
    """First element in the variable."""
    num_elements: int


@dataclasses.dataclass(frozen=True)
class Span:
    """Contiguous elements of one variable that lie together in a flat tensor."""

    variable: int
    start: int
    """First element in the variable."""
    num_elements: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one gradient frame carries: contiguous elements of the flat tensor of (group, ps)."""

    index: int
    group: int
    ps: int
    offset: int
    num_elements: int
    spans: tuple[Span, ...]


class Layout:
    """Shards and chunks of a set of variables. ``rows``: for each variable, ``(ps, first_row, num_rows)`` of each of
    its shards; ``chunk_bytes``: payload bytes of a gradient frame, at most."""

    def __init__(
        self, variables: Sequence[VariableSpec], rows: Sequence[Sequence[tuple[int, int, int]]], chunk_bytes: int
    ) -> None:
        self.variables = tuple(variables)
        self._chunk_bytes = chunk_bytes
        self.place(rows)

    def place(self, rows: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        """Lays the same variables out anew; ``rows`` as for the constructor."""
        building: dict[tuple[int, int], list[Shard]] = {}
        for index in reversed(range(len(self.variables))):
            spec = self.variables[index]
            for ps, first_row, num_rows in rows[index]:
                siblings = building.setdefault((spec.group, ps), [])
                offset = siblings[-1].offset + siblings[-1].num_elements if siblings else 0
                start, count = first_row * spec.row_elements, num_rows * spec.row_elements
                siblings.append(Shard(index, first_row, num_rows, offset, start, count))
        self.shards = {key: tuple(shards) for key, shards in building.items()}
        """By (group, ps), in the order of the flat tensor."""
        self.chunks = tuple(self._cut())

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(sorted({group for group, _ in self.shards}))

    def _cut(self) -> Iterator[Chunk]:
        index = 0
        for (group, ps), shards in sorted(self.shards.items()):
            limit = max(1, self._chunk_bytes // self.variables[shards[0].variable].dtype.itemsize)
            spans: list[Span] = []
            offset = size = 0
            for shard in shards:
                done = 0
                while done < shard.num_elements:
                    take = min(limit - size, shard.num_elements - done)
                    spans.append(Span(shard.variable, shard.start + done, take))
                    done, size = done + take, size + take
                    if size == limit:
                        yield Chunk(index, group, ps, offset, size, tuple(spans))
                        index, offset, size, spans = index + 1, offset + size, 0, []
            if size:
                yield Chunk(index, group, ps, offset, size, tuple(spans))
                index += 1

    def spans_between(self, group: int, ps: int, offset: int, num_elements: int) -> Iterator[Span]:
        """The parts of variables that elements ``[offset, offset + num_elements)`` of a flat tensor hold, in their
        order."""
        stop = offset + num_elements
        shards = self.shards[group, ps]
        for shard in shards[max(0, bisect.bisect_right(shards, offset, key=lambda shard: shard.offset) - 1) :]:
            if shard.offset >= stop:
                return
            first, last = max(offset, shard.offset), min(stop, shard.offset + shard.num_elements)
            if first < last:
                yield Span(shard.variable, shard.start + first - shard.offset, last - first)


Numbers = npt.NDArray[np.int64]
"""Row numbers, ascending, each once."""


@dataclasses.dataclass(frozen=True)
class RowShard:
    """Contiguous rows of a table on one ps."""

    ps: int
    first_row: int
    num_rows: int
    local_row: int
    """Number of its first row within the flat tensor of (group, ps)."""


class RowPlacement:
    """The shards of one table. ``rows``: ``(ps, first_row, num_rows)`` of each; ``held``: of each ps the rows of other
    tables of the group, to which these are added."""

    def __init__(self, rows: Sequence[tuple[int, int, int]], held: dict[int, int]) -> None:
        shards = []
        for ps, first_row, num_rows in sorted(rows, key=lambda row: row[1]):
            shards.append(RowShard(ps, first_row, num_rows, held.get(ps, 0)))
            held[ps] = held.get(ps, 0) + num_rows
        self.shards = tuple(shards)
        """By their first row."""
        self._newest: tuple[Numbers | None, int, list[tuple[int, int, int, Numbers]]] = None, 0, []
        self._ends = np.array([shard.first_row + shard.num_rows for shard in shards], dtype=np.int64)

    @property
    def servers(self) -> tuple[int, ...]:
        """The ps that hold rows."""
        return tuple(sorted({shard.ps for shard in self.shards}))

    def on(self, ps: int) -> tuple[RowShard, ...]:
        """The shards of one ps, in the order of its flat tensor."""
        return tuple(shard for shard in self.shards if shard.ps == ps)

    def cut(self, numbers: Numbers, max_rows: int) -> Sequence[tuple[int, int, int, Numbers]]:
        """Cuts row numbers by shard, and into pieces of at most ``max_rows``: ps, first and last position (exclusive)
        in ``numbers``, and those rows' numbers on the ps. Kept for the next call, which is mostly about the
        same numbers."""
        if self._newest[0] is not numbers or self._newest[1] != max_rows:
            self._newest = numbers, max_rows, list(self._cut(numbers, max_rows))
        return self._newest[2]

    def _cut(self, numbers: Numbers, max_rows: int) -> Iterator[tuple[int, int, int, Numbers]]:
        begin = 0
        for shard, end in zip(self.shards, np.searchsorted(numbers, self._ends).tolist(), strict=True):
            for start in range(begin, end, max_rows):
                stop = min(start + max_rows, end)
                yield shard.ps, start, stop, numbers[start:stop] + (shard.local_row - shard.first_row)
            begin = end
