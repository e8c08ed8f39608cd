"""What the rules find, and the verdict made from it."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

WORTH = 0.15
"""The part of the time from which on a cause is told, and exposed communication is worth a look."""


class Cause(enum.Enum):
    """A possible cause of a slow job."""

    NOTHING = "nothing"
    CHIEF_AWAY = "chief away"
    SILENT = "silent task"
    STUCK = "stuck"
    SLOW_DATA = "slow data"
    SLOW_WORKER = "slow worker"
    NO_CORE = "no core"
    INTERPRETER = "interpreter lock"
    THREADS = "too many threads"
    GATE = "staleness bound"
    CHECKPOINTS = "checkpoints"
    SLOW_PS = "slow ps"
    HOT_SHARD = "hot shard"
    SLOW_LINK = "slow link"
    SMALL_FRAMES = "small frames"
    LANE = "slower lane"
    COMMUNICATION = "communication"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Finding:
    cause: Cause
    task: str
    """Whose it is; empty: everybody's."""
    sentence: str
    advice: str
    share: float
    """The part of the job's time that it costs, 0 to 1."""
    evidence: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class JobVerdict(Finding):
    """What makes a job slow, or that nothing does."""

    sure: str = "sure"
    """Or "fairly sure" or "not sure"."""
    also: tuple[str, ...] = ()
    """What else was found, in the order of what it costs."""

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"cause": self.cause.value}

    def text(self) -> str:
        """For a terminal: the sentence, the evidence, what to do, how sure."""
        lines = [self.sentence, *(f"  {line}" for line in self.evidence)]
        lines += [f"what to do: {self.advice}"] if self.advice else []
        lines += [f"also: {line}" for line in self.also]
        return "\n".join([*lines, f"how sure: {self.sure}"])


def percent(share: float) -> str:
    """``64 %``."""
    return f"{100 * min(1.0, max(0.0, share)):.0f} %"


def rate(bytes_per_s: float) -> str:
    """``11 MB/s``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.{1 if bytes_per_s < 10 * size else 0}f} {unit}/s"
    return f"{bytes_per_s:.0f} B/s"
