"""The reading of a running job: from what its chief says now. Pure, no I/O."""

from __future__ import annotations

from stratagem.chief.monitoring.why.reading import Reading, TaskReading
from stratagem.measuring import measures
from stratagem.rpc.status_view import StatusView, TaskState


def reading_of(status: StatusView) -> Reading:
    return Reading(tuple(_task(task) for task in status.tasks))


def _task(task: TaskState) -> TaskReading:
    values, window_s = measures.since(task.measures, task.earlier), task.window_s
    if not window_s:  # it has spoken once so far: since it began
        window_s = sum(task.measures.get(phase, 0.0) for phase in measures.PHASES)
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
