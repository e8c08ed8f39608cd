"""The loop of every rank of every system: warm up, agree on a count, time, check. numpy only."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from benchmarks.collectives.pattern import Array, check_sum, checksum, contribution
from benchmarks.collectives.sizes import ELEMENT_BYTES
from benchmarks.job_files import rank_path, result_path

TARGET_S = 1.0
"""Seconds of all-reduces to time for each size, within the bounds below."""
MIN_ITERATIONS = 3
MAX_ITERATIONS = 2000
NUM_WARMUP = 3
"""All-reduces of each size before the clock starts; the last one tells how many fit into the time."""
NUM_UNTIMED = NUM_WARMUP + 2
"""Those, and the checked ones before and after."""


class Buffer(Protocol):
    """One tensor on one rank."""

    def fill(self, values: Array) -> None:
        """Takes this rank's contribution, and forgets the result of earlier all-reduces."""

    def all_reduce(self) -> None:
        """Sums over the ranks; the result is complete when this returns."""

    def result(self) -> Array:
        """The sum, as it lies in memory."""


class System(Protocol):
    """A system under test, on one rank."""

    rank: int
    size: int
    wire: str
    """Element type between ranks."""

    def buffer(self, num_elements: int) -> Buffer:
        """Memory for all-reduces of so many float32."""


@dataclasses.dataclass(frozen=True)
class SizeResult:
    """What one rank saw at one size."""

    num_bytes: int
    num_iterations: int
    median_s: float
    cpu_s: float
    """CPU seconds of this rank's process, all its threads, in one all-reduce; the mean."""
    checksum: int
    """Over the bits of a result that was checked after the timed ones."""


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What one rank saw."""

    sizes: Sequence[SizeResult]
    versions: Mapping[str, str]


def measure_and_write(system: System, sizes: Sequence[int], versions: Mapping[str, str]) -> None:
    """What the job of a system does on each rank: measures every size and leaves the result.

    Raises:
        WrongSumError: a result was no sum.
    """
    result = RankResult([measure(system, num_bytes) for num_bytes in sizes], versions)
    rank_path(result_path(), system.rank).write_text(json.dumps(dataclasses.asdict(result)))


def measure(system: System, num_bytes: int) -> SizeResult:
    """Times all-reduces of ``num_bytes``, with a checked one before and one after."""
    num_elements = num_bytes // ELEMENT_BYTES
    buffer = system.buffer(num_elements)
    values = contribution(system.rank, num_elements)
    _check_once(buffer, values, system)
    for _ in range(NUM_WARMUP):
        start = time.perf_counter()
        buffer.all_reduce()
        warm_s = time.perf_counter() - start
    num_iterations = _agree_on_count(system, warm_s)
    times = []
    cpu_begin = time.process_time()
    for _ in range(num_iterations):
        start = time.perf_counter()
        buffer.all_reduce()
        times.append(time.perf_counter() - start)
    cpu_s = time.process_time() - cpu_begin
    found = _check_once(buffer, values, system)
    return SizeResult(num_bytes, num_iterations, statistics.median(times), cpu_s / num_iterations, found)


def _check_once(buffer: Buffer, values: Array, system: System) -> int:
    """All-reduces the known numbers once; returns the checksum of what came out."""
    buffer.fill(values)
    buffer.all_reduce()
    result = buffer.result()
    check_sum(result, system.size, system.wire)
    return checksum(result)


def _agree_on_count(system: System, own_s: float) -> int:
    """How many all-reduces fit into the time; the same on all ranks, because they all-reduce what it took each."""
    agreed = system.buffer(1)
    agreed.fill(np.array([own_s], dtype=np.float32))
    agreed.all_reduce()
    mean_s = max(1e-9, float(agreed.result()[0]) / system.size)
    return min(MAX_ITERATIONS, max(MIN_ITERATIONS, round(TARGET_S / mean_s)))
