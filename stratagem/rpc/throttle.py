"""Log lines that a peer can cause: a few of each kind in a while, the others are counted."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

_MAX_KINDS = 1024


class Throttle:
    """Lets ``burst`` lines of a kind through every ``period_s`` seconds. Thread-safe."""

    def __init__(self, burst: int = 10, period_s: float = 10.0) -> None:
        self._burst = burst
        self._period_s = period_s
        self._guard = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}
        """When the period of a kind began, and its lines since then."""

    def admit(self, kind: str, now: float) -> int | None:
        """Whether a line may be written. ``now``: seconds, monotonic. Gives how many of its kind were left out in the
        period before; None: leave it out."""
        with self._guard:
            began, count = self._kinds.get(kind, (now, 0))
            left_out = 0
            if now - began >= self._period_s:
                began, count, left_out = now, 0, max(0, count - self._burst)
            if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            self._kinds[kind] = began, count + 1
            return left_out if count < self._burst else None

    def log(self, logger: logging.Logger, level: int, kind: str, message: str, *arguments: Any, **extra: Any) -> None:
        """Writes a line, or counts it."""
        left_out = self.admit(f"{logger.name}:{kind}", time.monotonic())
        if left_out:
            logger.log(level, "%d more lines of this kind (%s) were suppressed", left_out, kind)
        if left_out is not None:
            logger.log(level, message, *arguments, **extra)


THROTTLE = Throttle()
