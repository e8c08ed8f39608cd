"""What a task says about its progress, as plain numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class TaskProgress:
    """Of one process; the fields are those of ``Progress`` in chief.proto."""

    step: int = 0
    """Completed steps of a worker; applied updates of a ps."""
    examples: int = 0
    loss: float | None = None
    step_s: float = 0.0
    exposed_s: float = 0.0
    """Mean seconds of a step, and the part of it that waited for communication."""
    waiting_s: float = 0.0
    """Seconds since the task began to wait for another; 0 when it does not wait."""
    store_epoch: int = 0
    bytes_held: int = 0
    skipped: int = 0
    """Updates skipped because of NaN or Inf."""
    reported: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Newest values of ``strategy.report``."""
