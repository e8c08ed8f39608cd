"""One process of a task, from its start to its end: what holds units, what gets fenced. Pure, no I/O."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Incarnation:
    """The task, and the number that the chief issued for this process of it."""

    task: str
    number: int
    """Grows with every process the chief welcomes, of any task."""

    def __str__(self) -> str:
        return f"{self.task} (incarnation {self.number})"
