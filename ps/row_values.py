"""Initial values of a table's rows, from a seed: equal whichever ps holds a row and however the table is cut."""

from __future__ import annotations

import numpy as np
import torch

from stratagem.cluster.initial_rows import InitialRows

BLOCK_ROWS = 1024
"""Rows that are drawn together: each block of a table has random numbers of its own."""


def fill_rows(out: torch.Tensor, first_row: int, initial: InitialRows) -> None:
    """Writes the initial values of rows ``first_row`` and on. ``out``: ``(rows, width)``, contiguous, on the CPU."""
    num_rows, width = out.shape
    dtype = torch.float64 if out.dtype is torch.float64 else torch.float32
    if initial.distribution == "constant":
        out.copy_(torch.tensor(initial.first, dtype=dtype))
    else:
        for start in range(first_row - first_row % BLOCK_ROWS, first_row + num_rows, BLOCK_ROWS):
            begin, end = max(start, first_row), min(start + BLOCK_ROWS, first_row + num_rows)
            block = _block(start // BLOCK_ROWS, end - start, width, initial, dtype)
            out[begin - first_row : end - first_row] = block[begin - start : end - start]
    if initial.zero_row is not None and first_row <= initial.zero_row < first_row + num_rows:
        out[initial.zero_row - first_row] = 0.0


def _block(number: int, num_rows: int, width: int, initial: InitialRows, dtype: torch.dtype) -> torch.Tensor:
    """The first rows of a block of random numbers."""
    block = torch.empty(num_rows, width, dtype=dtype, device="cpu")
    # A counter-based generator: block i begins at counter i * 2**128 and never reaches the next one.
    generator = np.random.Generator(np.random.Philox(key=initial.seed, counter=[0, 0, number, 0]))
    array = block.numpy()
    if initial.distribution == "normal":
        generator.standard_normal(dtype=array.dtype, out=array)
        return block.mul_(initial.second).add_(initial.first)
    generator.random(dtype=array.dtype, out=array)
    return block.mul_(initial.second - initial.first).add_(initial.first)
