"""What the page shows of the past: curves and events. Bounded, and pure: time is passed in."""

from __future__ import annotations

import collections
from typing import Any

from stratagem.chief.monitoring.why.verdict import WatchedVerdict
from stratagem.measuring import measures
from stratagem.rpc.status_view import StatusView, TaskState

MAX_POINTS = 600
"""Of a curve: beyond it every second one is left out, so that an hour costs what ten minutes do."""
MAX_HAPPENINGS = 200
COLUMNS = ("at", "examples", "steps", "loss", "ahead", "staleness", "exposed")
"""Of a point: seconds since 1970; examples and steps of all workers since the chief was started; newest loss; how many
steps the fastest worker is ahead, where a staleness bound counts them; the staleness that nine of ten commits do not
exceed; part of the steps that waits, 0 to 1."""

Point = tuple[float | None, ...]


class JobStory:
    """What was seen of a job."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.happenings: collections.deque[dict[str, Any]] = collections.deque(maxlen=MAX_HAPPENINGS)
        """Each with its number, when it was, its text, and its kind: "good", "note" or "bad"."""
        self._num_events = 0
        self._last: StatusView | None = None
        self._done = (0, 0)
        self._watched = WatchedVerdict()

    def add(self, at: float, status: StatusView) -> None:
        """A look at the job, ``at`` so many seconds since 1970; ``status``: with measures."""
        self._done = self._done_by(status)
        self.points.append(point_of(at, status, *self._done))
        if len(self.points) > MAX_POINTS:
            self.points[:] = self.points[::2]
        for kind, text in self._news(at, status):
            self._num_events += 1
            self.happenings.append({"number": self._num_events, "at": at, "kind": kind, "text": text})
        self._last = status

    def _done_by(self, now: StatusView) -> tuple[int, int]:
        """Examples and steps. What a worker did before a new chief heard of it came at no time that this one knows."""
        examples, steps = self._done
        before = {task.task: task for task in (self._last or now).tasks}
        for worker in now.workers:
            then = before.get(worker.task, worker)
            if then.incarnation != worker.incarnation:
                then = TaskState(worker.task, worker.state)
            elif not then.step and now.chief_epoch > 1:
                then = worker
            examples, steps = examples + worker.examples - then.examples, steps + worker.step - then.step
        return examples, steps

    def since(self, number: int) -> list[dict[str, Any]]:
        return [one for one in self.happenings if one["number"] > number]

    def _news(self, at: float, now: StatusView) -> list[tuple[str, str]]:
        last = self._last
        found = []
        if last is None:
            if now.chief_epoch > 1:
                found.append(("note", f"the chief was restarted: its epoch is {now.chief_epoch}"))
            was_ready = now.ready and now.chief_epoch > 1
            last = StatusView(
                ready=was_ready, epoch=now.epoch, checkpoint=now.checkpoint, updates_lost=now.updates_lost
            )
        if now.ready and not last.ready:
            found.append(("good", "the cluster is complete"))
        before = {task.task: task for task in last.tasks}
        for task in now.tasks:
            if task.task in before:
                found += _of_task(before[task.task], task)
        if now.epoch > last.epoch:
            found.append(("good", f"epoch {now.epoch} begins"))
        if now.checkpoint != last.checkpoint:
            found.append(("good", f"checkpoint {now.checkpoint.rpartition('/')[2]}"))
        if now.updates_lost > last.updates_lost:
            found.append(("bad", f"{now.updates_lost - last.updates_lost} updates were lost with a ps"))
        if now.stop_reason and not last.stop_reason:
            found.append(("note", f"the job ends: {now.stop_reason}"))
        if self._watched.look(now, at):
            off = self._watched.told
            found.append(("good", "no problem remains") if off is None else ("bad", off.sentence))
        return found


def _of_task(before: TaskState, now: TaskState) -> list[tuple[str, str]]:
    if now.incarnation > before.incarnation > 0:
        return [("note", f"{now.task} was restarted: incarnation {now.incarnation}")]
    if now.state == before.state:
        return []
    if now.state == "lost":
        return [("bad", f"{now.task} is lost")]
    if now.state == "live" and before.state == "lost":
        return [("good", f"{now.task} is back")]
    return [("good", f"{now.task} is done")] if now.state == "done" else []


def point_of(at: float, status: StatusView, examples: int, steps: int) -> Point:
    """One point of every curve, in the order of :data:`COLUMNS`."""
    workers = status.workers
    clocks = [worker.clock for worker in workers if worker.state == "live" and worker.clock]
    return (
        round(at, 2),
        examples,
        steps,
        status.loss,
        max(clocks) - min(clocks) if clocks else None,
        staleness(status),
        round(status.exposed, 4) if any(worker.step_s > 0 for worker in workers) else None,
    )


def staleness(status: StatusView) -> float | None:
    """What nine of ten of the last commits do not exceed; None: there was none."""
    counts: collections.Counter[str] = collections.Counter()
    for task in status.tasks:
        counts.update(measures.labels(task.recent, measures.STALENESS))
    left = 0.9 * sum(counts.values())
    for bound in measures.STALENESS_BOUNDS if left else ():
        left -= counts[str(bound)]
        if left <= 1e-9:
            return float(bound)
    return 2.0 * measures.STALENESS_BOUNDS[-1] + 1 if left else None
