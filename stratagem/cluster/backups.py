"""Which ps has the copy of which: a rule, so that nobody has to be told. Pure."""

from __future__ import annotations

from stratagem.cluster.task import TaskId


def backup_of(task: str, num_ps: int) -> str:
    """The ps that keeps a copy of what ``task`` holds: the next one."""
    return str(TaskId("ps", (TaskId.parse(task).index + 1) % num_ps))


def kept_by(task: str, num_ps: int) -> str:
    """The ps whose copy ``task`` keeps."""
    return str(TaskId("ps", (TaskId.parse(task).index - 1) % num_ps))
