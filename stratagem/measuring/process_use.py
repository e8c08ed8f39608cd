"""What a process takes of its machine: CPU, waits for a core, waits for the interpreter's lock. Full on Linux."""

from __future__ import annotations

import os
import threading
import time

from stratagem.measuring import measures
from stratagem.measuring.measures import labelled

EVERY_S = 2.0
"""Seconds between two looks at the threads, which cost about a millisecond."""
PROBES_S = (0.001, 0.001, 0.02)
"""Sleeps of a look. The last one is long enough that a process which is stopped now and then does not miss its end."""
OURS = ("session", "lane-", "metrics", "collectives", "ThreadPoolExecutor", "MainThread", "replica")
"""Beginnings of the names of threads that are not the script's."""
OF_GRPC = ("(_serve)", "(_run)", "(channel_spin)", "(_consume_request_iterator)")
"""Ends of the names of gRPC's threads."""
WORTH_NS = 100_000_000
"""A thread that has run less than this is not told."""


class ProcessUse:
    """Reads it, at most every :data:`EVERY_S` seconds."""

    def __init__(self) -> None:
        self._read_at = float("-inf")
        self._ran: dict[int, tuple[int, int]] = {}
        self._starved_ns = 0
        self._gil_wait_s, self._probes = 0.0, 0
        self._values: dict[str, float] = {}

    def values(self) -> dict[str, float]:
        """Measures of this process. Called by one thread, which sleeps some milliseconds meanwhile."""
        now = time.monotonic()
        if now >= self._read_at + EVERY_S:
            self._read_at = now
            self._probe()
            self._values = self._look()
        return self._values

    def _look(self) -> dict[str, float]:
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        found = {measures.CPU: time.process_time(), measures.CORES: float(len(os.sched_getaffinity(0)))}
        threads = _threads()
        for number, (ran, waited) in threads.items():
            before = self._ran.get(number, (0, 0))
            self._starved_ns += max(0, waited - before[1])
            name = names.get(number, "")
            if name and ran > WORTH_NS and not name.startswith(OURS) and not name.endswith(OF_GRPC):
                key = labelled(measures.THREAD_CPU, name)
                found[key] = found.get(key, 0.0) + ran / 1e9
        self._ran = threads
        found[measures.STARVED] = self._starved_ns / 1e9
        found[measures.GIL_WAIT], found[measures.GIL_PROBES] = self._gil_wait_s, float(self._probes)
        return found

    def _probe(self) -> None:
        """A thread that wakes needs the interpreter's lock before it can look at the clock."""
        for sleep_s in PROBES_S:
            starved, start = _starved_ns(), time.perf_counter_ns()
            time.sleep(sleep_s)
            late = time.perf_counter_ns() - start - sleep_s * 1e9 - (_starved_ns() - starved)
            self._gil_wait_s += max(0.0, late) / 1e9
            self._probes += 1


class ThreadWaits:
    """How long the thread that starts it is ready and has no core, until it is stopped. Not thread-safe."""

    def __init__(self) -> None:
        self._thread = self._since = self._waited = 0

    def start(self) -> None:
        self.stop()
        self._thread, self._since = threading.get_native_id(), _starved_ns()

    def stop(self) -> None:
        self._waited, self._thread = self.waited_ns, 0

    @property
    def waited_ns(self) -> int:
        """In all; any thread may ask."""
        books = _books(f"self/task/{self._thread}") if self._thread else None
        return self._waited + (0 if books is None else max(0, books[1] - self._since))


def _threads() -> dict[int, tuple[int, int]]:
    """The books of each thread of this process."""
    try:
        numbers = os.listdir("/proc/self/task")
    except OSError:
        return {}
    found = {int(number): _books(f"self/task/{number}") for number in numbers}
    return {number: books for number, books in found.items() if books is not None}


def _books(task: str) -> tuple[int, int] | None:
    """Nanoseconds that a thread ran, and was ready and had no core; None: it has ended, or nobody counts."""
    try:
        with open(f"/proc/{task}/schedstat") as file:
            ran, waited, _ = file.read().split()
    except (OSError, ValueError):
        return None
    return int(ran), int(waited)


def _starved_ns() -> int:
    return (_books("thread-self") or (0, 0))[1]
