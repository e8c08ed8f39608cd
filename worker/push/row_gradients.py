"""The gradient of a table between ``backward()`` and ``optimizer.step()``: rows by number, summed.

The optimizer holds a parameter without memory in the table's stead. Its ``grad`` is a mark of the same kind: whoever
sets it to None or to zero (``zero_grad()``) drops the rows with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch

from stratagem.worker.push.layout import Numbers, RowPlacement
from stratagem.worker.push.table_handle import TableGradient

NUMBER_BYTES = 8


@dataclasses.dataclass(frozen=True, eq=False)
class RowGradient:
    """Some rows of a gradient; the others are zero."""

    numbers: Numbers
    values: torch.Tensor
    """``(len(numbers), width)``, on the CPU, contiguous."""

    def pieces(self, placement: RowPlacement, ps: int, max_bytes: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """One ps's part, as frames carry it: how many rows came before, and the row numbers and rows as bytes."""
        before = 0
        for holder, start, stop, local in placement.cut(self.numbers, rows_in(max_bytes, self.values)):
            if holder == ps:
                rows = self.values[start:stop].view(-1)
                yield before, [torch.from_numpy(local).view(torch.uint8), rows.view(torch.uint8)]
                before += stop - start


def rows_in(max_bytes: int, like: torch.Tensor) -> int:
    """Rows, each with its number, that go into so many bytes. Rows are asked for by as many, so that their numbers are
    cut once a step. ``max_bytes``: of a frame; ``like``: rows of the table, ``(…, width)``."""
    return max(1, max_bytes // (NUMBER_BYTES + like.shape[1] * like.itemsize))


class PendingRows:
    """What backward has given a table so far."""

    def __init__(self, handle: torch.nn.Parameter) -> None:
        self._handle = handle
        self._dtype = handle.dtype
        self._parts: list[RowGradient] = []
        self._mark = torch.empty_like(handle).as_subclass(TableGradient)
        """What the handle has for a gradient while there is one."""
        self._version = -1

    def add(self, numbers: Numbers, values: torch.Tensor) -> None:
        """A backward has reached the table. Takes ``values`` over."""
        if not self._is_current():
            self._parts.clear()
            self._handle.grad = self._mark
            self._version = self._mark._version
        self._parts.append(RowGradient(numbers, values.to("cpu", self._dtype).contiguous()))

    def total(self) -> RowGradient | None:
        """The sum of what came; None without any."""
        if not self._is_current():
            self._parts.clear()
            return None
        if len(self._parts) > 1:
            numbers, place = np.unique(np.concatenate([part.numbers for part in self._parts]), return_inverse=True)
            values = torch.cat([part.values for part in self._parts])
            summed = values.new_zeros(len(numbers), values.shape[1]).index_add_(0, torch.from_numpy(place), values)
            self._parts = [RowGradient(numbers, summed)]
        return self._parts[0]

    def clear(self) -> None:
        self._parts.clear()
        self._handle.grad = None

    def _is_current(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self._handle.grad is self._mark and self._mark._version == self._version
