"""A process life of a task: what holds units, what gets fenced. Pure, no I/O."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Life:
    """One process life: the task and the incarnation that the chief issued for it."""

    task: str
    """Task id, for example "worker:1"."""
    incarnation: int
    """Number of the process life; grows with every life the chief welcomes, of any task."""

    def __str__(self) -> str:
        return f"{self.task} (incarnation {self.incarnation})"
