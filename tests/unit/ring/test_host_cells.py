"""Signals in shared memory: two cells a rank, and who sleeps for whom."""

from __future__ import annotations

import pytest
import torch

from stratagem.worker.ring.host_cells import NUM_BYTES, Cells

SIZE = 3


@pytest.fixture
def cells() -> list[Cells]:
    memory = [torch.zeros(NUM_BYTES, dtype=torch.uint8) for _ in range(SIZE)]
    return [Cells(rank, memory, 8) for rank in range(SIZE)]


def message(text: str) -> bytes:
    return text.encode().ljust(8)


def test_a_message_is_there_for_who_is_in_the_same_exchange(cells: list[Cells]) -> None:
    cells[0].tell(message("one"))
    cells[1].tell(message("uno"))
    assert cells[1].has_told(0) and cells[1].message(0) == message("one")
    assert cells[0].has_told(1) and cells[0].message(1) == message("uno")
    assert not cells[0].has_told(2) and not cells[0].has_told_soon(2)
    cells[2].tell(message("eins"))
    assert cells[0].has_told_soon(2) and cells[0].message(2) == message("eins")


def test_what_a_fast_rank_tells_next_leaves_what_a_slow_one_still_reads(cells: list[Cells]) -> None:
    for number in range(1, 6):
        for each in cells:
            each.tell(message(f"{number}"))
        cells[0].tell(message("next"))
        for slow in cells[1:]:
            assert slow.has_told(0) and slow.message(0) == message(f"{number}")
        assert not cells[0].has_told(1)
        for slow in cells[1:]:
            slow.tell(message("next"))


def test_only_who_sleeps_for_a_rank_is_woken_by_it(cells: list[Cells]) -> None:
    cells[2].sleep_for(0)
    assert list(cells[1].tell(message(""))) == []
    assert list(cells[0].tell(message(""))) == [2]
    cells[1].sleep_for(0)
    assert list(cells[0].tell(message(""))) == [1, 2]
    cells[2].sleep_for(None)
    assert list(cells[0].tell(message(""))) == [1]
