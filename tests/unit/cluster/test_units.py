"""Plans and bitmaps; the splits are those of docs/semantics.md."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.cluster.units import Plan, UnitBitmap


def bounds(num_examples: int, batch: int, slices: int, drop_last: bool = False) -> list[tuple[int, int]]:
    plan = Plan(num_examples, batch, drop_last=drop_last, num_slices=slices)
    return [plan.bounds(index) for index in range(plan.num_units)]


def test_splits_of_semantics() -> None:
    assert bounds(6, 4, 2) == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert bounds(4, 4, 5) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert bounds(8, 4, 3) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert bounds(10, 4, 1) == [(0, 4), (4, 8), (8, 10)]
    assert bounds(10, 4, 1, drop_last=True) == [(0, 4), (4, 8)]
    assert bounds(0, 4, 2) == []


@given(st.integers(0, 300), st.integers(1, 50), st.integers(1, 9), st.booleans())
def test_units_cover_every_example_once(num_examples: int, batch: int, slices: int, drop_last: bool) -> None:
    plan = Plan(num_examples, batch, drop_last=drop_last, num_slices=slices)
    position = 0
    for index in range(plan.num_units):
        start, stop = plan.bounds(index)
        assert start == position < stop <= (plan.batch_of(index) + 1) * batch
        assert plan.unit_examples(index) == stop - start
        position = stop
    assert position == (num_examples // batch * batch if drop_last else num_examples)


@given(st.sets(st.integers(0, 500)), st.sets(st.integers(0, 500)))
def test_bitmap_is_a_set(left: set[int], right: set[int]) -> None:
    a, b = UnitBitmap.of(left), UnitBitmap.of(right)
    assert set(a) == left
    assert len(a) == len(left)
    assert set(a & b) == left & right
    assert set(a | b) == left | right
    assert set(a - b) == left - right
    assert UnitBitmap(a.to_bytes()) == a
    for index in left:
        assert index in a and not a.add(index)
        a.discard(index)
    assert not len(a)


def test_outside_the_plan() -> None:
    with pytest.raises(IndexError):
        Plan(4, 2).bounds(2)
    with pytest.raises(ValueError):
        Plan(4, 0)


def test_a_short_last_batch_may_have_more_slices_than_a_full_one() -> None:
    plan = Plan(9, 5, num_slices=4)
    assert bounds(9, 5, 4) == [(0, 2), (2, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9)]
    assert [plan.batch_of(index) for index in range(7)] == [0, 0, 0, 1, 1, 1, 1]
    assert [plan.slice_of(index) for index in range(7)] == [0, 1, 2, 0, 1, 2, 3]
    assert [list(plan.units_of(batch)) for batch in range(2)] == [[0, 1, 2], [3, 4, 5, 6]]
