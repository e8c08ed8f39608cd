"""What workers wait for inside the chief: for the status page, and where they wait for each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from stratagem.cluster.incarnation import Incarnation

SAME_S = 2.0
"""A call that follows within this on one that waited for the same goes on waiting."""


class Waits:
    """Notes of who waits for what, and since when, by a monotonic ``clock`` of seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.noted: dict[Incarnation, tuple[str, float]] = {}
        """In words, and since when."""
        self.others: dict[Incarnation, Sequence[Incarnation]] = {}
        """Who is waited for, of each that is noted for others."""
        self._left: dict[Incarnation, tuple[str, float, float]] = {}

    @contextlib.contextmanager
    def of(self, incarnation: Incarnation, what: str = "") -> Iterator[None]:
        """Around a call of ``incarnation``, which waits for nothing after it; all the time for ``what``, if given."""
        if what:
            self.noted[incarnation] = what, self._clock()
        try:
            yield
        finally:
            self.others.pop(incarnation, None)
            if incarnation in self.noted:
                self._left[incarnation] = (*self.noted.pop(incarnation), self._clock())

    def note(self, incarnation: Incarnation, what: str, others: Sequence[Incarnation]) -> None:
        self.others[incarnation] = others
        text = f"{', '.join(other.task for other in others)} {what}" if others else "units that are pending"
        if self.noted.get(incarnation, ("",))[0] != text:
            now = self._clock()
            before, since, until = self._left.pop(incarnation, ("", now, now))
            # Calls that wait long are made anew, to see the end of the job: it is the same wait then.
            self.noted[incarnation] = (text, since if before == text and now - until < SAME_S else now)
