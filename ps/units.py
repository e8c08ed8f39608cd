"""Which updates this ps has applied: ordinals of units in progress, a bitmap of closed ones.

Pure; saved in checkpoints with the weights.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from stratagem.cluster.units import MAX_UNITS, Unit, UnitBitmap, Update, positions_of
from stratagem.errors import LimitError, ProtocolError

MAX_LEDGER_BYTES = 1 << 30
_EPOCH_BYTES = 256
"""What an epoch takes beyond its bitmap."""

Epoch = tuple[int, int]


class UnitClose(NamedTuple):
    """A unit is complete on the worker's side."""

    unit: Unit
    num_updates: int
    """Updates of it that this ps acknowledged."""


@dataclasses.dataclass(frozen=True)
class AppliedUnits:
    closed: dict[Epoch, UnitBitmap]
    open: tuple[tuple[Update, int], ...]
    """Updates applied of units not closed, one entry per unit, with the number of servers each takes part on."""
    halves: dict[Epoch, UnitBitmap]
    """Units not closed that lack an update here: others had more; their workers count more; or an optimizer has had no
    update here."""
    accumulates: bool
    """An update of several units has come."""
    dropped: dict[Epoch, UnitBitmap] = dataclasses.field(default_factory=dict)
    """Units not closed that :meth:`UnitLedger.drop` left without an update."""


