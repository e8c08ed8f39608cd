"""Tasks and their processes: ``worker:1`` names a task for life, across all its incarnations. Pure, no I/O."""

from __future__ import annotations

import dataclasses
import re

from stratagem.errors import ClusterSpecError

TASK_TYPES = ("chief", "worker", "ps", "evaluator")
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")
"""As ``str()`` gives it: of two spellings each would be a task of its own."""


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class TaskId:
    """Type and index of a task; ``str()`` gives ``"worker:1"``."""

    type: str
    index: int

    @classmethod
    def parse(cls, text: str) -> TaskId:
        """The task named by ``text``; a ClusterSpecError unless it is ``type:index`` with a known type and an index as
        people write it."""
        task_type, colon, index = text.partition(":")
        if task_type not in TASK_TYPES or not colon or not _INDEX.fullmatch(index):
            known = ", ".join(TASK_TYPES)
            raise ClusterSpecError(f"expected a task like 'worker:0' (types: {known}), got {text!r}")
        return cls(task_type, int(index))

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Incarnation:
    """One process of a task, from its start to its end: what holds units, what gets fenced."""

    task: str
    number: int
    """That the chief issued for it; grows with every process the chief welcomes, of any task."""

    def __str__(self) -> str:
        return f"{self.task} (incarnation {self.number})"
