"""Which rows of tables get most of their updates: a sample, counted on request. Cheap in the path of updates."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

PER_UPDATE, MAX_WAITING = 64, 64
"""Rows of a table that are looked at in an update, at most, and such samples between two looks, times the tables."""
HALF_LIFE_S = 10.0
"""After which an update counts half."""
KEPT = 512
"""Rows of a table that are counted from one look to the next: those with the largest share."""
MAX_TOLD, WORTH = 8, 0.02
"""Rows of a table that are told, at most, and the share of its row updates from which on one is."""


class RowCounts:
    """Of tables whose rows are numbered together; ``ends``: of each, one past the number of its last row. :meth:`note`
    and :meth:`hottest` may be called by two threads, each by one at a time."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        self._waiting: list[tuple[npt.NDArray[np.int64], int]] = []
        """Row numbers, and how many each stands for."""
        self._numbers = np.empty(0, np.int64)
        self._counts: npt.NDArray[Any] = np.empty(0)
        self._totals = np.zeros(len(ends))
        """Updates of rows of each table."""
        self._looked_at = time.monotonic()

    def note(self, numbers: torch.Tensor) -> None:
        """Rows were updated, each once: ``(n,)``, int64, ascending. Of each table a sample is kept."""
        if len(self._waiting) >= MAX_WAITING * len(self._ends):
            return
        array, start = numbers.numpy(), 0
        for stop in np.searchsorted(array, self._ends).tolist():
            if start < stop:
                stride = -(-(stop - start) // PER_UPDATE)
                self._waiting.append((array[start + int(stride * random.random()) : stop : stride].copy(), stride))
            start = stop

    def hottest(self) -> list[tuple[int, float]]:
        """Row numbers and their part of the updates of their table of late, 0 to 1, the hottest first; only
        where it is :data:`WORTH` or more."""
        now, waiting = time.monotonic(), [*self._waiting]  # one that comes now may yet be added to the list
        self._waiting = []
        keep = 0.5 ** ((now - self._looked_at) / HALF_LIFE_S)
        self._looked_at = now
        samples, strides = [sample for sample, _ in waiting], np.array([float(stride) for _, stride in waiting])
        sizes = np.array([len(sample) for sample in samples], np.int64)
        numbers = np.concatenate([self._numbers, *samples])
        weights = np.concatenate([keep * self._counts, np.repeat(strides, sizes)])
        self._totals *= keep
        firsts = np.array([sample[0] for sample in samples], np.int64)  # of one table each
        np.add.at(self._totals, self._tables_of(firsts), strides * sizes)
        found, places = np.unique(numbers, return_inverse=True)
        counts = np.bincount(places, weights, len(found))
        tables = self._tables_of(found)
        shares = counts / np.maximum(1.0, self._totals)[tables]
        order = np.lexsort((-shares, tables))
        ranks = np.arange(len(order)) - np.searchsorted(tables, tables)  # in its table; ``tables`` ascend
        kept = order[ranks < KEPT]
        self._numbers, self._counts = found[kept], counts[kept]
        told = order[(ranks < MAX_TOLD) & (shares[order] >= WORTH)]
        told = told[np.argsort(-shares[told], kind="stable")]
        return [(int(found[row]), float(shares[row])) for row in told]

    def _tables_of(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The position of each row's table."""
        return np.searchsorted(self._ends, numbers, side="right")
