"""What workers wait for inside the chief, for the status page."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from stratagem.chief.lives import Life


class Waits:
    """Notes of who waits for what, and since when.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.noted: dict[Life, tuple[str, float]] = {}
        """In words, and since when."""

    @contextlib.contextmanager
    def of(self, life: Life) -> Iterator[None]:
        """Around a call of ``life``, which waits for nothing after it."""
        try:
            yield
        finally:
            self.noted.pop(life, None)

    def note(self, life: Life, what: str, others: Sequence[Life]) -> None:
        """``life`` waits for ``others`` to do something."""
        text = f"{', '.join(other.task for other in others)} {what}" if others else "units that are pending"
        if self.noted.get(life, ("",))[0] != text:
            self.noted[life] = (text, self._clock())
