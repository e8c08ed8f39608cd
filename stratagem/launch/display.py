"""The screen of a run: a live table on a terminal, plain lines elsewhere; the speed of the job in words."""

from __future__ import annotations

from collections import deque
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stratagem.chief.monitoring.why.verdict import WatchedVerdict
from stratagem.launch.processes import Stream
from stratagem.rpc.status_view import StatusView, TaskState

PLAIN_INTERVAL_S = 5.0
WINDOW_S = 10.0


class JobPace:
    """Examples and units per second over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int, int]] = deque()
        self._restored = ""

    def add(self, now: float, status: StatusView) -> None:
        is_less = bool(self._samples) and status.examples < self._samples[-1][1]
        if is_less or status.restored != self._restored:  # what a checkpoint has was not made in these seconds
            self._samples.clear()
            self._restored = status.restored
        self._samples.append((now, status.examples, status.epoch, status.units_accepted))
        while len(self._samples) > 2 and self._samples[0][0] < now - WINDOW_S:
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
    parts = [f"epoch {status.epoch}", *status.units_words]
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
    waits = f", has waited {task.waiting_s:.0f} s for {task.waiting_on}" if task.waiting_s >= 1 else ""
    step = f" step {task.step}" if task.step else ""  # a chief has none
    return f"{task.task} {task.state_words}{step}{waits}"


class PlainDisplay:
    """Lines as they come; the progress every few seconds when it has changed."""

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._streams: dict[Stream, TextIO] = {"stdout": stdout, "stderr": stderr}
        self._pace = JobPace()
        self._shown_at = float("-inf")
        self._shown: object = None
        self._watched = WatchedVerdict()

    def show(self, stream: Stream, line: str) -> None:
        print(line, file=self._streams[stream], flush=True)

    def update(self, status: StatusView, now: float) -> None:
        self._pace.add(now, status)
        if self._watched.look(status, now) and (off := self._watched.told) is not None:
            self.show("stderr", f"stratagem: {off.sentence} (stratagem why)")
        if now < self._shown_at + PLAIN_INTERVAL_S:
            return
        waiting = [task_words(task) for task in status.tasks if task.state == "lost" or task.waiting_s >= 1]
        news = (status.ready, status.epoch, status.units_accepted, status.waiting_for, status.updates_lost, waiting)
        if news != self._shown:
            self.show("stderr", "stratagem: " + " · ".join([progress_words(status, self._pace), *waiting]))
            self._shown_at, self._shown = now, news

    def close(self) -> None:
        """Nothing to take back."""


class LiveDisplay:
    """The job and a table of its tasks at the foot of the terminal; lines scroll above it."""

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._stdout = stdout
        self._console = Console(file=stderr)
        self._live = Live(console=self._console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False)
        self._pace = JobPace()
        self._watched = WatchedVerdict()

    def show(self, stream: Stream, line: str) -> None:
        """Shows a line above the table; what goes to a stdout that is no terminal goes there untouched."""
        if stream == "stdout" and not self._stdout.isatty():
            print(line, file=self._stdout, flush=True)
        else:
            self._console.print(Text.from_ansi(line))

    def update(self, status: StatusView, now: float) -> None:
        self._pace.add(now, status)
        self._live.start()
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for task in status.tasks:
            table.add_row(Text(task_words(task), style="" if task.state in ("live", "done") else "red"))
        self._watched.look(status, now)
        off = self._watched.told
        lines = [Text(progress_words(status, self._pace), style="bold")]
        lines += [Text(off.sentence, style="yellow")] if off is not None else []
        self._live.update(Group(*lines, table))  # a terminal with fewer rows shows the beginning

    def close(self) -> None:
        """Leaves the last table standing."""
        self._live.stop()


def make_display(stdout: TextIO, stderr: TextIO) -> PlainDisplay | LiveDisplay:
    return LiveDisplay(stdout, stderr) if stderr.isatty() else PlainDisplay(stdout, stderr)
