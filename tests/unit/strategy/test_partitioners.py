"""Partitioners and placement; the numbers are those of docs/semantics.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import ConfigurationError
from stratagem.strategy.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    place,
)

F32 = torch.float32


def shard_rows(rows: int, num_shards: int) -> list[tuple[int, int]]:
    """First row and number of rows of each shard of a vector."""
    ((*shards,),) = place([([rows], F32)], FixedShardsPartitioner(num_shards), [0])
    return [(first, num) for _, first, num in shards]


def test_rows_of_shards() -> None:
    assert [rows for _, rows in shard_rows(13, 5)] == [3, 3, 3, 2, 2]
    assert [first for first, _ in shard_rows(10, 4)] == [0, 3, 6, 8]


@given(st.integers(1, 200), st.integers(1, 40))
def test_shards_are_contiguous_and_complete(rows: int, shards: int) -> None:
    cut = shard_rows(rows, min(rows, shards))
    assert [first for first, _ in cut] == [sum(n for _, n in cut[:i]) for i in range(len(cut))]
    assert sum(n for _, n in cut) == rows
    assert max(n for _, n in cut) - min(n for _, n in cut) <= 1


def test_fixed_shards() -> None:
    assert FixedShardsPartitioner(4)([6, 1], F32) == [4, 1]
    assert FixedShardsPartitioner(9)([6, 1], F32) == [6, 1]


def test_min_size() -> None:
    assert MinSizePartitioner(4, 6)([6, 1], F32) == [6, 1]
    assert MinSizePartitioner(4, 2)([6, 1], F32) == [2, 1]
    assert MinSizePartitioner(4, 10)([6, 1], F32) == [6, 1]
    assert MinSizePartitioner()([6, 1], F32) == [1, 1]


def test_max_size() -> None:
    assert MaxSizePartitioner(4)([6, 1], F32) == [6, 1]
    assert MaxSizePartitioner(8)([6, 1], F32) == [3, 1]
    assert MaxSizePartitioner(4, 2)([6, 1], F32) == [2, 1]
    assert MaxSizePartitioner(1024)([6, 1], F32) == [1, 1]
    assert MaxSizePartitioner(1)([6, 4], F32) == [6, 1]


def test_largest_first_on_the_emptiest() -> None:
    sizes = [[10], [100], [60], [50]]
    load = [0, 0]
    placed = place([(size, F32) for size in sizes], None, load)
    assert placed == [[(0, 0, 10)], [(0, 0, 100)], [(1, 0, 60)], [(1, 0, 50)]]
    assert load == [440, 440]


def test_scalars_are_never_cut() -> None:
    assert place([([], F32)], FixedShardsPartitioner(4), [0, 0]) == [[(0, 0, 1)]]


@pytest.mark.parametrize("given", [[1, 2], [5, 1], [2], 2, None, [2.0, 1], ["2", 1]])
def test_other_axes_and_what_is_no_list_of_counts_are_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"cuts axis 0 only, \[4, 1\] at most for shape \[4, 4\], got"):
        place([([4, 4], F32)], lambda shape, dtype: given, [0])


def test_a_number_of_shards_is_at_least_one() -> None:
    with pytest.raises(ConfigurationError, match="num_shards"):
        FixedShardsPartitioner(0)
