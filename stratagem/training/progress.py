"""Progress of training: a bar on the lead's terminal, plain lines without a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TimeRemainingColumn

from stratagem.errors import ConfigurationError
from stratagem.training.callbacks.base import Callback, LogsArgument

REFRESH_S = 0.1
LINE_S = 10.0
REPORT_S = 1.0

Verbose = Literal["auto"] | bool | int


class Pace(Callback):
    """Counts examples a second of the epoch, and tells the strategy of loss and metrics, for ``stratagem status``. What
    was trained before the job was resumed in the epoch took none of its time, and validation trains nothing."""

    def __init__(self) -> None:
        self._start = self._reported = self._test_start = 0.0
        self._steps_before = self._examples_before = 0

    def on_epoch_begin(self, epoch: int, logs: LogsArgument = None) -> None:
        self._start = self._reported = time.monotonic()
        self._steps_before, self._examples_before = self.model.step_in_epoch, self.model.examples_in_epoch

    def on_test_begin(self, logs: LogsArgument = None) -> None:
        self._test_start = time.monotonic()

    def on_test_end(self, logs: LogsArgument = None) -> None:
        self._start += time.monotonic() - self._test_start

    def on_train_batch_end(self, batch: int, logs: LogsArgument = None) -> None:
        now = time.monotonic()
        if now - self._reported >= REPORT_S and logs is not None:
            self._reported = now
            self.model.strategy.report(**logs)

    def on_epoch_end(self, epoch: int, logs: LogsArgument = None) -> None:
        # Under parameter servers the others may have taken all batches of an epoch: there are no numbers then.
        self.model.strategy.report(**{name: value for name, value in (logs or {}).items() if not math.isnan(value)})

    @property
    def _seconds(self) -> float:
        """That it trained in the epoch."""
        return max(time.monotonic() - self._start, 1e-9)

    @property
    def speed(self) -> str:
        return f"{(self.model.examples_in_epoch - self._examples_before) / self._seconds:,.0f} examples/s"

    def left_s(self, steps: int) -> float | None:
        """Seconds until the epoch has so many steps; None: it has, or has made none by which to know."""
        done = self.model.step_in_epoch
        made = done - self._steps_before
        return self._seconds / made * (steps - done) if made and done < steps else None


class PlainLines(Callback):
    """A line for each epoch, and for every ten seconds of a long one."""

    def __init__(self, stream: TextIO, pace: Pace) -> None:
        self._stream = stream
        self._pace = pace
        self._shown = 0.0

    def on_epoch_begin(self, epoch: int, logs: LogsArgument = None) -> None:
        self._shown = time.monotonic()
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: LogsArgument = None) -> None:
        now = time.monotonic()
        if now - self._shown >= LINE_S:
            self._shown = now
            self._show(self._epoch, logs or {})

    def on_epoch_end(self, epoch: int, logs: LogsArgument = None) -> None:
        self._show(epoch, logs or {})

    def _show(self, epoch: int, logs: Mapping[str, float]) -> None:
        model, steps = self.model, self.params["steps"]
        done = f"step {model.step_in_epoch}" + (f"/{steps}" if steps else "")
        words = [f"epoch {epoch + 1}/{self.params['epochs']}", done, numbers(logs), self._pace.speed]
        if steps and (left_s := self._pace.left_s(steps)) is not None:
            words.append(f"{left_s:.0f} s left")
        print("  ".join(words), file=self._stream, flush=True)


class Bar(Callback):
    """A bar for each epoch, on a terminal; drawn by the training itself, a few times a second. It stays when the epoch
    is over, as a line: what is drawn again and again has to fit on the terminal."""

    def __init__(self, stream: TextIO, pace: Pace) -> None:
        self._console = Console(file=stream)
        self._progress = Progress(console=self._console)
        self._pace = pace
        self._task: TaskID | None = None
        self._drawn = 0.0

    def on_epoch_begin(self, epoch: int, logs: LogsArgument = None) -> None:
        columns = ("{task.description}", BarColumn(), "{task.fields[steps]}", "{task.fields[logs]}")
        self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console, auto_refresh=False)
        self._progress.start()
        words = f"epoch {epoch + 1}/{self.params['epochs']}"
        self._task = self._progress.add_task(words, total=self.params["steps"], steps="", logs="")
        self._draw({})

    def on_train_batch_end(self, batch: int, logs: LogsArgument = None) -> None:
        if time.monotonic() - self._drawn >= REFRESH_S:
            self._draw(logs or {})

    def on_epoch_end(self, epoch: int, logs: LogsArgument = None) -> None:
        self._draw(logs or {}, total=self.model.step_in_epoch or 1)
        self._progress.stop()

    def on_train_end(self, logs: LogsArgument = None) -> None:
        self._progress.stop()

    on_train_interrupted = on_train_end

    def _draw(self, logs: Mapping[str, float], total: float | None = None) -> None:
        assert self._task is not None
        step, steps = self.model.step_in_epoch, self.params["steps"]
        self._progress.update(
            self._task,
            completed=step,
            total=total or steps,
            steps=f"{step}/{steps}" if steps else str(step),
            logs=f"{numbers(logs)}  {self._pace.speed}" if logs else "",
        )
        self._progress.refresh()
        self._drawn = time.monotonic()


def display(verbose: Verbose, is_lead: bool, pace: Pace, stream: TextIO | None = None) -> list[Callback]:
    """What shows the progress of this process. ``verbose``: 0: nothing; 1: a bar on a terminal; 2: plain lines; "auto":
    a bar on a terminal, else plain lines."""
    if verbose not in ("auto", 0, 1, 2):
        raise ConfigurationError(f"expected verbose 'auto', 0, 1 or 2, got {verbose!r}")
    stream = stream or sys.stderr
    if not verbose or not is_lead:
        return []
    return [Bar(stream, pace) if verbose != 2 and stream.isatty() else PlainLines(stream, pace)]


def numbers(logs: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in logs.items())
