"""A rank of a job that times collectives of ``torch.distributed`` with one of its backends.

``python -m benchmarks.collectives.torch_job BACKEND SIZES DEVICE`` with torchrun's variables in the environment; DEVICE
is cpu or cuda.
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
    name: str, num_elements: int, rank: int, size: int, device: torch.device
) -> tuple[Callable[[], object], torch.Tensor, torch.Tensor]:
    """A collective, what it fills, and what that has to hold after the first call."""
    part = num_elements // size
    whole, own = (torch.full((length,), float(rank + 1), device=device) for length in (part * size, part))
    every = torch.arange(1.0, size + 1, device=device)
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
    return functools.partial(dist.broadcast, whole, 0), whole, torch.ones(1, device=device).expand(part * size)


def measured(name: str, num_elements: int, rank: int, size: int, device: torch.device) -> tuple[float, float]:
    """What a call costs, to the end of what it does on its device, after one whose values were compared."""
    begun, out, expected = prepared(name, num_elements, rank, size, device)
    call = begun if device.type == "cpu" else functools.partial(_to_its_end, begun, device)
    call()
    if not torch.equal(out, expected):
        raise WrongValuesError(f"{name} of {num_elements:,} elements gave {out[:4].tolist()}… on rank {rank}")
    return measure(call, functools.partial(_slowest, device))


def _to_its_end(begun: Callable[[], object], device: torch.device) -> None:
    begun()
    torch.cuda.synchronize(device)


def _slowest(device: torch.device, seconds: float) -> float:
    every = torch.tensor(seconds, device=device)
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
    device = torch.device("cuda", rank % torch.cuda.device_count()) if sys.argv[3] == "cuda" else torch.device("cpu")
    seconds = {
        f"{name} {num_bytes}": measured(name, num_bytes // ELEMENT_BYTES, rank, size, device)
        for name in COLLECTIVES
        for num_bytes in sizes
    }
    write(rank, seconds, {"torch": torch.__version__})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
