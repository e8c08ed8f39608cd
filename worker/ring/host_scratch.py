"""Where tensors pass that are not in shared memory: two slots in every rank's scratch segment, used in turn.

A *round* is: write into the own slot, exchange signals, read the peers' slots. The next round uses the other slot. One
exchange for each round is enough, across collectives too, as long as every rank goes through the same rounds:

    A rank writes slot s for round k+2 after it has everybody's signal of round k+1. Everybody sent that signal after
    it had read round k, which was the last to use slot s. So nobody reads what is being overwritten.

Exchanges that belong to no round (those of :mod:`stratagem.worker.ring.host_group` around memory of an arena) only add
more order to it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every element's size."""
_NUM_CACHED_VIEWS = 1024


class Scratch:
    """The two slots of every rank. ``segments``: flat uint8, one for each rank, of equal length."""

    def __init__(self, segments: Sequence[torch.Tensor]) -> None:
        self.slot_bytes = segments[0].numel() // 2 // ALIGNMENT * ALIGNMENT
        self._segments = list(segments)
        self._slot = 0
        self._views = functools.lru_cache(_NUM_CACHED_VIEWS)(self._make_view)
        self._rows = functools.lru_cache(_NUM_CACHED_VIEWS)(self._make_row)

    def next_round(self) -> None:
        """From now on the other slot is the one that is written and read."""
        self._slot = 1 - self._slot

    def part_elements(self, num_parts: int, dtype: torch.dtype) -> int:
        """How many elements each of so many equal parts of a slot has room for; the parts are aligned."""
        return self.slot_bytes // num_parts // ALIGNMENT * ALIGNMENT // dtype.itemsize

    def view(self, rank: int, start: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A range of a rank's slot, from its ``start``-th element on; fastest where that is aligned."""
        return self._views(self._slot, rank, start, num_elements, dtype)

    def row(self, num_elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The start of every rank's slot, in rank order."""
        return self._rows(self._slot, num_elements, dtype)

    def close(self) -> None:
        self._segments.clear()
        self._views.cache_clear()
        self._rows.cache_clear()

    def _make_view(self, slot: int, rank: int, start: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        first = slot * self.slot_bytes + start * dtype.itemsize
        with torch.inference_mode(False):  # a view made in that mode could not be written outside of it
            return self._segments[rank][first : first + num_elements * dtype.itemsize].view(dtype)

    def _make_row(self, slot: int, num_elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [self._make_view(slot, rank, 0, num_elements, dtype) for rank in range(len(self._segments))]
