"""How a job stands, in the same words for every target."""

from __future__ import annotations

import dataclasses
from typing import Literal

Phase = Literal["pending", "running", "succeeded", "failed", "cancelled", "unknown"]
OVER = ("succeeded", "failed", "cancelled")
_ORDER = ("worker", "evaluator", "ps", "chief")


def rank_of(role: str) -> int:
    """Whose end counts first, the lowest: the others end because of the first."""
    return _ORDER.index(role) if role in _ORDER else len(_ORDER)


@dataclasses.dataclass(frozen=True)
class JobState:
    """Where a job stands, as its target says."""

    phase: Phase
    exit_code: int | None = None
    """Of the job, once it is over; None where nobody knows it."""
    detail: str = ""
    """In words, where there is more to say."""

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.phase in OVER

    @classmethod
    def ended(cls, exit_code: int, cancelled: bool, detail: str = "") -> JobState:
        """A job that has ended with this code."""
        if exit_code == 0:
            return cls("succeeded", 0, detail)
        return cls("cancelled" if cancelled else "failed", exit_code, detail)
