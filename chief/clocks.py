"""The staleness bound for 0 < s < inf. Pure, no I/O.

A worker may not start step t before every live worker that holds a unit has finished step t-s-1. Finished steps are
counted by clocks: a worker at clock c starts step t = c (counted from 0), so all holders need a clock of at least c-s.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from stratagem.chief.lives import Life


class Clocks:
    """Completed steps of each live worker. A newcomer starts at the minimum of the others."""

    def __init__(self) -> None:
        self._clocks: dict[Life, int | None] = {}

    def expect(self, life: Life) -> None:
        """``life`` trained before the chief restarted: until it says its clock, nobody may overtake it."""
        self._clocks.setdefault(life, None)

    def clock(self, life: Life) -> int:
        """Completed steps of ``life``; 0 before it spoke."""
        return self._clocks.get(life) or 0

    def report(self, life: Life, clock: int, holders: Collection[Life] = ()) -> int:
        """``life`` says that it completed ``clock`` steps; returns the clock it counts from now on.

        A process that is new to the chief is moved up to the slowest of the others that hold units (of all others, if
        nobody does), so that nobody waits for it to repeat what the job has done.
        """
        if life in self._clocks:
            self._clocks[life] = max(self._clocks[life] or 0, clock)
        else:
            others = {other: known for other, known in self._clocks.items() if known is not None}
            busy = [known for other, known in others.items() if other in holders]
            self._clocks[life] = max(clock, min(busy or others.values(), default=0))
        return self.clock(life)

    def waits_for(self, life: Life, staleness: float, holders: Collection[Life]) -> list[Life]:
        """Holders of units that ``life`` has to wait for before it starts its next step; empty: it may start."""
        if math.isinf(staleness):
            return []
        oldest = self.clock(life) - staleness
        late: list[Life] = []
        for other in holders:
            if other == life or other not in self._clocks:
                continue
            clock = self._clocks[other]
            if clock is None or clock < oldest:
                late.append(other)
        return sorted(late)

    def forget(self, life: Life) -> None:
        """``life`` is over; nobody waits for it."""
        self._clocks.pop(life, None)
