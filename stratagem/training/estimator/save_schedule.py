"""When a training saves a checkpoint: by steps, or by the clock of one worker that all go by."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from stratagem.worker.ring.communicator import Communicator

LOOK_S = 1.0
"""Workers that run in step ask rank 0's clock about this often: a collective each time."""


class SaveSchedule:
    """Says after which steps to save.

    Args:
        every_steps: steps between two checkpoints; None: go by the clock.
        every_s: seconds between two.
        workers: that run in step, and all ask after each step; None: this process decides for itself.
        step: at which training starts.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        every_steps: int | None,
        every_s: float | None,
        workers: Communicator | None,
        step: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_steps = every_steps
        self._every_s = math.inf if every_s is None else every_s
        self._workers = workers if workers is not None and workers.size > 1 else None
        self._clock = clock
        self._saved_step = step
        self._saved_at = self._looked_at = clock()
        self._looked_step = self._next_look = step

    def saved(self, step: int) -> None:
        """There is a checkpoint of ``step``."""
        self._saved_step, self._saved_at = step, self._clock()

    def is_due(self, step: int) -> bool:
        """Whether to save now, after ``step`` steps."""
        if self._every_steps is not None:
            return step // self._every_steps > self._saved_step // self._every_steps
        if math.isinf(self._every_s):
            return False
        if self._workers is None:
            return self._clock() - self._saved_at >= self._every_s
        if step < self._next_look:
            return False
        due, ahead = self._workers.broadcast(torch.tensor(self._look(step))).tolist()
        self._next_look = step + int(ahead)
        return bool(due)

    def _look(self, step: int) -> list[int]:
        """Whether the time is up, and steps until the next look: those that fit into the time until then."""
        now = self._clock()
        left_s = self._every_s - (now - self._saved_at)
        pace = (step - self._looked_step) / max(now - self._looked_at, 1e-9)
        self._looked_step, self._looked_at = step, now
        wait_s = min(LOOK_S, left_s if left_s > 0 else self._every_s)
        return [int(left_s <= 0), max(1, int(min(pace * wait_s, 1e6)))]
