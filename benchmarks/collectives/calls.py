"""What the jobs of ``collectives`` have in common: which calls, and the clock. Standard library only."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping

from benchmarks.job_files import rank_path, result_path

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
TARGET_S = 0.5
"""Seconds to time for each collective and size, within the bounds below."""
MIN_CALLS, MAX_CALLS, NUM_WARMUP = 3, 1000, 3


class WrongValuesError(AssertionError):
    """A collective gave other values than it has to."""


def measure(call: Callable[[], object], slowest: Callable[[float], float]) -> tuple[float, float]:
    """Median seconds and mean CPU seconds of a call.

    Args:
        call: the same on every rank.
        slowest: the greatest of all ranks' numbers.
    """
    begin = time.perf_counter()
    for _ in range(NUM_WARMUP):
        call()
    warm_s = slowest((time.perf_counter() - begin) / NUM_WARMUP)
    times: list[float] = []
    cpu_begin = time.process_time()
    for _ in range(min(MAX_CALLS, max(MIN_CALLS, round(TARGET_S / warm_s)))):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), (time.process_time() - cpu_begin) / len(times)


def write(rank: int, seconds: Mapping[str, tuple[float, float]], versions: Mapping[str, str]) -> None:
    """Leaves what one rank measured: "all_reduce 4096" to what :func:`measure` gave."""
    rank_path(result_path(), rank).write_text(json.dumps({"seconds": seconds, "versions": versions}))
