"""A rank of a job that times collectives of ``torch.distributed`` with one of its backends.

``python -m benchmarks.collectives.torch_job BACKEND SIZES`` with torchrun's variables in the environment.
"""

from __future__ import annotations

import functools
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.collectives.sizes import ELEMENT_BYTES, parse_sizes
from benchmarks.job_files import rank_path, result_path

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
TARGET_S = 0.5
"""Seconds to time for each collective and size, within the bounds below."""
MIN_CALLS, MAX_CALLS, NUM_WARMUP = 3, 1000, 3


class WrongValuesError(AssertionError):
    """A collective gave other values than it has to."""


def prepared(
    name: str, num_elements: int, rank: int, size: int
) -> tuple[Callable[[], object], torch.Tensor, torch.Tensor]:
    """A collective, what it fills, and what that has to hold after the first call."""
    part = num_elements // size
    whole, own = torch.full((part * size,), float(rank + 1)), torch.full((part,), float(rank + 1))
    every = torch.arange(1.0, size + 1)
    if name == "all_reduce":
        return functools.partial(dist.all_reduce, whole), whole, every.sum().expand(part * size)
    if name == "reduce_scatter":
        return functools.partial(dist.reduce_scatter_single, own, whole), own, every.sum().expand(part)
    if name == "all_gather":
        return functools.partial(dist.all_gather_single, whole, own), whole, every.repeat_interleave(part)
    if name == "all_to_all":
        out = torch.empty_like(whole)
        return functools.partial(dist.all_to_all_single, out, whole), out, every.repeat_interleave(part)
    return functools.partial(dist.broadcast, whole, 0), whole, torch.ones(1).expand(part * size)


def measure(name: str, num_elements: int, rank: int, size: int) -> tuple[float, float]:
    """Median seconds and mean CPU seconds of a call, after one whose values were compared."""
    call, out, expected = prepared(name, num_elements, rank, size)
    call()
    if not torch.equal(out, expected):
        raise WrongValuesError(f"{name} of {num_elements:,} elements gave {out[:4].tolist()}… on rank {rank}")
    begin = time.perf_counter()
    for _ in range(NUM_WARMUP):
        call()
    slowest = torch.tensor((time.perf_counter() - begin) / NUM_WARMUP)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    times: list[float] = []
    cpu_begin = time.process_time()
    for _ in range(min(MAX_CALLS, max(MIN_CALLS, round(TARGET_S / float(slowest))))):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), (time.process_time() - cpu_begin) / len(times)


def main() -> None:
    """Joins, measures, leaves."""
    backend, sizes = sys.argv[1], parse_sizes(sys.argv[2])
    torch.set_num_threads(1)
    if backend == "stratagem":
        importlib.import_module("stratagem.distributed")
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    seconds = {
        f"{name} {num_bytes}": measure(name, num_bytes // ELEMENT_BYTES, rank, size)
        for name in COLLECTIVES
        for num_bytes in sizes
    }
    found = {"seconds": seconds, "versions": {"torch": torch.__version__}}
    rank_path(result_path(), rank).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
