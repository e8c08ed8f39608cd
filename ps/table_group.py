"""A table: a group whose gradients come by row, and whose updates change only those rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stratagem.errors import FrameError, LimitError, ProtocolError, VariableError
from stratagem.ps.optimizers import check_for_rows
from stratagem.ps.row_counts import RowCounts
from stratagem.ps.row_values import fill_rows
from stratagem.ps.rows import Block, RowTable, unpack
from stratagem.ps.shard_group import Parts, ShardGroup
from stratagem.ps.specs import GroupSpec

CHUNK_BYTES = 640 << 10
"""Rows that are updated together: they and their slots stay in the cache, and 2,500 rows of 64 take one turn."""


MAX_ANSWER_BYTES = 64 << 20
"""Rows that are sent in one frame, at most; a few bytes of a request could ask for any number."""


class TableGroup(ShardGroup):
    """The rows of one table on this ps, and their optimizer state. Not thread-safe."""

    num_first_values = 0
    """Elements that were assigned so far, of a table that begins with values from outside."""
    _checked: Sequence[Block] = ()
    """The gradient that :meth:`prepare` has checked."""

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(spec)
        self._tables: dict[str, RowTable] = {}
        """Rows of the weights (empty name) and of the slots."""
        self._row_counts = RowCounts()

    def check_first_values(self, parts: Parts) -> None:
        """Raises ``ProtocolError`` for rows that are not the next ones, or the first."""
        expected = self.num_first_values if parts and parts[0][0] else 0
        for offset, piece in parts or [(-1, torch.empty(0))]:
            if offset != expected:
                raise ProtocolError(
                    f"group {self.spec.group}: expected initial rows in order, element {expected} next, got {offset}"
                )
            expected += piece.numel()

    def take_first_values(self, parts: Parts) -> None:
        """The table has values when the last row came."""
        offset, piece = parts[-1]
        self.num_first_values = offset + piece.numel()
        self.initialized = self.num_first_values == self.spec.num_elements

    def make_values(self) -> None:
        assert self.spec.rows is not None
        for shard in self.spec.shards:
            rows = self.weights[shard.offset : shard.stop].view(-1, self.spec.row_elements)
            fill_rows(rows, shard.first_row, self.spec.rows)
        self.initialized = True
        self.touch()

    def copy_rows(self, numbers: torch.Tensor, out: torch.Tensor) -> None:
        """Copies some rows into flat memory. ``numbers``: within this part of the table; checked. FrameError: a row is
        not held here."""
        try:
            self._table("").take(numbers, out)
        except IndexError:
            raise FrameError(
                f"group {self.spec.group}: expected row numbers below {self.spec.num_rows}, got "
                f"{int(numbers.min())} to {int(numbers.max())}"
            ) from None

    def check_rows(self, numbers: torch.Tensor) -> None:
        """Refuses to give rows. ``numbers``: within this part of the table; int64. VariableError: the table has no
        values yet. FrameError: not row numbers. LimitError: more than :data:`MAX_ANSWER_BYTES`."""
        if not self.initialized:
            raise VariableError(f"group {self.spec.group} has no values yet")
        if numbers.dtype != torch.int64 or numbers.dim() != 1:
            raise FrameError(f"group {self.spec.group}: expected row numbers, int64, got {numbers.dtype}")
        most = max(1, MAX_ANSWER_BYTES // (self.spec.row_elements * self.spec.dtype.itemsize))
        if numbers.numel() > most:
            raise LimitError(f"group {self.spec.group}: ask for at most {most} rows at once, not {numbers.numel()}")

    def prepare(self, parts: Parts, present: Sequence[bool], hyper_parameters: Sequence[Mapping[str, Any]]) -> None:
        """Makes sure that :meth:`apply` can be called with this; changes no weight. ProtocolError: rows that are not
        held here, or not in order. UnsupportedOptimizerError: momentum or weight decay. ConfigurationError: torch
        refuses the hyper-parameters. VariableError: the table has no optimizer."""
        self._set_hyper_parameters(hyper_parameters)
        check_for_rows(self.spec.optimizer, self._hyper[self.spec.shards[0].param_group])
        self._checked = unpack(self.spec, parts)

    def apply(self, parts: Parts, present: Sequence[bool], scale: float = 1.0) -> None:
        """One optimizer update of the rows that have a gradient (pieces of :mod:`stratagem.ps.rows`), in place, which
        was prepared. ``present``: whether the table has one, which may be of no row here; the same for each shard."""
        blocks, self._checked = self._checked, ()
        if any(present):
            if not all(self.counts):
                self._allocate(present)
            self.counts = [count + has_gradient for count, has_gradient in zip(self.counts, present, strict=True)]
            self._update(blocks, scale)
        self.counter += 1
        self.num_updates += 1

    def _update(self, blocks: Sequence[Block], scale: float) -> None:
        assert self._rule is not None and self._rule.update_rows is not None
        hyper = self._hyper[self.spec.shards[0].param_group]
        tables = [self._table(name) for name in ("", *self._rule.slots(hyper))]
        at_once = max(1, CHUNK_BYTES // (self.spec.row_elements * self.spec.dtype.itemsize))
        for numbers, gradient in blocks:
            self._row_counts.note(numbers)
            num_rows = numbers.numel()
            for start in range(0, num_rows, at_once):
                some, part = numbers, gradient
                if num_rows > at_once:
                    some, part = numbers[start : start + at_once], gradient[start : start + at_once]
                rows = [table.take(some) for table in tables]
                self._rule.update_rows(hyper, self.counts[0], rows[0], rows[1:], part if scale == 1.0 else part * scale)
                for table, changed in zip(tables, rows, strict=True):
                    table.put(some, changed)

    def hottest_rows(self) -> list[tuple[str, float]]:
        """The rows that get most of the updates here, of late, and their part of them: ``embedding.weight:17``, by the
        numbers of the whole table. Called by one thread, whatever the group does meanwhile."""
        return [(self._row_name(number), share) for number, share in self._row_counts.hottest()]

    def _row_name(self, number: int) -> str:
        shard = next(one for one in self.spec.shards if number * self.spec.row_elements < one.stop)
        return f"{shard.variable}:{shard.first_row + number - shard.offset // self.spec.row_elements}"

    def _table(self, slot: str) -> RowTable:
        """The rows of a slot, or of the weights."""
        found = self._tables.get(slot)
        if found is None:
            flat = self.slot(slot) if slot else self.weights
            found = self._tables[slot] = RowTable(flat, self.spec.row_elements)
        return found


def new_group(spec: GroupSpec) -> ShardGroup:
    return ShardGroup(spec) if spec.rows is None else TableGroup(spec)
