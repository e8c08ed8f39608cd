"""When a training saves, and when an evaluator evaluates: by steps, checkpoints and the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal

import torch

from stratagem.worker.ring.communicator import Communicator

LOOK_S = 1.0
"""Workers that run in step ask rank 0's clock about this often: a collective each time."""


class SaveSchedule:
    """Says after which steps to save. ``every_steps``: steps between two checkpoints; None: go by the clock.
    ``every_s``: seconds between two. ``workers``: that run in step, and all ask after each step; None: this process
    decides for itself."""

    def __init__(
        self,
        every_steps: int | None,
        every_s: float,
        workers: Communicator | None,
        step: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_steps = every_steps
        self._every_s = every_s
        self._workers = workers if workers is not None and workers.size > 1 else None
        self._clock = clock
        self._saved_step = step
        self._saved_at = self._looked_at = clock()
        self._looked_step = self._next_look = step

    def saved(self, step: int) -> None:
        self._saved_step, self._saved_at = step, self._clock()

    def is_due(self, step: int) -> bool:
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


class EvaluatorSchedule:
    """Decides when an evaluator evaluates, by the newest checkpoint and the clock. Pure, no I/O.

    Once the job is over, or its last step is reached, nothing is gained by waiting: the newest checkpoint is evaluated
    at once. ``max_steps``: the step after which there is no other checkpoint; None: the job's end says so.
    ``start_delay_s``: seconds before the first evaluation. ``throttle_s``: seconds from the start of one evaluation to
    that of the next.
    """

    def __init__(self, max_steps: int | None, start_delay_s: float, throttle_s: float, now: float) -> None:
        self._max_steps = max_steps
        self._throttle_s = throttle_s
        self._not_before = now + start_delay_s
        self._done = -1

    def decide(self, now: float, newest: int | None, is_over: bool) -> Literal["evaluate", "wait", "stop"]:
        """What to do. ``newest``: step of the newest checkpoint, if there is one; whether the job has ended
        (``is_over``) is told before that was looked for."""
        if newest is not None and newest > self._done:
            is_due = self.is_last(newest, is_over) or now >= self._not_before
            return "evaluate" if is_due else "wait"
        return "stop" if self.is_last(self._done, is_over) else "wait"

    def evaluated(self, step: int, started: float) -> None:
        """The checkpoint of ``step`` is done with, since ``started``."""
        self._done = step
        self._not_before = started + self._throttle_s

    def is_last(self, step: int, is_over: bool) -> bool:
        """Whether no other checkpoint comes after that of ``step``."""
        return is_over or (self._max_steps is not None and step >= self._max_steps)
