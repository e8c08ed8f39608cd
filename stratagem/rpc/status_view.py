"""The chief's status of the job as plain data: for status, page, progress display and supervisor."""

from __future__ import annotations

import dataclasses
import functools
import re

from stratagem.measuring import measures
from stratagem.rpc.fields import from_message
from stratagem.rpc.generated import chief_pb2

SLOW_PHI = 3.0
"""One silence in a thousand: a task that is silent for so long is called slow."""


@dataclasses.dataclass(frozen=True)
class TaskState:
    task: str
    state: str
    """"waiting", "live", "lost" or "done"."""
    address: str = ""
    incarnation: int = 0
    pid: int = 0
    step: int = 0
    """Completed steps of a worker; applied updates of a ps."""
    clock: int = 0
    examples: int = 0
    """Examples in completed steps of this incarnation."""
    epoch: int = 0
    loss: float | None = None
    step_s: float = 0.0
    exposed_s: float = 0.0
    """Mean seconds of a step, and the part of it that waited for communication."""
    waiting_on: str = ""
    waiting_s: float = 0.0
    store_epoch: int = 0
    bytes_held: int = 0
    backup: str = ""
    """Which ps has a copy of all that a ps acknowledges, or what is lacking for that; empty: none is wanted."""
    units_held: int = 0
    skipped: int = 0
    """Updates skipped because of NaN or Inf."""
    heartbeat_age_s: float = 0.0
    suspicion: float = 0.0
    """How unlikely so long a silence is, by the heartbeats before: one in 10 to the power of this."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    measures: dict[str, float] = dataclasses.field(default_factory=dict)
    """What the process has measured, by the names of ``stratagem/measuring/measures.py``; if it was asked for."""
    earlier: dict[str, float] = dataclasses.field(default_factory=dict)
    window_s: float = 0.0
    measures_age_s: float = 0.0
    """The same ``window_s`` seconds before, and seconds since the newer ones came."""
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    """Words about lanes: which and why."""

    @functools.cached_property
    def recent(self) -> dict[str, float]:
        """What it has measured in ``window_s``; gauges as they are."""
        return measures.since(self.measures, self.earlier)

    @property
    def state_words(self) -> str:
        """The state, of a task that is live and much later than usual with its heartbeat that it is slow."""
        is_slow = self.state == "live" and self.suspicion >= SLOW_PHI
        return f"slow, silent {self.heartbeat_age_s:.1f} s" if is_slow else self.state


@dataclasses.dataclass(frozen=True)
class StatusView:
    tasks: tuple[TaskState, ...] = ()
    chief_epoch: int = 0
    ready: bool = False
    lead: str = ""
    epoch: int = 0
    units_accepted: int = 0
    units_planned: int = 0
    """Units of the newest open epoch."""
    examples: int = 0
    """Examples in accepted units since the job started."""
    checkpoint: str = ""
    updates_lost: int = 0
    waiting_for: tuple[str, ...] = ()
    stop_reason: str = ""
    restored: str = ""
    """Path of the checkpoint that the job started from."""
    updates_undone: int = 0
    """Updates of newer checkpoints that were damaged: they are computed again."""
    wanted_workers: int = 0
    wanted_ps: int = 0
    """How many there are to be, once somebody has said so (`stratagem scale`); else 0."""
    num_ps: int = 0
    scaling: str = ""
    """Why there are not as many of them as wanted yet; empty: there are, or tasks are awaited."""
    standby: str = ""
    """The chief that stands by, "process 7 on host-b"; empty: none does."""

    @property
    def units_words(self) -> list[str]:
        """Units accepted and planned, once some are planned."""
        return [f"units {self.units_accepted}/{self.units_planned}"] if self.units_planned else []

    @property
    def workers(self) -> tuple[TaskState, ...]:
        """Of :attr:`tasks`, in their order; an evaluator is none."""
        return tuple(task for task in self.tasks if task.task.startswith("worker:"))

    @property
    def checkpoint_step(self) -> int | None:
        """Of the newest checkpoint, if its name says it."""
        found = re.search(r"step-(\d+)$", self.checkpoint)
        return None if found is None else int(found[1])

    @property
    def exposed(self) -> float:
        """Part of the workers' step time that waited for communication, 0 to 1."""
        step_s = sum(worker.step_s for worker in self.workers)
        return sum(worker.exposed_s for worker in self.workers) / step_s if step_s > 0 else 0.0

    @property
    def loss(self) -> float | None:
        """Newest loss of the lead, else of the first worker that has one."""
        order = sorted(self.workers, key=lambda worker: worker.task != self.lead)
        return next((worker.loss for worker in order if worker.loss is not None), None)


def from_reply(reply: chief_pb2.GetStatusReply) -> StatusView:
    return from_message(StatusView, reply, tasks=tuple(_task(status) for status in reply.tasks))


def _task(status: chief_pb2.TaskStatus) -> TaskState:
    progress = status.progress
    return from_message(
        TaskState,
        progress,
        status,
        status.info,
        loss=progress.loss if progress.has_loss else None,
        measures=dict(status.measures.values),
        earlier=dict(status.earlier.values),
        notes=dict(status.measures.notes),
    )
