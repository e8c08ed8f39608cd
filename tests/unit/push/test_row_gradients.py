"""The gradient of a table between backward and step: summed by row, dropped with ``grad``, cut for each ps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.worker.push.layout import RowPlacement
from stratagem.worker.push.table_handle import PendingRows, RowGradient

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


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_it(set_to_none: bool) -> None:
    handle = handle_of()
    optimizer = torch.optim.SGD([handle], 0.1)
    pending = PendingRows(handle)
    pending.add(numbers_of(1), torch.ones(1, WIDTH))
    optimizer.zero_grad(set_to_none)
    assert pending.total() is None
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
@given(st.sets(st.integers(0, 29)), st.integers(1, 4), st.integers(1, 200))
def test_pieces_of_all_ps_are_the_gradient(wanted: set[int], num_ps: int, max_bytes: int) -> None:
    numbers = numbers_of(*sorted(wanted))
    values = torch.randn(len(numbers), WIDTH)
    gradient = RowGradient(numbers, values)
    bounds = [30 * ps // num_ps for ps in range(num_ps + 1)]
    placement = RowPlacement([(ps, bounds[ps], bounds[ps + 1] - bounds[ps]) for ps in range(num_ps)])
    found: list[int] = []
    rows = []
    for ps in range(num_ps):
        expected = 0
        for before, (local, part) in gradient.pieces(placement, ps, max_bytes):
            assert before == expected and local.numel() + part.numel() <= max(max_bytes, 8 + 4 * WIDTH)
            here = local.view(torch.int64)
            found += (here + bounds[ps]).tolist()
            rows.append(part.view(torch.float32).view(-1, WIDTH))
            expected += len(here)
    assert found == numbers.tolist()
    assert torch.equal(torch.cat(rows) if rows else values, values)
