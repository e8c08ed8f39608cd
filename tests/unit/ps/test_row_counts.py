"""The rows of a table that are updated most: found in a sample, and told by their numbers in the whole table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from stratagem.ps import row_counts
from stratagem.ps.row_counts import RowCounts


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(sorted(set(numbers)))


def test_what_every_update_has_is_found_among_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_counts, "HALF_LIFE_S", 1e9)
    counts, generator = RowCounts([100_000_000]), np.random.default_rng(1)
    for _ in range(40):
        for _ in range(row_counts.MAX_WAITING):
            counts.note(rows(7, 99_000, *map(int, generator.integers(100, 90_000, 12))))
        found = counts.hottest()
    assert {row for row, _ in found} == {7, 99_000}
    assert all(share == pytest.approx(1 / 14, rel=0.1) for _, share in found)


def test_rows_that_share_their_updates_evenly_are_none() -> None:
    counts = RowCounts([100_000_000])
    for start in range(row_counts.MAX_WAITING):
        counts.note(torch.arange(start, 20_000, 64))
    assert counts.hottest() == []
    assert RowCounts([100_000_000]).hottest() == []


def test_an_update_of_many_rows_is_sampled_and_counts_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_counts, "HALF_LIFE_S", 1e9)
    counts = RowCounts([100_000_000])
    for _ in range(20):
        counts.note(torch.arange(640))
        for _ in range(32):
            counts.note(rows(5000))
        found = counts.hottest()
    ((row, share),) = found
    assert row == 5000 and share == pytest.approx(32 / 672)


def test_a_row_is_hot_among_those_of_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_counts, "HALF_LIFE_S", 1e9)
    counts = RowCounts([40, 50, 60])
    for start in range(0, 40, 8):
        counts.note(rows(*range(start, start + 8), 50 + start % 2, 55))
    assert counts.hottest()[:2] == [(50, 0.5), (55, 0.5)]
    assert {row for row, _ in counts.hottest()} <= {*range(40), 50, 55}


def test_no_row_of_a_table_is_hot_because_others_have_more_rows_in_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update has a row of one table, most of which are another's, among 3,000 of two other tables."""
    monkeypatch.setattr(row_counts, "HALF_LIFE_S", 1e9)
    counts, generator = RowCounts([1_000_000, 1_500_000, 2_000_000]), np.random.default_rng(1)
    for _ in range(5):
        for each in range(row_counts.MAX_WAITING):
            one = 1_400_000 if each % 16 == 0 else generator.integers(1_000_000, 1_400_000)
            ends = (1_000_000, 0), (2_000_000, 1_500_000)
            low, high = (np.unique(generator.integers(begin, end, 1500)) for end, begin in ends)
            counts.note(torch.from_numpy(np.concatenate([low, [one], high])))
        found = counts.hottest()
    assert found == [(1_400_000, 1 / 16)]


def test_each_table_tells_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_counts, "HALF_LIFE_S", 1e9)
    counts = RowCounts([100, 200])
    for row in range(10):
        counts.note(rows(row, 100))
    counts.note(rows(100, 101))
    found = counts.hottest()
    assert found[:2] == [(100, 11 / 12), (0, 0.1)] and (101, 1 / 12) in found
    assert len(found) == row_counts.MAX_TOLD + 2


def test_what_was_hot_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_counts, "HALF_LIFE_S", 1e-9)
    counts = RowCounts([100_000_000])
    counts.note(rows(1))
    assert counts.hottest() == [(1, 1.0)]
    counts.note(rows(2))
    assert counts.hottest() == [(2, 1.0)]
    assert counts.hottest() == []


class _Late(list[Any]):
    """Gets one more whenever somebody has gone through it."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.append((np.array([8]), 1))


def test_an_update_that_comes_during_a_look_disturbs_nothing() -> None:
    counts = RowCounts([100_000_000])
    counts._waiting = _Late([(np.array([7]), 1)])
    assert counts.hottest() == [(7, 1.0)]


def test_nobody_asks_and_memory_does_not_grow() -> None:
    counts = RowCounts([100_000_000])
    for _ in range(10 * row_counts.MAX_WAITING):
        counts.note(torch.arange(0, 10_000_000, 1000))
    assert len(counts._waiting) == row_counts.MAX_WAITING
    assert sum(len(sample) for sample, _ in counts._waiting) <= row_counts.MAX_WAITING * row_counts.PER_UPDATE
    counts.hottest()
    assert len(counts._numbers) <= row_counts.KEPT
