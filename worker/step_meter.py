"""Where the time of a step goes: every moment belongs to one phase, and some phases are exposed communication."""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from stratagem.measuring import measures
from stratagem.measuring.flight import FLIGHT
from stratagem.measuring.measures import labelled
from stratagem.measuring.process_use import ThreadWaits

_COMPUTING = frozenset(measures.COMPUTING)
CPU_EVERY_NS = 100_000_000
"""Between two steps whose CPU time is asked for: on a busy machine the kernel takes 13 µs to say it. The steps between
are like the one that follows them."""
SMOOTHING = 0.9  # weight of the past in the running means: about the last ten steps
MAX_NOTED = 64
"""Changes of phase that are counted at once. Where what computes between them empties the caches, each would cost
several times as much by itself."""

MAX_REPORTED_BYTES = 32 << 10
"""Of reported numbers that a heartbeat tells, names included: the chief ends a session for more than 64 KiB of all."""

WaitingOn = str | Callable[[], str]
_now = time.perf_counter_ns


_active: StepMeter | None = None


def active_meter() -> StepMeter | None:
    """The meter of the newest strategy in this process."""
    return _active


def timed_phase(phase: str) -> AbstractContextManager[None]:
    """Time spent inside belongs to a phase of the steps of this process, if a strategy counts them."""
    return nullcontext() if _active is None else _active.within(phase)


