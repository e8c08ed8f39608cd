"""Where the time of a step goes: the whole step, and the part that waited for communication."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from stratagem.rpc.generated import chief_pb2

SMOOTHING = 0.9  # weight of the past in the running means: about the last ten steps


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
        self._waiting_on = ""
        self._waiting_since = 0.0
        self.newest_loss: torch.Tensor | None = None
        """Read only when somebody asks: reading waits for a GPU."""
        self.epoch = 0
        self.metrics: dict[str, float] = {}

    @contextlib.contextmanager
    def exposed(self, waiting_on: str) -> Iterator[None]:
        """Time spent inside is exposed communication; ``waiting_on`` says on what, for ``stratagem status``."""
        start = time.monotonic()
        with self._lock:
            self._waiting_on, self._waiting_since = waiting_on, start
        try:
            yield
        finally:
            with self._lock:
                self._exposed_now += time.monotonic() - start
                self._waiting_on = ""

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
        with self._lock:
            return {
                "steps": self.steps,
                "examples": self.examples,
                "loss": None if self.newest_loss is None else float(self.newest_loss),
                "metrics": dict(self.metrics),
                "skipped": self.skipped,
                "step_time_s": self.total_s,
                "exposed_communication_s": self.total_exposed_s,
            }

    def progress(self) -> chief_pb2.Progress:
        """What a heartbeat says."""
        with self._lock:
            waiting, loss = self._waiting_on, self.newest_loss
            return chief_pb2.Progress(
                step=self.steps,
                examples=self.examples,
                loss=0.0 if loss is None else float(loss),
                has_loss=loss is not None,
                epoch=self.epoch,
                step_s=self._step_s,
                exposed_s=self._exposed_s,
                waiting_on=waiting,
                waiting_s=time.monotonic() - self._waiting_since if waiting else 0.0,
                skipped=self.skipped,
                metrics=dict(self.metrics),
            )
