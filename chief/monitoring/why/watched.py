"""The verdict on a job while it runs: told when something is off, and stays off."""

from __future__ import annotations

from stratagem.chief.monitoring.why.finding import Cause, JobVerdict
from stratagem.chief.monitoring.why.reading import reading_of
from stratagem.chief.monitoring.why.verdict import judge
from stratagem.rpc.status_view import StatusView

LOOK_S = 5.0
"""Seconds between two looks; two must find the same before it is told."""
WORTH = 0.3
"""What costs less of the time is left to `stratagem why`."""


class WatchedVerdict:
    """Judges a status now and then."""

    def __init__(self) -> None:
        self._looked_at = float("-inf")
        self._last: JobVerdict | None = None
        self.told: JobVerdict | None = None
        """What is off; None: nothing."""

    def look(self, status: StatusView, now: float) -> bool:
        """Looks if it is time; whether something else is off now than before, or nothing any more."""
        if now < self._looked_at + LOOK_S:
            return False
        self._looked_at, before = now, self.told
        found = judge(reading_of(status))
        is_off = found.cause not in (Cause.NOTHING, Cause.UNKNOWN) and found.share >= WORTH
        if not is_off or found.sure.startswith("not"):
            self._last = self.told = None
            return before is not None
        if self._last is not None and (self._last.cause, self._last.task) == (found.cause, found.task):
            self.told = found
        self._last = found
        return self.told is not before and (before is None or (before.cause, before.task) != (found.cause, found.task))
