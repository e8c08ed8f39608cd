"""The input of a verdict: numbers of every task over the same period."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from stratagem.measuring import measures
from stratagem.measuring.measures import COMMUNICATION, PHASES, labels
from stratagem.rpc.status_view import StatusView, TaskState


@dataclasses.dataclass(frozen=True)
class TaskReading:
    task: str
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What it measured in ``window_s``, by the names of ``stratagem.measuring.measures``; gauges as they are."""
    window_s: float = 0.0
    state: str = "live"
    """"waiting", "live", "lost" or "done"."""
    silent_s: float = 0.0
    """Since the chief last heard of it."""
    waiting_on: str = ""
    waiting_s: float = 0.0
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def get(self, name: str) -> float:
        return self.values.get(name, 0.0)

    @property
    def steps(self) -> float:
        """Completed in the window."""
        return self.get(measures.STEPS)

    @functools.cached_property
    def total_s(self) -> float:
        """Time inside its loops."""
        return sum(self.get(phase) for phase in PHASES if phase != measures.OUTSIDE)

    def share(self, *phases: str) -> float:
        """The part of its time in these phases, 0 to 1."""
        return sum(self.get(phase) for phase in phases) / self.total_s if self.total_s > 0 else 0.0

    def each_s(self, phase: str) -> float:
        """Seconds of a phase in a step."""
        return self.get(phase) / max(1.0, self.steps)

    @functools.cached_property
    def waits(self) -> float:
        """The part of its time that is exposed communication."""
        return self.share(*COMMUNICATION)

    @functools.cached_property
    def own_s(self) -> float:
        """Seconds a step takes by itself: data, computing, optimizer, saving, encoding; not waiting for others."""
        waits = (phase for phase in COMMUNICATION if phase != measures.PUSH)
        return (self.total_s - sum(self.get(phase) for phase in waits)) / max(1.0, self.steps)

    @property
    def served_s(self) -> float:
        """Of a ps: seconds in which it took frames, merged, applied and replied; of all lanes together."""
        return sum(self.get(name) for name in (measures.RECEIVE, measures.MERGE, measures.APPLY, measures.REPLY))

    @property
    def busy(self) -> float:
        """Of a ps: the part of the time that it served; above 1 where lanes are served side by side."""
        return self.served_s / self.window_s if self.window_s > 0 else 0.0

    @property
    def host(self) -> str:
        """Where it runs; tasks of one host have one name."""
        return self.notes.get("host", self.task)

    def lanes(self, name: str) -> dict[tuple[str, str], float]:
        """A measure of its lanes, by peer and kind."""
        found = labels(self.values, name)
        return {(label.partition("/")[0], label.partition("/")[2]): value for label, value in found.items()}


@dataclasses.dataclass(frozen=True)
class Reading:
    tasks: tuple[TaskReading, ...] = ()
    is_over: bool = False
    """The job has ended; the numbers are those of all of it."""
    is_ending: bool = False
    """Tasks that have gone are missed by nobody."""
    problem: str = ""
    """Why nothing, or not more, is known."""

    def of(self, kind: str) -> list[TaskReading]:
        return [task for task in self.tasks if task.task.partition(":")[0] == kind]

    def received_bytes(self, server: TaskReading) -> float:
        """By a ps; what comes over gRPC it does not count, but its workers do."""
        if counted := sum(server.lanes(measures.RECEIVED).values()):
            return counted
        sent = (lane for one in self.working for lane in one.lanes(measures.SENT).items())
        return sum(num_bytes for (peer, _), num_bytes in sent if peer == server.task)

    @functools.cached_property
    def working(self) -> list[TaskReading]:
        """Workers that measured something inside their loops."""
        return [worker for worker in self.of("worker") if worker.total_s > 0 and worker.steps > 0]

    @functools.cached_property
    def in_step(self) -> bool:
        """Whether each step of a worker waits for the others."""
        return any(worker.get(measures.IN_STEP) for worker in self.of("worker"))


def reading_of(status: StatusView) -> Reading:
    return Reading(tuple(_task(task) for task in status.tasks), is_ending=bool(status.stop_reason))


def _task(task: TaskState) -> TaskReading:
    values, window_s = task.recent, task.window_s
    if not window_s:  # it has spoken once so far: since it began
        window_s = sum(task.measures.get(phase, 0.0) for phase in PHASES)
    return TaskReading(
        task.task,
        values,
        window_s,
        task.state,
        0.0 if task.task == "chief:0" else task.heartbeat_age_s,
        task.waiting_on,
        task.waiting_s,
        task.notes,
    )
