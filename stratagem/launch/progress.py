"""How fast the job goes and when the epoch will be over, in words. Pure; time is passed in."""

from __future__ import annotations

from collections import deque

from stratagem.rpc.status_view import StatusView, TaskState

WINDOW_S = 10.0


class JobPace:
    """Examples and units per second over the last seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int, int, int]] = deque()

    def add(self, now: float, status: StatusView) -> None:
        if self._samples and (status.examples < self._samples[-1][1]):
            self._samples.clear()
        self._samples.append((now, status.examples, status.epoch, status.units_accepted))
        while len(self._samples) > 2 and self._samples[0][0] < now - self._window_s:
            self._samples.popleft()

    @property
    def examples_per_s(self) -> float:
        """Accepted examples per second; 0 while it is not known."""
        if len(self._samples) < 2:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        return (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else 0.0

    def eta_s(self, status: StatusView) -> float | None:
        """Seconds until the epoch in progress is closed; None while it is not known."""
        same = [sample for sample in self._samples if sample[2] == status.epoch]
        if len(same) < 2 or same[-1][3] <= same[0][3]:
            return None
        units_per_s = (same[-1][3] - same[0][3]) / (same[-1][0] - same[0][0])
        return (status.units_planned - status.units_accepted) / units_per_s


def progress_words(status: StatusView, pace: JobPace) -> str:
    """The job in one line: epoch, units, loss, examples/s, ETA of the epoch, exposed communication."""
    if not status.ready:
        return f"waiting for the cluster: {', '.join(status.waiting_for) or 'the tasks to join'}"
    parts = [f"epoch {status.epoch}", f"units {status.units_accepted}/{status.units_planned}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if pace.examples_per_s > 0:
        parts.append(f"{pace.examples_per_s:.0f} examples/s")
    if (eta_s := pace.eta_s(status)) is not None:
        parts.append(f"epoch ends in {eta_s:.0f} s")
    if any(worker.step_s > 0 for worker in status.workers):
        parts.append(f"exposed communication {status.exposed:.0%}")
    if status.updates_lost:
        parts.append(f"updates lost {status.updates_lost}")
    return " · ".join(parts)


def task_words(task: TaskState) -> str:
    """A task in a few words: ``worker:0 live step 12``; whom it waits for when that takes a second or more."""
    waits = f", waits for {task.waiting_on} since {task.waiting_s:.0f} s" if task.waiting_s >= 1 else ""
    step = f" step {task.step}" if task.step else ""  # a chief has none
    return f"{task.task} {task.state_words}{step}{waits}"
