"""What a process adds up while it works, and its flight recorder: the last collectives and commits always, and every
span while somebody traces."""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from stratagem.measuring import measures

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

NUM_KEPT = 512
"""Collectives and commits."""
NUM_TOLD = 8
"""Of them in the log when one fails."""
MAX_SPANS = 30_000
"""Of a trace: what comes after them is dropped and counted."""
WAIT_S = 8.0
"""Seconds that the end of a trace waits for the end of a step."""


class TracedSpan:
    """Something that took a while, in nanoseconds of ``time.perf_counter_ns``."""

    __slots__ = ("end_ns", "name", "of", "start_ns", "thread")

    def __init__(self, name: str, of: object, thread: str, start_ns: int, end_ns: int = 0) -> None:
        self.name, self.of, self.thread, self.start_ns, self.end_ns = name, of, thread, start_ns, end_ns

    @property
    def words(self) -> str:
        return self.name if self.of is None else f"{self.name} {self.of}".strip()

    def line(self, now_ns: int) -> str:
        ago = (now_ns - self.start_ns) / 1e9
        took = f"took {(self.end_ns - self.start_ns) / 1e6:.1f} ms" if self.end_ns else "in progress"
        return f"{ago:.3f} s ago, {took}: {self.words}"


class TorchProfile:
    """Torch's operators in one trace. ``torch.profiler`` sees the thread that starts it, and the backward passes of
    that thread: the one that trains, which starts and stops it between two steps."""

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None
        self._is_over = threading.Event()
        self._has_stopped = threading.Event()
        self._offset_ns = 0
        self._spans: list[TracedSpan] = []
        self._num_dropped = 0

    def at_step(self) -> None:
        """Called by the training thread as a step begins."""
        if self.has_stopped:
            return
        import torch  # here alone: tasks without it have a recorder too

        if self._is_over.is_set():
            if self._profile is not None:
                self._profile.stop()
                self._collect(self._profile)
            else:
                logger.warning("A trace has no operators: no step began, or the script's own torch.profiler recorded")
            self._has_stopped.set()
        elif self._profile is None and not torch._C._autograd._profiler_enabled():  # a script's own would find nothing
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profile.start()
            self._offset_ns = time.time_ns() - time.perf_counter_ns()

    @property
    def has_stopped(self) -> bool:
        """It needs no further step: one that is longer than the wait for its end goes on to its own."""
        return self._has_stopped.is_set()

    def end(self) -> tuple[list[TracedSpan], int]:
        """Operators, and how many more there were; none if no step ended in time."""
        self._is_over.set()
        self._has_stopped.wait(WAIT_S)
        return self._spans, self._num_dropped

    def _collect(self, profile: torch.profiler.profile) -> None:
        results = profile.profiler.kineto_results if profile.profiler is not None else None
        for event in results.events() if results is not None else ():
            if len(self._spans) >= MAX_SPANS:
                self._num_dropped += 1
                continue
            start_ns = event.start_ns() - self._offset_ns
            thread = f"torch, thread {event.start_thread_id()}"
            self._spans.append(TracedSpan(event.name(), None, thread, start_ns, start_ns + event.duration_ns()))


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a trace has found."""

    spans: list[TracedSpan]
    spent: dict[str, float]
    num_dropped: int
    operators: list[TracedSpan]
    """Of torch."""


class FlightRecorder:
    """Of this process. Thread-safe; a happening costs about a microsecond."""

    def __init__(self) -> None:
        self.kept: collections.deque[TracedSpan] = collections.deque(maxlen=NUM_KEPT)
        """The last collectives and commits that have begun."""
        self._lock = threading.Lock()
        self._spans: list[TracedSpan] | None = None
        self.traces = False
        """Whether somebody wants every span."""
        self._num_dropped = 0
        self._before: Mapping[str, float] = {}
        self.values: Callable[[], Mapping[str, float]] = dict
        """What the process has measured so far."""
        self.num_steps: Callable[[], int] = int
        """Steps that it has completed, if it is a worker."""
        self.torch: TorchProfile | None = None
        """What the training thread has to tell of a step that begins: of the last trace with torch's operators."""
        self._profile: TorchProfile | None = None
        """The same, of the trace that goes on."""

    def happening(self, name: str, of: object) -> Happening:
        """A context around a collective or a commit: what is done (``name``), and ``of`` what, made words of when
        somebody asks, the same ones on every task that has part in it."""
        return Happening(self, name, of)

    def span(self, name: str, start_ns: int, end_ns: int, track: str = "") -> None:
        """Notes a span while somebody traces; ``track``: where it is shown, else at the thread that notes it."""
        self._trace(TracedSpan(name, None, track or threading.current_thread().name, start_ns, end_ns))

    def lines(self, num: int = NUM_KEPT) -> list[str]:
        """The last collectives and commits, oldest first."""
        now = time.perf_counter_ns()
        return [span.line(now) for span in [*self.kept][-num:]]

    def tell(self, logger: logging.Logger) -> None:
        """The last few as an error of the log: one has failed, and nobody makes it again."""
        for line in ("the last collectives and commits here:", *self.lines(NUM_TOLD)):
            logger.error("%s", line)  # a record has one line

    def start_trace(self, profile: TorchProfile | None = None) -> None:
        """Every span is kept from now on, with torch's operators if there is a ``profile``; nothing changes where they
        are kept already."""
        with self._lock:
            if self._spans is None:
                self._before, self._num_dropped, self._spans = dict(self.values()), 0, []
                if self.torch is None or self.torch.has_stopped:
                    self.torch = self._profile = profile
                self.traces = True

    def stop_trace(self) -> Traced:
        """What was kept since :meth:`start_trace`."""
        with self._lock:
            after = dict(self.values())  # ends the spans that go on
            spans, self._spans = self._spans or [], None
            self.traces = False
            profile, self._profile, num_dropped = self._profile, None, self._num_dropped
        operators, more = profile.end() if profile is not None else ([], 0)
        return Traced(spans, measures.since(after, self._before), num_dropped + more, operators)

    def _trace(self, span: TracedSpan) -> None:
        spans = self._spans
        if spans is not None:
            if len(spans) < MAX_SPANS:
                spans.append(span)
            else:
                self._num_dropped += 1


