"""Units of data and updates of weights: the vocabulary that chief, ps and workers share. Pure, no I/O.

A *unit* is the examples a worker takes from the iterator at once. The *plan* of an epoch cuts the
order of the examples into units once; units are never regrouped. An *update* is one
``optimizer.step()``: (the units whose gradients it holds, its ordinal within the last of them).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

MAX_UNITS = 1 << 26
"""In an epoch: chief and ps keep a bit for each, 8 MiB."""
MAX_STATE_BYTES = 1 << 20
"""What may be counted (loss, states of metrics) on one unit."""


class Unit(NamedTuple):
    """Identity of a unit, for life."""

    dataset: int
    """Ordinal of the distributed dataset in the script, starting at 1."""
    epoch: int
    """Pass over the dataset, starting at 0."""
    index: int  # type: ignore[assignment]  # a tuple's method, which nobody asks of a unit
    """Position in the plan of the epoch, starting at 0."""

    def __str__(self) -> str:
        return f"unit {self.dataset}/{self.epoch}/{self.index}"


class Update(NamedTuple):
    """Identity of one ``optimizer.step()``."""

    units: tuple[Unit, ...]
    """Units whose gradients are in it, oldest first; empty without a distributed dataset."""
    ordinal: int
    """Ordinal of the step within the last unit, starting at 0."""

    def __str__(self) -> str:
        return f"update {self.ordinal} of {', '.join(map(str, self.units)) or 'no unit'}"


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    unit: Unit
    num_examples: int = 0
    step: int = 0
    """Staleness 0: number of the step of the job that it is a slice of; 0 otherwise."""
    step_units: tuple[int, ...] = ()
    """Staleness 0: indices of the units of all slices of the step, in slice order."""
    refresh: bool = False
    """The holder had no part in the last step and must pull weights before it computes."""

    @property
    def slices(self) -> tuple[Unit, ...]:
        """Staleness 0: the units of all slices of the step, in slice order."""
        return tuple(Unit(self.unit.dataset, self.unit.epoch, index) for index in self.step_units)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How every epoch of a dataset is cut into units.

    A unit is one of ``num_slices`` slices of a global batch: contiguous, ceil(batch / num_slices)
    examples each until the batch is used up (the rule of ``tf.distribute``). A slice without
    examples is not a unit.
    """

    num_examples: int
    batch_size: int
    """Examples in a global batch."""
    drop_last: bool = False
    """Leave out a last batch that is not full."""
    shuffle: bool = True
    """Whether epochs follow a seeded permutation or the examples' own order."""
    num_slices: int = 1
    """Slices of a global batch; 1 when a unit is a whole batch."""
    staleness: float = math.inf
    """Staleness bound: 0 synchronous, inf asynchronous."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_examples < 0 or self.batch_size < 1 or self.num_slices < 1 or not self.staleness >= 0:
            raise ValueError(f"not a plan: {self}")

    def differences(self, other: Plan) -> list[str]:
        """In what ``other``, of a script, is unlike this one, of the job; its seed does not count."""
        return [
            f"{field.name} is {getattr(self, field.name)!r} in the job and {getattr(other, field.name)!r} here"
            for field in dataclasses.fields(self)
            if field.name != "seed" and getattr(self, field.name) != getattr(other, field.name)
        ]

    @functools.cached_property
    def num_batches(self) -> int:
        if self.drop_last:
            return self.num_examples // self.batch_size
        return -(-self.num_examples // self.batch_size)

    def _slices(self, num_examples: int) -> int:
        """Slices with at least one example in a batch of ``num_examples``."""
        return -(-num_examples // -(-num_examples // self.num_slices)) if num_examples else 0

    def _batch_examples(self, batch: int) -> int:
        return min(self.batch_size, self.num_examples - batch * self.batch_size)

    @functools.cached_property
    def units_per_batch(self) -> int:
        """Units in a full batch."""
        return self._slices(self.batch_size)

    @functools.cached_property
    def num_units(self) -> int:
        if self.num_batches == 0:
            return 0
        last = self._slices(self._batch_examples(self.num_batches - 1))
        return (self.num_batches - 1) * self.units_per_batch + last

    def batch_of(self, index: int) -> int:
        """The global batch that unit ``index`` is a slice of."""
        self._check(index)
        # A short last batch may have more slices than a full one: 4 examples in 4 slices, but 5 in 3 (2, 2, 1).
        return min(index // self.units_per_batch, self.num_batches - 1)

    def units_of(self, batch: int) -> range:
        """The units of a global batch, in slice order."""
        first = batch * self.units_per_batch
        return range(first, self.num_units if batch == self.num_batches - 1 else first + self.units_per_batch)

    def slice_of(self, index: int) -> int:
        """The place of unit ``index`` among the slices of its global batch."""
        return index - self.batch_of(index) * self.units_per_batch

    def bounds(self, index: int) -> tuple[int, int]:
        """First and one-past-last position, in the epoch's order of examples, of unit ``index``."""
        batch, slice_index = self.batch_of(index), self.slice_of(index)
        examples = self._batch_examples(batch)
        per_slice = -(-examples // self.num_slices)
        start = min(slice_index * per_slice, examples)
        stop = min(start + per_slice, examples)
        return batch * self.batch_size + start, batch * self.batch_size + stop

    def unit_examples(self, index: int) -> int:
        if self.num_slices == 1:
            self._check(index)
            return self._batch_examples(index)
        start, stop = self.bounds(index)
        return stop - start

    def examples_in(self, units: UnitBitmap) -> int:
        """In these units of an epoch; as fast for all of them, or for batches, as for one."""
        if self.num_slices > 1 and len(units) < self.num_units:
            return sum(map(self.unit_examples, units))
        if len(units) == self.num_units:
            return self.bounds(self.num_units - 1)[1] if self.num_units else 0
        last = self.num_batches - 1
        return len(units) * self.batch_size - (self.batch_size - self._batch_examples(last)) * (last in units)

    def _check(self, index: int) -> None:
        if not 0 <= index < self.num_units:
            raise IndexError(f"unit {index} of {self.num_units}")


class UnitBitmap:
    """A set of unit indices of one epoch, kept as a bitmap (least significant bit of byte 0 is unit 0). Adding, taking
    out and looking up cost the same however large the epoch is."""

    def __init__(self, data: bytes = b"") -> None:
        self._bytes = bytearray(data)

    @classmethod
    def of(cls, indices: Iterable[int]) -> UnitBitmap:
        bitmap = cls()
        for index in indices:
            bitmap.add(index)
        return bitmap

    @classmethod
    def first(cls, num_units: int) -> UnitBitmap:
        """So many from 0 on."""
        return cls._from_int((1 << num_units) - 1)

    def add(self, index: int) -> bool:
        """Adds ``index``; False if it was there."""
        place, bit = index >> 3, 1 << (index & 7)
        if place >= len(self._bytes):
            self._bytes.extend(bytes(place + 1 - len(self._bytes)))
        new = not self._bytes[place] & bit
        self._bytes[place] |= bit
        return new

    def discard(self, index: int) -> None:
        if index in self:
            self._bytes[index >> 3] &= ~(1 << (index & 7))

    def __contains__(self, index: int) -> bool:
        place = index >> 3
        return place < len(self._bytes) and bool(self._bytes[place] >> (index & 7) & 1)

    def __len__(self) -> int:
        return self._int().bit_count()

    def __iter__(self) -> Iterator[int]:
        for place, byte in enumerate(bytes(self._bytes)):
            while byte:
                low = byte & -byte
                yield 8 * place + low.bit_length() - 1
                byte ^= low

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnitBitmap) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __and__(self, other: UnitBitmap) -> UnitBitmap:
        return self._from_int(self._int() & other._int())

    def __or__(self, other: UnitBitmap) -> UnitBitmap:
        return self._from_int(self._int() | other._int())

    def __sub__(self, other: UnitBitmap) -> UnitBitmap:
        return self._from_int(self._int() & ~other._int())

    def below(self, stop: int) -> UnitBitmap:
        """Those before ``stop``."""
        return self & self.first(stop)

    def _int(self) -> int:
        return int.from_bytes(self._bytes, "little")

    @classmethod
    def _from_int(cls, bits: int) -> UnitBitmap:
        return cls(bits.to_bytes(-(-bits.bit_length() // 8), "little"))

    def to_bytes(self) -> bytes:
        """The bitmap; no trailing zero bytes."""
        return bytes(self._bytes).rstrip(b"\0")

    def __repr__(self) -> str:
        return f"UnitBitmap({len(self)} units)"


def positions_of(units: Iterable[Unit]) -> dict[tuple[int, int], UnitBitmap]:
    """Units of each (dataset, epoch)."""
    found: dict[tuple[int, int], UnitBitmap] = {}
    for unit in units:
        found.setdefault((unit.dataset, unit.epoch), UnitBitmap()).add(unit.index)
    return found


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Topic:
    """What workers count or agree on: a group ("fit 1", say) and a number in it, the same on every worker."""

    group: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.group}/{self.ordinal}"


EPOCH_LOGS = ", logs of epochs"
"""Ends the name of a group that has what came of each epoch of a ``fit``: checkpoints keep it."""
EARLIER_LOGS = ", logs of epochs before the job was resumed"
"""Ends the name of the group in which a resumed job has these."""
IN_CHECKPOINTS = "in checkpoints, "
"""Begins the name of a group that they keep, too."""
