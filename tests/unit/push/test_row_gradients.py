"""The gradient of a table between backward and step: summed by row, dropped with ``grad``; the frames it goes in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.worker.push.row_frames import RowsThere, frames_of, rows_in
from stratagem.worker.push.row_frames import numbers_of as row_numbers
from stratagem.worker.push.table_handle import PendingRows

WIDTH = 3


def handle_of(rows: int = 9) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(rows, WIDTH, device="meta"))


def numbers_of(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def test_several_backwards_are_summed_by_row() -> None:
    handle = handle_of()
    pending = PendingRows(handle)
    assert pending.total() is None
    pending.add(numbers_of(1, 4), torch.ones(2, WIDTH))
    pending.add(numbers_of(0, 4), torch.full((2, WIDTH), 2.0))
    total = pending.total()
    assert total is not None and total.numbers.tolist() == [0, 1, 4]
    assert total.values[:, 0].tolist() == [2.0, 1.0, 3.0]
    assert pending.total() is total and handle.grad is not None and handle.grad.device.type == "meta"


def test_rows_of_a_batch_with_another_share_are_known() -> None:
    handle = handle_of()
    optimizer = torch.optim.SGD([handle], 0.1)
    pending = PendingRows(handle)
    pending.share = 0.5
    pending.add(numbers_of(1), torch.ones(1, WIDTH))
    pending.add(numbers_of(2), torch.ones(1, WIDTH))
    assert not pending.mixes_shares()
    pending.share = 0.6
    assert pending.mixes_shares()
    pending.add(numbers_of(2), torch.ones(1, WIDTH))
    assert pending.mixes_shares()
    optimizer.zero_grad()
    assert not pending.mixes_shares()
    pending.add(numbers_of(2), torch.ones(1, WIDTH))
    assert not pending.mixes_shares()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_it(set_to_none: bool) -> None:
    handle = handle_of()
    optimizer = torch.optim.SGD([handle], 0.1)
    pending = PendingRows(handle)
    pending.add(numbers_of(1), torch.ones(1, WIDTH))
    optimizer.zero_grad(set_to_none)
    total = pending.total()
    assert total is None if set_to_none else total is not None and total.values.shape == (0, WIDTH)
    pending.add(numbers_of(2), torch.ones(1, WIDTH))
    total = pending.total()
    assert total is not None and total.numbers.tolist() == [2]
    optimizer.zero_grad(set_to_none)
    pending.add(numbers_of(3), torch.ones(1, WIDTH))
    total = pending.total()
    assert total is not None and total.numbers.tolist() == [3]


def test_a_gradient_put_back_after_a_step_is_the_same() -> None:
    handle = handle_of()
    pending = PendingRows(handle)
    pending.add(numbers_of(1), torch.ones(1, WIDTH))
    first, handle.grad = handle.grad, None
    handle.grad = first
    assert pending.total() is not None
    pending.clear()
    assert pending.total() is None and handle.grad is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=12), st.integers(6, 20))
def test_frames_have_all_rows_in_order_and_few_enough(sizes: list[int], max_rows: int) -> None:
    numbers = np.arange(sum(sizes), dtype=np.int64)
    ends = np.cumsum(sizes)
    parts = [
        RowsThere(numbers[end - size : end], torch.empty(size, WIDTH))
        for end, size in zip(ends, sizes, strict=True)
        if size
    ]
    frames = list(frames_of(parts, max_rows))
    assert [part for frame in frames for part in frame] == parts
    found = [row_numbers(frame) for frame in frames]
    assert all(0 < len(some) <= max_rows for some in found)
    assert all(len(some) + len(after[0].local) > max_rows for some, after in zip(found, frames[1:], strict=False))
    assert [number for some in found for number in some.tolist()] == numbers.tolist()


def test_a_frame_holds_so_many_bytes() -> None:
    assert [rows_in(num_bytes, torch.empty(1, WIDTH)) for num_bytes in (1, 20, 39, 40)] == [1, 1, 1, 2]
