"""The units of one pass over a dataset: pending, leased, accepted. Pure, no I/O.

Every unit is in exactly one of the three states, so no unit is ever leased twice. A returned unit becomes pending and
is leased before those that were never leased.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Collection, Iterable

from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Lease, Plan, UnitBitmap
from stratagem.errors import ProtocolError


@dataclasses.dataclass(frozen=True)
class Holding:
    incarnation: Incarnation
    restores: int
    """Restores of ps the job had seen when the unit was leased; fewer than now: its updates may be lost."""


@dataclasses.dataclass(frozen=True)
class Leases:
    """Answer to a worker that asks for units."""

    granted: tuple[Lease, ...] = ()
    end: bool = False
    """The epoch is closed."""
    waits_for: tuple[Incarnation, ...] = ()
    """Why there is nothing: who holds what the caller waits for."""
    attempt: int = 0
    """Of an evaluation; units of others do not count."""
    first_open: int = 0
    """Of training data, with ``end``: the first epoch from this one on that is not closed."""


class EpochLeases:
    """The units of one epoch; ``accepted``: earlier, by the journal or checkpoint that the job resumes from."""

    def __init__(self, plan: Plan, accepted: UnitBitmap | None = None) -> None:
        self.plan = plan
        self.accepted = accepted if accepted is not None else UnitBitmap()
        self.num_accepted = len(self.accepted)
        self._leased: dict[int, Holding] = {}
        self._of_holder: dict[Incarnation, set[int]] = {}
        self._returned: list[int] = []
        self._next = 0
        self.undone: set[int] = set()
        """Units that were leased or accepted when all ps went back, or reported and not believed: who reports one
        may not have heard of that."""

    @property
    def closed(self) -> bool:
        return self.num_accepted == self.plan.num_units

    @property
    def has_begun(self) -> bool:
        return bool(self._leased or self.num_accepted)

    @property
    def is_leased(self) -> bool:
        """Some of it, to anybody."""
        return bool(self._leased)

    @property
    def first_pending(self) -> int | None:
        """The pending unit that goes out next: the lowest; None when there is none."""
        while self._returned and not self.is_pending(self._returned[0]):
            heapq.heappop(self._returned)
        if self._returned:
            return self._returned[0]
        while self._next < self.plan.num_units and not self.is_pending(self._next):
            self._next += 1
        return self._next if self._next < self.plan.num_units else None

    def is_pending(self, index: int) -> bool:
        return index not in self._leased and index not in self.accepted

    def lease(self, index: int) -> Holding | None:
        return self._leased.get(index)

    def held_by(self, incarnation: Incarnation) -> list[int]:
        """Units leased to ``incarnation``, lowest first."""
        return sorted(self._of_holder.get(incarnation, ()))

    def holders(self, stop: int | None = None) -> set[Incarnation]:
        """Everybody who has a unit leased before ``stop``; None: any."""
        meant = self.plan.num_units if stop is None else stop
        return {holder for holder, units in self._of_holder.items() if any(index < meant for index in units)}

    def is_closed_before(self, stop: int) -> bool:
        first = self.first_pending
        return (first is None or first >= stop) and not any(index < stop for index in self._leased)

    def ask(
        self,
        incarnation: Incarnation,
        held: Collection[int],
        want: int,
        at_most: int,
        stop: int,
        restores: int = 0,
        num_workers: int = 1,
    ) -> list[int]:
        """Leases pending units, the lowest first, after those that the holder does not know of.

        Args:
            held: leases it knows of; others were in a reply that got lost and are handed out again.
            at_most: as many if that leaves each holder, or worker, so many again; ``want`` in any case.
            stop: units before this one are meant.
            restores: see :class:`Holding`.
            num_workers: that are known to take units of this dataset.
        """
        units = [index for index in self.held_by(incarnation) if index not in held]
        others = max(num_workers, len(self._of_holder) + (incarnation not in self._of_holder))
        num_left = min(stop, self.plan.num_units) - self.num_accepted - len(self._leased)
        num = max(want, min(at_most, num_left // (2 * others)))
        while len(units) < num and (index := self.first_pending) is not None and index < stop:
            self.acquire(index, incarnation, restores)
            units.append(index)
        return units[:num]

    def acquire(self, index: int, incarnation: Incarnation, restores: int = 0) -> None:
        assert self.is_pending(index), f"unit {index} is not pending"
        self._leased[index] = Holding(incarnation, restores)
        self._of_holder.setdefault(incarnation, set()).add(index)

    def accept(self, incarnation: Incarnation, indices: Iterable[int]) -> list[int]:
        """Counts units as accepted, as ``incarnation`` reports; returns those that were not yet.

        A unit that is pending counts too: the caller speaks the truth about its updates, whoever held the unit before
        the chief lost sight of it. ProtocolError: no such unit, or it is leased to somebody else.
        """
        new: list[int] = []
        for index in indices:
            if not 0 <= index < self.plan.num_units:
                raise ProtocolError(f"{incarnation} accepted unit {index}; the epoch has {self.plan.num_units} units")
            lease = self._leased.get(index)
            if lease is not None and lease.incarnation != incarnation:
                raise ProtocolError(f"{incarnation} accepted unit {index}, which is leased to {lease.incarnation}")
            if self.mark_accepted(index):
                new.append(index)
        return new

    def mark_accepted(self, index: int) -> bool:
        """Counts one unit as accepted, whoever holds it; False if it was."""
        self._end(index)
        new = self.accepted.add(index)
        self.num_accepted += new
        return new

    def know_accepted(self, units: UnitBitmap) -> UnitBitmap:
        """Counts units as accepted, whoever holds them; returns those that were not. Indices beyond the epoch count
        for nothing."""
        new = units.below(self.plan.num_units) - self.accepted
        for index in [index for index in self._leased if index in new]:
            self._end(index)
        self.accepted |= new
        self.num_accepted += len(new)
        return new

    def give_back(self, index: int) -> None:
        """Makes a unit that is leased pending again."""
        self._end(index)
        heapq.heappush(self._returned, index)

    def give_all_back(self) -> int:
        """Makes every unit that is leased pending again; returns their number."""
        indices = list(self._leased)
        for index in indices:
            self.give_back(index)
        return len(indices)

    def revoke(self, indices: Iterable[int]) -> None:
        """Makes accepted units pending again: the ps went back to a checkpoint without their updates."""
        self.undone.update(self._leased)
        for index in indices:
            if index in self.accepted:
                self.undone.add(index)
                self.accepted.discard(index)
                self.num_accepted -= 1
                heapq.heappush(self._returned, index)

    def _end(self, index: int) -> None:
        lease = self._leased.pop(index, None)
        if lease is not None:
            units = self._of_holder[lease.incarnation]
            units.discard(index)
            if not units:
                del self._of_holder[lease.incarnation]
