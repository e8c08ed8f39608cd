"""Where rows lie: every asked row goes to one ps, under the number it has there."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.strategy.partitioners import FixedShardsPartitioner, place
from stratagem.worker.push.layout import RowPlacement


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(1, 5),
    st.sets(st.integers(0, 59), max_size=40),
)
def test_cut_covers_every_row_once(rows: int, num_ps: int, shards: int, max_rows: int, wanted: set[int]) -> None:
    (placed,) = place([((rows, 2), torch.float32)], FixedShardsPartitioner(shards), [0] * num_ps)
    placement = RowPlacement(placed, {})
    held: dict[int, list[int]] = {}
    for shard in placement.shards:
        held.setdefault(shard.ps, []).extend(range(shard.first_row, shard.first_row + shard.num_rows))
    assert sorted(row for rows_here in held.values() for row in rows_here) == list(range(rows))
    assert placement.servers == tuple(sorted(held))
    numbers = np.array(sorted(number for number in wanted if number < rows), dtype=np.int64)
    covered: list[int] = []
    for ps, start, stop, local in placement.cut(numbers, max_rows):
        assert 0 < stop - start == len(local) <= max_rows
        assert [held[ps][row] for row in local.tolist()] == numbers[start:stop].tolist()
        covered += range(start, stop)
    assert covered == list(range(len(numbers)))


def test_shards_of_one_ps_lie_one_after_the_other() -> None:
    placement = RowPlacement([(0, 6, 3), (1, 3, 3), (0, 0, 3)], {})
    assert [(shard.ps, shard.first_row, shard.local_row) for shard in placement.shards] == [
        (0, 0, 0),
        (1, 3, 0),
        (0, 6, 3),
    ]
    assert [shard.first_row for shard in placement.on(0)] == [0, 6]
    assert [(ps, local.tolist()) for ps, _, _, local in placement.cut(np.array([2, 3, 7]), 9)] == [
        (0, [2]),
        (1, [0]),
        (0, [4]),
    ]
