"""Where the time of a step goes: the whole step, and the part that waited for communication."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stratagem.rpc.generated import chief_pb2

SMOOTHING = 0.9  # weight of the past in the running means: about the last ten steps


WaitingOn = str | Callable[[], str]


@dataclasses.dataclass(frozen=True)
class _Wait:
    what: WaitingOn
    since: float
    step: int

    def told(self) -> tuple[str, float]:
        """In words, and for how many seconds."""
        return self.what if isinstance(self.what, str) else self.what(), time.monotonic() - self.since


_active: StepMeter | None = None


def active_meter() -> StepMeter | None:
    """The meter of the newest strategy in this process."""
    return _active


class StepMeter:
    """Counts steps and examples and keeps running means of their times. Thread-safe. The newest is the active one."""

    def __init__(self) -> None:
        global _active
        _active = self
        self._lock = threading.Lock()
        self.steps = 0
        self.examples = 0
        self.skipped = 0
        self.total_s = 0.0
        self.total_exposed_s = 0.0
        self._step_s = 0.0
        self._exposed_s = 0.0
        self._exposed_now = 0.0
        self._last_end: float | None = None
        self._wait: _Wait | None = None
        self.peer: Callable[[], tuple[str, float] | None] = lambda: None
        """Who a collective waits for at this moment, and since how many seconds, where somebody knows it."""
        self.newest_loss: torch.Tensor | None = None
        """Read only when somebody asks: reading waits for a GPU."""
        self.epoch = 0
        self.metrics: dict[str, float] = {}

    @contextlib.contextmanager
    def exposed(self, waiting_on: WaitingOn, step: int = 0) -> Iterator[None]:
        """Time spent inside is exposed communication.

        Args:
            waiting_on: on what, for ``stratagem status``: words, or what gives them while it waits, from any thread.
            step: of the job, if it waits until that is applied (staleness 0).
        """
        start = time.monotonic()
        with self._lock:
            outer, self._wait = self._wait, _Wait(waiting_on, start, step)
        try:
            yield
        finally:
            with self._lock:
                self._wait = outer
                if outer is None:
                    self._exposed_now += time.monotonic() - start

    def start_clock(self) -> None:
        """The next step is counted from now on (a loop begins)."""
        with self._lock:
            self._last_end = time.monotonic()
            self._exposed_now = 0.0

    def step_done(self, examples: int) -> None:
        """A step ended; the next one begins."""
        now = time.monotonic()
        with self._lock:
            self.steps += 1
            self.examples += examples
            if self._last_end is not None:
                step_s, exposed_s = now - self._last_end, min(self._exposed_now, now - self._last_end)
                self.total_s += step_s
                self.total_exposed_s += exposed_s
                keep = SMOOTHING if self._step_s else 0.0
                self._step_s = keep * self._step_s + (1 - keep) * step_s
                self._exposed_s = keep * self._exposed_s + (1 - keep) * exposed_s
            self._last_end, self._exposed_now = now, 0.0

    @property
    def exposed_fraction(self) -> float:
        """Part of the last steps' time that waited for communication, 0 to 1 (running mean of about ten steps)."""
        return self._exposed_s / self._step_s if self._step_s else 0.0

    def report(self) -> dict[str, Any]:
        """What this process did, for ``stratagem run --summary``: counts, newest loss and metrics, seconds."""
        loss = self._read_loss()
        with self._lock:
            return {
                "steps": self.steps,
                "examples": self.examples,
                "loss": loss,
                "metrics": dict(self.metrics),
                "skipped": self.skipped,
                "step_time_s": self.total_s,
                "exposed_communication_s": self.total_exposed_s,
            }

    def progress(self) -> chief_pb2.Progress:
        """What a heartbeat says."""
        loss, wait = self._read_loss(), self._wait
        waiting_on, waiting_s = self.peer() or (("", 0.0) if wait is None else wait.told())
        with self._lock:
            return chief_pb2.Progress(
                step=self.steps,
                examples=self.examples,
                loss=loss or 0.0,
                has_loss=loss is not None,
                epoch=self.epoch,
                step_s=self._step_s,
                exposed_s=self._exposed_s,
                waiting_on=waiting_on,
                waiting_s=waiting_s,
                waiting_step=wait.step if wait is not None else 0,
                skipped=self.skipped,
                metrics=dict(self.metrics),
            )

    def _read_loss(self) -> float | None:
        """Not under the lock: a GPU may take a while, and the training must not wait for whoever asks."""
        loss = self.newest_loss
        return None if loss is None else float(loss)