class Happening(TracedSpan):
    """See :meth:`FlightRecorder.happening`."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: FlightRecorder, name: str, of: object) -> None:
        self.name, self.of, self.thread, self.end_ns = name, of, "", 0
        self._recorder = recorder

    def __enter__(self) -> None:
        self.start_ns = time.perf_counter_ns()
        self._recorder.kept.append(self)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end_ns = time.perf_counter_ns()
        if error is not None:
            self.name = f"{type(error).__name__} in {self.name}".rstrip()
        if self._recorder.traces:
            self.thread = threading.current_thread().name
            self._recorder._trace(self)


FLIGHT = FlightRecorder()
"""Of this process."""


class RunningTotals:
    """Numbers by name. Thread-safe; an addition costs about a third of a microsecond."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: collections.defaultdict[str, float] = collections.defaultdict(float)

    def add(self, name: str, amount: float) -> None:
        with self._lock:
            self._totals[name] += amount

    def add_span(self, name: str, start_ns: int) -> None:
        """Adds the seconds since ``start_ns`` of ``time.perf_counter_ns``."""
        now = time.perf_counter_ns()
        with self._lock:
            self._totals[name] += (now - start_ns) / 1e9
        if FLIGHT.traces:
            FLIGHT.span(name, start_ns, now)

    def timed(self, name: str) -> Timed:
        """A context whose time is added."""
        return Timed(self, name)

    def values(self) -> dict[str, float]:
        with self._lock:
            return dict(self._totals)


class Timed:
    """See :meth:`RunningTotals.timed`."""

    __slots__ = ("_name", "_start", "_totals")

    def __init__(self, totals: RunningTotals, name: str) -> None:
        self._totals, self._name = totals, name

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self._totals.add_span(self._name, self._start)
