"""Where the time of a step goes: the whole step, and the part that waited for communication."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from stratagem.rpc.generated import chief_pb2

SMOOTHING = 0.9  # weight of the past in the running means: about the last ten steps


class StepMeter:
    """Counts steps and examples and keeps running means of their times. Thread-safe."""

    def __init__(self) -> None:
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
        self.loss: float | None = None
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
        """Part of all step time so far that waited for communication, 0 to 1."""
        return self.total_exposed_s / self.total_s if self.total_s else 0.0

    def progress(self) -> chief_pb2.Progress:
        """What a heartbeat says."""
        with self._lock:
            waiting = self._waiting_on
            return chief_pb2.Progress(
                step=self.steps,
                examples=self.examples,
                loss=self.loss or 0.0,
                has_loss=self.loss is not None,
                epoch=self.epoch,
                step_s=self._step_s,
                exposed_s=self._exposed_s,
                waiting_on=waiting,
                waiting_s=time.monotonic() - self._waiting_since if waiting else 0.0,
                skipped=self.skipped,
                metrics=dict(self.metrics),
            )
