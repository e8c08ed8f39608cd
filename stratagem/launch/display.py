"""The screen of a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stratagem.chief.monitoring.why.watched import WatchedVerdict
from stratagem.launch.output import Screen
from stratagem.launch.processes import Stream
from stratagem.launch.progress import JobPace, progress_words, task_words
from stratagem.rpc.status_view import StatusView

PLAIN_INTERVAL_S = 5.0


class Display(Screen, Protocol):
    """Shows the tasks' lines and the progress of the job."""

    def update(self, status: StatusView, now: float) -> None:
        """A new status has come."""

    def close(self) -> None:
        """The run is over; nothing moves any more."""


class PlainDisplay:
    """Lines as they come; the progress every few seconds when it has changed."""

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._streams: dict[Stream, TextIO] = {"stdout": stdout, "stderr": stderr}
        self._pace = JobPace()
        self._shown_at = float("-inf")
        self._shown: object = None
        self._watched = WatchedVerdict()
        self._told: object = None

    def show(self, stream: Stream, line: str) -> None:
        """Writes the line to our stdout or stderr at once."""
        print(line, file=self._streams[stream], flush=True)

    def update(self, status: StatusView, now: float) -> None:
        """Writes the progress if it is time and there is something new."""
        self._pace.add(now, status)
        self._watched.look(status, now)
        self._tell()
        if now < self._shown_at + PLAIN_INTERVAL_S:
            return
        waiting = [task_words(task) for task in status.tasks if task.state == "lost" or task.waiting_s >= 1]
        news = (status.ready, status.epoch, status.units_accepted, status.waiting_for, status.updates_lost, waiting)
        if news != self._shown:
            self.show("stderr", "stratagem: " + " · ".join([progress_words(status, self._pace), *waiting]))
            self._shown_at, self._shown = now, news

    def _tell(self) -> None:
        """Says what is off, once for each cause."""
        off = self._watched.told
        told = None if off is None else (off.cause, off.task)
        if off is not None and told != self._told:
            self.show("stderr", f"stratagem: {off.sentence} (stratagem why)")
        self._told = told

    def close(self) -> None:
        """Nothing to take back."""


class LiveDisplay:
    """One table at the foot of the terminal; lines scroll above it."""

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._stdout = stdout
        self._console = Console(file=stderr)
        self._live = Live(console=self._console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False)
        self._pace = JobPace()
        self._watched = WatchedVerdict()
        self._started = False

    def show(self, stream: Stream, line: str) -> None:
        """Shows a line above the table; what goes to a stdout that is no terminal goes there untouched."""
        if stream == "stdout" and not self._stdout.isatty():
            print(line, file=self._stdout, flush=True)
        else:
            self._console.print(Text.from_ansi(line))

    def update(self, status: StatusView, now: float) -> None:
        self._pace.add(now, status)
        if not self._started:
            self._live.start()
            self._started = True
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for task in status.tasks:
            table.add_row(Text(task_words(task), style="" if task.state in ("live", "done") else "red"))
        self._watched.look(status, now)
        off = self._watched.told
        lines = [Text(progress_words(status, self._pace), style="bold")]
        lines += [Text(off.sentence, style="yellow")] if off is not None else []
        self._live.update(Group(table, *lines))

    def close(self) -> None:
        """Leaves the last table standing."""
        if self._started:
            self._live.stop()


def make_display(stdout: TextIO, stderr: TextIO) -> Display:
    """The display that fits stderr."""
    return LiveDisplay(stdout, stderr) if stderr.isatty() else PlainDisplay(stdout, stderr)
