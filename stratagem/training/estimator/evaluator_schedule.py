"""When an evaluator evaluates. Pure, no I/O."""

from __future__ import annotations

import enum


class EvaluatorDecision(enum.Enum):
    """What an evaluator does now."""

    EVALUATE = enum.auto()
    WAIT = enum.auto()
    STOP = enum.auto()


class EvaluatorSchedule:
    """Decides by the newest checkpoint and the clock.

    Once the job is over, or its last step is reached, nothing is gained by waiting: the newest checkpoint is evaluated
    at once.

    Args:
        max_steps: the step after which there is no other checkpoint; None: the job's end says so.
        start_delay_s: seconds before the first evaluation.
        throttle_s: seconds from the start of one evaluation to that of the next.
        now: seconds.
    """

    def __init__(self, max_steps: int | None, start_delay_s: float, throttle_s: float, now: float) -> None:
        self._max_steps = max_steps
        self._throttle_s = throttle_s
        self._not_before = now + start_delay_s
        self._done = -1

    def decide(self, now: float, newest: int | None, is_over: bool) -> EvaluatorDecision:
        """What to do.

        Args:
            now: seconds.
            newest: step of the newest checkpoint; None: there is none.
            is_over: whether the job has ended. Told before the newest checkpoint was looked for.
        """
        if newest is not None and newest > self._done:
            is_due = is_over or self._is_last(newest) or now >= self._not_before
            return EvaluatorDecision.EVALUATE if is_due else EvaluatorDecision.WAIT
        return EvaluatorDecision.STOP if is_over or self._is_last(self._done) else EvaluatorDecision.WAIT

    def evaluated(self, step: int, started: float) -> None:
        """The checkpoint of ``step`` is done with, since ``started``."""
        self._done = step
        self._not_before = started + self._throttle_s

    def is_last(self, step: int, is_over: bool) -> bool:
        """Whether no other checkpoint comes after that of ``step``."""
        return is_over or self._is_last(step)

    def _is_last(self, step: int) -> bool:
        return self._max_steps is not None and step >= self._max_steps