class StepMeter:
    """Counts steps and examples and the time of each phase. Thread-safe. The newest is the active one.

    A step is data, then the script's own computing: forward until a backward begins, and the rest from the optimizer's
    step on. Everything else is marked where it happens, by :meth:`exposed` and :meth:`within`, and subtracted from what
    it interrupts. So the phases of a step add up to its time. A change of phase is noted with its time, without a lock,
    and counted with others when there are many, or on request.
    """

    def __init__(self) -> None:
        global _active
        _active = self
        self._lock = threading.Lock()
        self._noted: collections.deque[_Noted] = collections.deque()
        self._note = self._noted.append
        self.steps = 0
        self._steps_of_others = 0
        self.examples = 0
        self.skipped = 0
        self._total_s = 0.0
        self._total_exposed_s = 0.0
        self._step_s = 0.0
        self._exposed_s = 0.0
        self._last_end: int | None = None
        self._exposed_then = 0
        self._phase = measures.OUTSIDE
        self._since = _now()
        self._spent = dict.fromkeys(measures.PHASES, 0)
        self._by_peer: dict[str, int] = {}
        self._of_peer: _Inside | None = None  # the wait for a peer that goes on
        self._cpu_then: int | None = None
        self._cpu_asked, self._cpu_steps, self._num_unasked, self._waited_then = 0, 1, 0, 0
        self._cpu = {measures.DATA_CPU: 0, measures.STEP_CPU: 0}
        self._without_core = ThreadWaits()
        self._wait: _Inside | None = None
        self.peer: Callable[[], tuple[str, float] | None] = lambda: None
        """Who a collective waits for at this moment, and since how many seconds, where somebody knows it."""
        self.newest_loss: torch.Tensor | None = None
        """Read only when somebody asks: reading waits for a GPU."""
        self.epoch = 0
        self.metrics: dict[str, float] = {}
        self.in_step = False
        """Whether each step waits for those of the other workers."""
        self.loader_workers: int | None = None
        """Processes of the newest DataLoader."""

    def exposed(
        self, waiting_on: WaitingOn, step: int = 0, phase: str = measures.WAIT, peer: str = ""
    ) -> AbstractContextManager[None]:
        """Time spent inside is exposed communication.

        Args:
            waiting_on: on what, for ``stratagem status``: words, or what gives them while it waits, from any thread.
            step: of the job, if it waits until that is applied (staleness 0).
            phase: which of :data:`stratagem.measuring.measures.COMMUNICATION`.
            peer: the task that it waits for, where it is one.
        """
        return _Inside(self, phase, peer, waiting_on, step)

    def within(self, phase: str, peer: str = "") -> AbstractContextManager[None]:
        """Time spent inside belongs to a phase; what the task waits for stays as it was told."""
        return _Inside(self, phase, peer, "", 0)

    def computes(self, phase: str, after: str = "") -> None:
        """The script goes over to another phase of its computing; nothing changes while it does something else.
        ``phase``: one of :data:`stratagem.measuring.measures.COMPUTING`; ``after``: the only one that it may follow."""
        self._note((_now(), phase, after))
        if len(self._noted) > MAX_NOTED:
            self._count_soon()

    def start_clock(self) -> None:
        """The next step is counted from now on: a loop begins, and asks for its first batch."""
        with self._lock:
            self._without_core.start()
            self._last_end = self._count_until_now(measures.DATA_WAIT)
            self._exposed_then = self._communicated()
            self._begin_step(self._last_end)

    def got_data(self) -> None:
        """The script is about to get its batch."""
        if FLIGHT.torch is not None:
            FLIGHT.torch.at_step()
        self._note((_now(), measures.FORWARD, None))
        if self._cpu_then is not None:
            with self._lock:
                self._count()
                waited = self._spent[measures.DATA_WAIT]
            self._cpu_then = self._note_cpu(measures.DATA_CPU, self._cpu_then, waited - self._waited_then)
            self._waited_then = waited

    def wants_data(self) -> None:
        """The script asked for the next batch."""
        now = _now()
        self._note((now, measures.DATA_WAIT, None))
        if self._cpu_then is not None:
            self._note_cpu(measures.STEP_CPU, self._cpu_then)
            self._cpu_then = None
        self._begin_step(now)

    def stop_clock(self) -> None:
        """The loop is over."""
        with self._lock:
            self._without_core.stop()
            self._count_until_now(measures.OUTSIDE)
            if self._last_end is not None:  # no step follows the last one
                if self._cpu_then is not None:
                    self._num_unasked, self._cpu_asked = self._num_unasked + self._cpu_steps, 0
                self._num_unasked = max(0, self._num_unasked - 1)
            self._last_end = self._cpu_then = None

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has made its step since the script got its batch, and no backward has begun since."""
        with self._lock:
            self._count()
            return self._phase == measures.SCRIPT

    def step_done(self, examples: int) -> None:
        """A step ended; the next one begins."""
        self.steps += 1
        self.examples += examples
        self._note((_now(), "", None))
        if len(self._noted) > MAX_NOTED:
            self._count_soon()

    def take_over(self, steps: int) -> None:
        """A newcomer counts on from the others' steps; its phases have taken no time for those."""
        self.steps = self._steps_of_others = steps

    def _count_soon(self) -> None:
        """Unless another thread does so, or this one, which a destructor has interrupted."""
        if self._lock.acquire(blocking=False):
            try:
                self._count()
            finally:
                self._lock.release()

    def _count_until_now(self, phase: str = "") -> int:
        """What was noted, and the phase that goes on or gives way to another. Returns the time. With the lock held."""
        self._count()
        return self._go_over(_now(), phase or self._phase)

    def _count(self) -> None:
        """What was noted. With the lock held."""
        noted, go_over = self._noted, self._go_over
        while noted:
            now, phase, of = noted.popleft()
            if of is None:
                if phase:
                    go_over(now, phase)
                else:
                    self._end_step(now)
            elif isinstance(of, str):
                if self._phase in _COMPUTING and of in ("", self._phase):
                    go_over(now, phase)
            elif phase:
                of.before, of.outer = self._phase, self._wait
                of.since = go_over(now, phase)
                if of.peer:
                    self._of_peer = of
                if of.waiting_on:
                    self._wait = of
            else:
                now = go_over(now, of.before)
                self._wait = of.outer
                if of.peer:
                    self._by_peer[of.peer] = self._by_peer.get(of.peer, 0) + now - of.since
                    self._of_peer = None

    def _go_over(self, now: int, phase: str) -> int:
        """To another phase. Returns since when it is."""
        before, since = self._phase, self._since
        self._phase = phase
        if now <= since:  # it was noted by one thread while another counted
            return since
        if FLIGHT.traces:
            FLIGHT.span(before, since, now, "steps")
        self._spent[before] += now - since
        self._since = now
        return now

    def _end_step(self, now: int) -> None:
        was_busy = self._phase in _COMPUTING or self._phase == measures.OUTSIDE
        now = self._go_over(now, measures.FORWARD if was_busy else self._phase)
        if self._last_end is not None:
            step_s, exposed_s = (now - self._last_end) / 1e9, (self._communicated() - self._exposed_then) / 1e9
            self._total_s += step_s
            self._total_exposed_s += exposed_s
            keep = SMOOTHING if self._step_s else 0.0
            self._step_s = keep * self._step_s + (1 - keep) * step_s
            self._exposed_s = keep * self._exposed_s + (1 - keep) * exposed_s
        self._last_end, self._exposed_then = now, self._communicated()

    def _communicated(self) -> int:
        return sum([self._spent[phase] for phase in measures.COMMUNICATION])

    def _begin_step(self, now: int) -> None:
        """Asks for its CPU time, also in the stead of the steps since the last one, if that was long ago."""
        self._num_unasked += 1
        if now - self._cpu_asked >= CPU_EVERY_NS:
            self._cpu_asked, self._cpu_then = now, time.thread_time_ns()
            self._cpu_steps, self._num_unasked = self._num_unasked, 0

    def _note_cpu(self, of: str, since: int, most: int | None = None) -> int:
        now = time.thread_time_ns()
        ran = self._cpu_steps * max(0, now - since)  # another thread may iterate now
        # The first step of a loop, which starts readers, is not like the others.
        self._cpu[of] += ran if most is None else min(ran, most)
        return now

    @property
    def exposed_fraction(self) -> float:
        """Part of the last steps' time that waited for communication, 0 to 1 (running mean of about ten steps)."""
        with self._lock:
            self._count()
            return self._exposed_s / self._step_s if self._step_s else 0.0

    def values(self) -> dict[str, float]:
        """What the steps took so far, by the names of :mod:`stratagem.measuring.measures`; the phase that goes on
        included."""
        with self._lock:
            now, by_peer = self._count_until_now(), self._by_peer
            if (wait := self._of_peer) is not None:
                by_peer = by_peer | {wait.peer: by_peer.get(wait.peer, 0) + now - wait.since}
            found = {phase: spent / 1e9 for phase, spent in self._spent.items() if spent}
            found |= {labelled(measures.PEER_WAIT, peer): spent / 1e9 for peer, spent in by_peer.items()}
            found |= {name: spent / 1e9 for name, spent in self._cpu.items()}
            found[measures.STEPS] = float(self.steps - self._steps_of_others)
            found[measures.STARVED_MAIN] = self._without_core.waited_ns / 1e9
        found[measures.IN_STEP] = float(self.in_step)
        found[measures.THREADS] = float(torch.get_num_threads())
        if self.loader_workers is not None:
            found[measures.LOADER_WORKERS] = float(self.loader_workers)
        return found

    def report(self) -> dict[str, Any]:
        """What this process did, for ``stratagem run --summary``: counts, newest loss and metrics, seconds."""
        loss, values = self._read_loss(), self.values()
        with self._lock:
            return {
                "steps": self.steps,
                "examples": self.examples,
                "loss": loss,
                "metrics": dict(self.metrics),
                "skipped": self.skipped,
                "step_time_s": self._total_s,
                "exposed_communication_s": self._total_exposed_s,
                "measures": values,
            }

    def progress(self) -> dict[str, Any]:
        """What a heartbeat says: fields of ``Progress``."""
        loss = self._read_loss()
        with self._lock:
            self._count()
            wait = self._wait
        waiting_on, waiting_s = self.peer() or (("", 0.0) if wait is None else wait.told())
        with self._lock:
            return dict(
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
                metrics=_first(dict(self.metrics), MAX_REPORTED_BYTES),
            )

    def _read_loss(self) -> float | None:
        """Of ``reduce_mean``, else the one that was reported, as ``fit`` does. Not under the lock: a GPU may take a
        while, and the training must not wait for whoever asks."""
        loss = self.metrics.get("loss") if self.newest_loss is None else self.newest_loss
        return None if loss is None else float(loss)


