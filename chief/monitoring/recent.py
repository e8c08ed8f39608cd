"""What the tasks measured lately: newest and a while before, so that whoever asks sees what is going on now."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

WINDOW_S = 15.0
"""How long ago the earlier one may be."""
SPACING_S = 3.0
"""Between two that are kept, beside the newest."""

Measures = bytes | Mapping[str, float]
"""As it came, or the chief's own."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one task measured, as it came."""

    newest: Measures = b""
    earlier: Measures = b""
    window_s: float = 0.0
    """Seconds from the earlier one to the newest."""
    age_s: float = 0.0
    """Seconds since the newest came."""


class Recent:
    """Keeps a few of each task."""

    def __init__(self) -> None:
        self._kept: dict[str, collections.deque[tuple[float, Measures]]] = {}

    def add(self, task: str, measured: Measures, now: float) -> None:
        kept = self._kept.setdefault(task, collections.deque())
        if kept and now - kept[-1][0] > WINDOW_S:  # it, or this chief, stood still: no step took that long
            kept.clear()
        if len(kept) > 1 and now - kept[-2][0] < SPACING_S:
            kept.pop()
        kept.append((now, measured))
        while len(kept) > 2 and kept[1][0] <= now - WINDOW_S:
            kept.popleft()

    def forget(self, task: str) -> None:
        """A new process does what the task does: it counts from nothing."""
        self._kept.pop(task, None)

    def of(self, task: str, now: float) -> Measured:
        kept = self._kept.get(task)
        if not kept:
            return Measured()
        (first_at, first), (last_at, last) = kept[0], kept[-1]
        return Measured(last, first if len(kept) > 1 else b"", last_at - first_at, now - last_at)
