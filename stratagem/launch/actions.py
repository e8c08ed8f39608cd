"""What the supervisor requests, and how a process ended: types shared by all that start, stop and report."""

from __future__ import annotations

import dataclasses
import signal

from stratagem.cluster.task import TaskId


@dataclasses.dataclass(frozen=True)
class Start:
    task: TaskId


@dataclasses.dataclass(frozen=True)
class Signal:
    task: TaskId
    signum: int


@dataclasses.dataclass(frozen=True)
class Kill:
    """Kill a task's process and everything it started."""

    task: TaskId
    reason: str = ""
    """Worth a line of its own."""


@dataclasses.dataclass(frozen=True)
class Say:
    """Tell the user, once."""

    line: str


@dataclasses.dataclass(frozen=True)
class Renew:
    """No process runs, and a new life of the whole job begins: what its chief knew of the last one counts no more."""


@dataclasses.dataclass(frozen=True)
class Finish:
    """Every process has ended: end with this code."""

    exit_code: int


Action = Start | Signal | Kill | Say | Renew | Finish


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first failure of the job."""

    task: TaskId
    code: int
    """As ``subprocess`` gives it: negative for a signal."""
    reason: str
    """Why the job could not go on, in words."""


def precedence_of(role: str) -> int:
    """Whose end counts first, the lowest: the others end because of the first."""
    order = ("worker", "evaluator", "ps", "chief")
    return order.index(role) if role in order else len(order)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