def _first(metrics: dict[str, float], num_bytes: int) -> dict[str, float]:
    """The first ones, in a message of so many bytes."""
    ends = itertools.accumulate(len(name.encode()) + 16 for name in metrics)
    return {name: value for (name, value), end in zip(metrics.items(), ends, strict=True) if end <= num_bytes}


class _Inside:
    """A phase, entered and left. Not a generator: there are several a step."""

    __slots__ = ("_meter", "_phase", "before", "outer", "peer", "since", "step", "waiting_on")

    before: str
    outer: _Inside | None
    since: int

    def __init__(self, meter: StepMeter, phase: str, peer: str, waiting_on: WaitingOn, step: int) -> None:
        self._meter, self._phase, self.peer, self.waiting_on, self.step = meter, phase, peer, waiting_on, step

    def __enter__(self) -> None:
        self._meter._note((_now(), self._phase, self))

    def __exit__(self, *_: object) -> None:
        meter = self._meter
        meter._note((_now(), "", self))
        if len(meter._noted) > MAX_NOTED:
            meter._count_soon()

    def told(self) -> tuple[str, float]:
        """What it waits for, in words, and for how many seconds."""
        what = self.waiting_on if isinstance(self.waiting_on, str) else self.waiting_on()
        return what, (_now() - self.since) / 1e9


_Noted = tuple[int, str, str | _Inside | None]
"""When, which phase, and what of it: no condition, the only phase that it may follow, or who enters it. Without a
phase: the end of a step, or of what was entered."""
