"""Tables: a group whose gradients come by row, and whose updates change only those rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
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
    """The rows of tables on this ps, and their optimizer state. Not thread-safe."""

    _checked: Sequence[Block] = ()
    """The gradient that :meth:`prepare` has checked."""

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(spec)
        self._tables: dict[str, RowTable] = {}
        """Rows of the weights (empty name) and of the slots."""
        self._row_counts = RowCounts([end // spec.row_elements for _, end in self._extents().values()])
        self._assigned: dict[str, int] = {}
        """Of tables that begin with values from outside: the elements that have come."""

    def check_first_values(self, parts: Parts) -> None:
        """Raises ``ProtocolError`` for rows that are not the next ones of a table, or its first."""
        self._advanced(parts or [(-1, torch.empty(0))])

    def take_first_values(self, parts: Parts) -> None:
        """The tables have values when the last row of each came."""
        self._assigned = self._advanced(parts)
        self._look_whether_complete()

    def counts_with(self, came: Sequence[int], parts: Parts) -> Sequence[int]:
        """Step counts of all shards; ``came``: of those that some of ``parts`` are of. ProtocolError: of others."""
        indices = sorted({*self.spec.holders([offset // self.spec.row_elements for offset, _ in parts]).tolist()})
        if len(came) != len(indices):
            raise ProtocolError(
                f"group {self.spec.group}: expected step counts of {len(indices)} shards, got {len(came)}"
            )
        given = dict(zip(indices, came, strict=True))
        return [given.get(index, count) for index, count in enumerate(self.counts)]

    def make_values(self) -> None:
        """Of the tables whose initial rows are made here."""
        for shard in self.spec.made:
            assert shard.rows is not None
            rows = self.weights[shard.offset : shard.stop].view(-1, self.spec.row_elements)
            fill_rows(rows, shard.first_row, shard.rows)
        self._look_whether_complete()
        self.touch()

    def _advanced(self, parts: Parts) -> dict[str, int]:
        """What has come of each table once these rows are here."""
        assigned, extents = dict(self._assigned), self._extents()
        for offset, piece in parts:
            name = next((name for name, (begin, end) in extents.items() if begin <= offset < end), "")
            begin, end = extents.get(name, (0, 0))
            expected = begin + (assigned.get(name, 0) if offset != begin else 0)
            if offset != expected or offset + piece.numel() > end:
                raise ProtocolError(
                    f"group {self.spec.group}: expected initial rows of a table in order, elements {expected} to {end} "
                    f"next, got {offset} to {offset + piece.numel()}"
                )
            assigned[name] = offset + piece.numel() - begin
        return assigned

    def _look_whether_complete(self) -> None:
        made = {shard.variable for shard in self.spec.made}
        self.initialized = all(
            name in made or self._assigned.get(name) == end - begin for name, (begin, end) in self._extents().items()
        )

    def _extents(self) -> dict[str, tuple[int, int]]:
        """The first element of each table's part here, and one past its last."""
        extents: dict[str, tuple[int, int]] = {}
        for shard in self.spec.shards:
            extents[shard.variable] = extents.get(shard.variable, (shard.offset, 0))[0], shard.stop
        return extents

    def copy_rows(self, numbers: torch.Tensor, out: torch.Tensor) -> None:
        """Copies some rows into flat memory. ``numbers``: within the flat tensor; checked. FrameError: a row is not
        held here."""
        try:
            self._table("").take(numbers, out)
        except IndexError:
            raise FrameError(
                f"group {self.spec.group}: expected row numbers below {self.spec.num_rows}, got "
                f"{int(numbers.min())} to {int(numbers.max())}"
            ) from None

    def check_rows(self, numbers: torch.Tensor) -> None:
        """Refuses to give rows. ``numbers``: within the flat tensor; int64. VariableError: a table has no values yet.
        FrameError: not row numbers. LimitError: more than :data:`MAX_ANSWER_BYTES`."""
        if not self.initialized:
            raise VariableError(f"group {self.spec.group} has no values yet")
        if numbers.dtype != torch.int64 or numbers.dim() != 1:
            raise FrameError(f"group {self.spec.group}: expected row numbers, int64, got {numbers.dtype}")
        most = max(1, MAX_ANSWER_BYTES // (self.spec.row_elements * self.spec.dtype.itemsize))
        if numbers.numel() > most:
            raise LimitError(f"group {self.spec.group}: ask for at most {most} rows at once, not {numbers.numel()}")

    def prepare(self, parts: Parts, present: Sequence[bool], hyper_parameters: Sequence[Mapping[str, Any]]) -> None:
        """Makes sure that :meth:`apply` can be called with this; changes no weight. ProtocolError: rows that are not
        held here, not in order, or of a table without a gradient. UnsupportedOptimizerError: momentum or weight decay.
        ConfigurationError: torch refuses the hyper-parameters. VariableError: the tables have no optimizer."""
        self._set_hyper_parameters(hyper_parameters)
        check_for_rows(self.spec.optimizer, self._hyper[self.spec.shards[0].param_group])
        blocks = unpack(self.spec, parts)
        if not all(present):
            for numbers, _ in blocks:
                for index, start, stop in self._by_shard(numbers):
                    if start < stop and not present[index]:
                        name = self.spec.shards[index].variable
                        raise ProtocolError(
                            f"table {name} has no gradient in this update, but {stop - start} rows came"
                        )
        self._checked = blocks

    def apply(self, parts: Parts, present: Sequence[bool], scale: float = 1.0) -> None:
        """One optimizer update of the rows that have a gradient (pieces of :mod:`stratagem.ps.rows`), in place, which
        was prepared. ``present``: whether its table has one, which may be of no row here, for each shard."""
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
            for count, begin, end in self._by_count(numbers):
                for start in range(begin, end, at_once):
                    some, part, stop = numbers, gradient, min(start + at_once, end)
                    if stop - start < len(numbers):
                        some, part = numbers[start:stop], gradient[start:stop]
                    rows = [table.take(some) for table in tables]
                    self._rule.update_rows(hyper, count, rows[0], rows[1:], part if scale == 1.0 else part * scale)
                    for table, changed in zip(tables, rows, strict=True):
                        table.put(some, changed)

    def _by_count(self, numbers: torch.Tensor) -> Iterator[tuple[int, int, int]]:
        """Rows whose tables have seen as many updates: how many, the position of the first, one past the last."""
        assert self._rule is not None
        if not self._rule.counts_steps or len(set(self.counts)) == 1:
            yield self.counts[0], 0, len(numbers)
            return
        for index, start, stop in self._by_shard(numbers):
            yield self.counts[index], start, stop

    def _by_shard(self, numbers: torch.Tensor) -> Iterator[tuple[int, int, int]]:
        """Which of the ascending numbers are of each shard: its index, the position of the first, one past the last."""
        start = 0
        for index, stop in enumerate(np.searchsorted(numbers.numpy(), self.spec.row_ends).tolist()):
            yield index, start, stop
            start = stop

    def hottest_rows(self) -> list[tuple[str, float]]:
        """The rows that get most of the updates here, of late, and their part of them: ``embedding.weight:17``, by the
        numbers of their whole table. Called by one thread, whatever the group does meanwhile."""
        return [(self._row_name(number), share) for number, share in self._row_counts.hottest()]

    def _row_name(self, number: int) -> str:
        shard = self.spec.shards[int(self.spec.holders(number))]
        return f"{shard.variable}:{shard.first_row + number - shard.offset // self.spec.row_elements}"

    def _table(self, slot: str) -> RowTable:
        """The rows of a slot, or of the weights."""
        found = self._tables.get(slot)
        if found is None:
            flat = self.slot(slot) if slot else self.weights
            found = self._tables[slot] = RowTable(flat, self.spec.row_elements)
        return found


def new_group(spec: GroupSpec) -> ShardGroup:
    return TableGroup(spec) if spec.is_table else ShardGroup(spec)
