"""A rank of a job that times collectives of ``torch.distributed`` with one of its backends.

``python -m benchmarks.collectives.torch_job BACKEND SIZES`` with torchrun's variables in the environment.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.collectives.calls import COLLECTIVES, WrongValuesError, measure, write
from benchmarks.collectives.sizes import ELEMENT_BYTES, parse_sizes


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
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # so called before torch 2.13
        return functools.partial(call, own, whole), own, every.sum().expand(part)
    if name == "all_gather":
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return functools.partial(call, whole, own), whole, every.repeat_interleave(part)
    if name == "all_to_all":
        out = torch.empty_like(whole)
        return functools.partial(dist.all_to_all_single, out, whole), out, every.repeat_interleave(part)
    return functools.partial(dist.broadcast, whole, 0), whole, torch.ones(1).expand(part * size)


def measured(name: str, num_elements: int, rank: int, size: int) -> tuple[float, float]:
    """What a call costs, after one whose values were compared."""
    call, out, expected = prepared(name, num_elements, rank, size)
    call()
    if not torch.equal(out, expected):
        raise WrongValuesError(f"{name} of {num_elements:,} elements gave {out[:4].tolist()}… on rank {rank}")
    return measure(call, _slowest)


def _slowest(seconds: float) -> float:
    every = torch.tensor(seconds)
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return float(every)


def main() -> None:
    """Joins, measures, leaves."""
    backend, sizes = sys.argv[1], parse_sizes(sys.argv[2])
    torch.set_num_threads(1)
    if backend == "stratagem":
        importlib.import_module("stratagem.distributed")
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    seconds = {
        f"{name} {num_bytes}": measured(name, num_bytes // ELEMENT_BYTES, rank, size)
        for name in COLLECTIVES
        for num_bytes in sizes
    }
    write(rank, seconds, {"torch": torch.__version__})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
