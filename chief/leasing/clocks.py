"""The staleness bound for 0 < s < inf. Pure, no I/O.

A worker may not start step t before every live worker that holds a unit has finished step t-s-1. Finished steps are
counted by clocks: a worker at clock c starts step t = c (counted from 0), so all holders need a clock of at least c-s.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from stratagem.cluster.task import Incarnation


class Clocks:
    """Completed steps of each live worker. A newcomer starts at the minimum of the others."""

    def __init__(self) -> None:
        self._clocks: dict[Incarnation, int | None] = {}

    def expect(self, incarnation: Incarnation) -> None:
        """``incarnation`` trained before the chief restarted: until it says its clock, nobody may overtake it."""
        self._clocks.setdefault(incarnation, None)

    def clock(self, incarnation: Incarnation) -> int:
        """Completed steps of ``incarnation``; 0 before it spoke."""
        return self._clocks.get(incarnation) or 0

    def report(self, incarnation: Incarnation, clock: int, holders: Collection[Incarnation] = ()) -> int:
        """``incarnation`` says that it completed ``clock`` steps; returns the clock it counts from now on.

        A process that is new to the chief is moved up to the slowest of the others that hold units (of all others, if
        nobody does), so that nobody waits for it to repeat what the job has done.
        """
        if incarnation in self._clocks:
            self._clocks[incarnation] = max(self._clocks[incarnation] or 0, clock)
        else:
            others = {other: known for other, known in self._clocks.items() if known is not None}
            busy = [known for other, known in others.items() if other in holders]
            self._clocks[incarnation] = max(clock, min(busy or others.values(), default=0))
        return self.clock(incarnation)

    def waits_for(
        self, incarnation: Incarnation, staleness: float, holders: Collection[Incarnation]
    ) -> list[Incarnation]:
        """Holders of units that ``incarnation`` has to wait for before it starts its next step; empty: it may start."""
        if math.isinf(staleness):
            return []
        oldest = self.clock(incarnation) - staleness
        others = {other: self._clocks[other] for other in holders if other != incarnation and other in self._clocks}
        return sorted(other for other, clock in others.items() if clock is None or clock < oldest)

    def limit(self, incarnation: Incarnation, staleness: float, holders: Collection[Incarnation]) -> int:
        """The first step that ``incarnation`` may not start before it has asked again.

        Whoever begins to hold a unit meanwhile is moved up to clocks known now, so its own counts as well.
        """
        clocks = [self._clocks.get(other) for other in {*holders, incarnation}]
        slowest = min((clock for clock in clocks if clock is not None), default=0)
        return math.floor(min(slowest + staleness, 2.0**62)) + 1

    def forget(self, incarnation: Incarnation) -> None:
        """``incarnation`` is over; nobody waits for it."""
        self._clocks.pop(incarnation, None)
