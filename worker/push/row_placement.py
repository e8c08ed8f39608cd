"""Which rows of a table lie on which ps. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
"""Row numbers, ascending, each once."""


@dataclasses.dataclass(frozen=True)
class RowShard:
    """Contiguous rows of a table on one ps."""

    ps: int
    first_row: int
    num_rows: int
    local_row: int
    """Number of its first row within the ps's part of the table."""


class RowPlacement:
    """The shards of one table. ``rows``: ``(ps, first_row, num_rows)`` of each."""

    def __init__(self, rows: Sequence[tuple[int, int, int]]) -> None:
        held: dict[int, int] = {}
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
        """The shards of one ps, in the order of its part of the table."""
        return tuple(shard for shard in self.shards if shard.ps == ps)

    def cut(self, numbers: Numbers, max_rows: int) -> Sequence[tuple[int, int, int, Numbers]]:
        """Cuts row numbers by shard, and into pieces of at most ``max_rows``.

        Returns:
            ps, first and last position (exclusive) in ``numbers``, and those rows' numbers within the ps's part; kept
            for the next call, which is mostly about the same numbers.
        """
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