class UnitLedger:
    """Decides whether an update is new here."""

    def __init__(self) -> None:
        self._closed: dict[Epoch, UnitBitmap] = collections.defaultdict(UnitBitmap)
        self._sizes: dict[Epoch, int] = {}
        """Bytes of the bitmap of each epoch that was closed in, at most."""
        self._num_bytes = 0
        """Sum of the sizes."""
        self._open: dict[Unit, dict[int, int]] = {}
        self._per_unit = 0
        """Updates here of the closed unit that had most; 0: not known."""
        self._counted: dict[Unit, int] = {}
        """What workers count of open units that have fewer."""
        self._joined: frozenset[Unit] = frozenset()
        """Open units that came from several ps: each has what any of them had."""
        self._groups: dict[int, set[int]] = collections.defaultdict(set)
        """Of each ordinal the groups that its updates change, here or on the ps of the checkpoint that this one began
        from."""
        self._accumulates = False
        self._dropped: set[Unit] = set()
        """Open units that an update would have had beside others that are applied: they stay open until the chief has
        marked them as lost."""

    def is_applied(self, unit: Unit, ordinal: int) -> bool:
        """Whether the step ``ordinal`` of ``unit`` is applied here, or can never be."""
        return self._is_closed(unit) or ordinal in self._open.get(unit, ())

    def lacking(self, update: Update) -> list[Unit]:
        """Units without this update here: all of them, or it cannot be applied, for its sum cannot be taken apart.
        LimitError: a unit index beyond :data:`MAX_UNITS`."""
        for unit in update.units:
            if unit.index >= MAX_UNITS:
                _check_index(unit.index, unit)
        return [unit for unit in update.units if not self.is_applied(unit, update.ordinal)]

    def is_new(self, update: Update) -> bool:
        """In step: whether the update must be applied. ProtocolError: some of its units are applied and some are not.
        LimitError as :meth:`lacking`."""
        lacking = self.lacking(update)
        if lacking and len(lacking) < len(update.units):
            raise ProtocolError(
                f"an update over {len(update.units)} units cannot be applied: it is applied here already for some, and "
                f"not for {lacking[0]}, since somebody was lost in the middle of it (start the job again, and it "
                "resumes from its last checkpoint)"
            )
        return bool(lacking)

    def drop(self, update: Update, num_servers: int, groups: Iterable[int]) -> None:
        """The update is not applied, as it is for some of its units already. The others never get it here: as if they
        had, but to be counted as lost."""
        if lacking := self.lacking(update):
            self.record(update, num_servers, groups)
            self._dropped.update(lacking)

    def record(self, update: Update, num_servers: int, groups: Iterable[int]) -> None:
        """Notes an applied (or skipped) update; ``num_servers`` is the number of ps that take part in it, ``groups``
        what it changes here."""
        self._groups[update.ordinal].update(groups)
        self._accumulates |= len(update.units) > 1
        for unit in update.units:
            if not self._is_closed(unit):
                self._open.setdefault(unit, {})[update.ordinal] = num_servers

    def close(self, closes: Iterable[UnitClose], trained: Callable[[], Collection[int]] = tuple) -> None:
        """Closes units: nothing of them can be applied again. ``trained``: as of :meth:`describe`.

        A unit stays open when an update of it was dropped, and when the worker counts more updates here than there are:
        this ps went back to a checkpoint since. The chief then finds that the unit is lacking, and has it marked as
        lost. LimitError: a unit index beyond :data:`MAX_UNITS`, or bitmaps beyond :data:`MAX_LEDGER_BYTES`.
        """
        for close in closes:
            unit = close.unit
            if unit not in self._joined and not self._is_closed(unit):  # else counted among another number of ps, maybe
                self._per_unit = max(self._per_unit, close.num_updates)
            is_lacking = unit in self._joined and self._lacks_own(close, trained())
            if is_lacking or close.num_updates > len(self._open.get(unit, ())):
                _check_index(unit.index, unit)
                if unit in self._open:
                    self._counted[unit] = close.num_updates
                continue
            if unit in self._dropped:
                continue
            epoch = unit.dataset, unit.epoch
            self._make_room(epoch, unit.index)
            self._closed[epoch].add(unit.index)
            self._open.pop(unit, None)
            self._counted.pop(unit, None)

    def mark_lost(self, units: Mapping[Epoch, UnitBitmap]) -> int:
        """Closes units whose updates were lost in a restore. Returns how many of them were not here. LimitError: a unit
        index beyond :data:`MAX_UNITS`, or bitmaps beyond :data:`MAX_LEDGER_BYTES`."""
        num_lost = 0
        for epoch, bitmap in units.items():
            self._make_room(epoch, 8 * len(bitmap.to_bytes()) - 1)
            num_lost += len(bitmap - self._closed[epoch])
            self._closed[epoch] |= bitmap
        self._open = {unit: ordinals for unit, ordinals in self._open.items() if not self._is_closed(unit)}
        self._counted = {unit: number for unit, number in self._counted.items() if unit in self._open}
        self._dropped &= self._open.keys()
        return num_lost

    def describe(self, trained: Collection[int] = (), *, lacks_first: bool = False) -> AppliedUnits:
        """``trained``: groups here that an optimizer changes; ``lacks_first``: one of these optimizers has had no
        update yet, so that no unit has all of its."""
        entries = (
            (Update((unit,), ordinal), num_servers)
            for unit, ordinals in sorted(self._open.items())
            for ordinal, num_servers in sorted(ordinals.items())
        )
        known = (len(ordinals) for unit, ordinals in self._open.items() if unit not in self._joined)
        own = self._own(trained)
        per_unit, are_halves = max(self._per_unit, len(own), *known), lacks_first and not self._per_unit
        halves: list[Unit] = []
        for unit, ordinals in self._open.items():
            lacks_own = unit in self._joined and not own <= ordinals.keys()
            if are_halves or lacks_own or len(ordinals) < max(per_unit, self._counted.get(unit, 0)):
                halves.append(unit)
        dropped = positions_of(self._dropped)
        return AppliedUnits(dict(self._closed), tuple(entries), positions_of(halves), self._accumulates, dropped)

    def _lacks_own(self, close: UnitClose, trained: Collection[int]) -> bool:
        """Whether of a unit that came from several ps fewer updates are here than its worker counts, without those that
        change only what is elsewhere. It may count these, too, from before there was another number of ps."""
        own = self._own(trained)
        here = self._open.get(close.unit, {}).keys() - (self._groups.keys() - own)
        return bool(trained) and min(close.num_updates, max(1, len(own))) > len(here)

    def _own(self, trained: Collection[int]) -> frozenset[int]:
        """Ordinals of the updates that change some of these groups."""
        return frozenset(ordinal for ordinal, groups in self._groups.items() if not groups.isdisjoint(trained))

    def to_json(self) -> dict[str, Any]:
        return {
            "closed": [[*epoch, bitmap.to_bytes().hex()] for epoch, bitmap in sorted(self._closed.items())],
            "open": [[*unit, sorted(ordinals.items())] for unit, ordinals in sorted(self._open.items())],
            "per_unit": self._per_unit,
            "counted": [[*unit, number] for unit, number in sorted(self._counted.items())],
            "joined": sorted(self._joined.intersection(self._open)),
            "groups": [[ordinal, sorted(groups)] for ordinal, groups in sorted(self._groups.items())],
            "accumulates": self._accumulates,
            "dropped": [[*unit] for unit in sorted(self._dropped)],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> UnitLedger:
        """The reverse of :meth:`to_json`. Errors as :meth:`mark_lost`."""
        ledger = cls()
        ledger.mark_lost({(dataset, epoch): UnitBitmap(bytes.fromhex(bits)) for dataset, epoch, bits in data["closed"]})
        for *unit, ordinals in data["open"]:
            ledger._open[Unit(*unit)] = dict(ordinals)
        ledger._per_unit = data.get("per_unit", 0)  # a checkpoint of before has none
        ledger._counted = {Unit(*unit): number for *unit, number in data.get("counted", ())}
        ledger._joined = frozenset(Unit(*unit) for unit in data.get("joined", ()))
        ledger._groups.update((ordinal, set(groups)) for ordinal, groups in data.get("groups", ()))
        ledger._accumulates = data.get("accumulates", False)
        ledger._dropped = {Unit(*unit) for unit in data.get("dropped", ())}
        return ledger

    @classmethod
    def joined(cls, ledgers: Sequence[UnitLedger]) -> tuple[UnitLedger, int]:
        """What several ps have applied together, which are at one cut: what one of them has, all have that take part.

        Returns the ledger of each of any number of ps that go on from there, and how many updates some of their ps
        lack nevertheless. Errors as :meth:`mark_lost`.
        """
        ledger = cls()
        for each in ledgers:
            ledger.mark_lost(each._closed)
        wanted: dict[tuple[Unit, int], int] = {}
        for each in ledgers:
            for unit, ordinals in each._open.items():
                for ordinal, num_servers in ordinals.items():
                    wanted[unit, ordinal] = max(num_servers, wanted.get((unit, ordinal), 0))
        num_torn = 0
        for (unit, ordinal), num_servers in wanted.items():
            num_torn += sum(each.is_applied(unit, ordinal) for each in ledgers) < num_servers
            if not ledger._is_closed(unit):
                ledger._open.setdefault(unit, {})[ordinal] = 1
        ledger._joined = frozenset(ledger._open)
        for ordinal, groups in (each for one in ledgers for each in one._groups.items()):
            ledger._groups[ordinal] |= groups
        ledger._accumulates = any(each._accumulates for each in ledgers)
        return ledger, num_torn

    def _is_closed(self, unit: Unit) -> bool:
        bitmap = self._closed.get((unit.dataset, unit.epoch))
        return bitmap is not None and unit.index in bitmap

    def _make_room(self, epoch: Epoch, index: int) -> None:
        """For units up to ``index``."""
        before = self._sizes.get(epoch, 0)
        num_bytes = index // 8 + _EPOCH_BYTES
        if num_bytes <= before:
            return
        what = f"dataset {epoch[0]}, epoch {epoch[1]}"
        _check_index(index, what)
        num_more = num_bytes - before
        if self._num_bytes + num_more > MAX_LEDGER_BYTES:
            raise LimitError(
                f"{what}: the bitmaps of all epochs would take {self._num_bytes + num_more:,} bytes, at most "
                f"{MAX_LEDGER_BYTES:,} here"
            )
        self._num_bytes += num_more
        self._sizes[epoch] = num_bytes


def _check_index(index: int, what: object) -> None:
    if index >= MAX_UNITS:
        raise LimitError(f"{what}: an epoch has at most {MAX_UNITS} units here")
