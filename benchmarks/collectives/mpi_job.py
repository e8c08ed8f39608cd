"""The peer: a rank of Open MPI, in an environment of its own that has mpi4py and numpy.

``mpirun -np N python -m benchmarks.collectives.mpi_job SIZES``
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.collectives.calls import COLLECTIVES, WrongValuesError, measure, write
from benchmarks.collectives.sizes import ELEMENT_BYTES, parse_sizes

MPI: Any = importlib.import_module("mpi4py.MPI")
Array = np.ndarray[Any, np.dtype[np.float32]]


def prepared(name: str, num_elements: int, world: Any) -> tuple[Callable[[], object], Array, Array]:
    """As in :mod:`benchmarks.collectives.torch_job`, in place where torch's is."""
    size, part = world.size, num_elements // world.size
    whole = np.full(part * size, world.rank + 1, np.float32)
    own = np.full(part, world.rank + 1, np.float32)
    every = np.arange(1, size + 1, dtype=np.float32)
    if name == "all_reduce":
        return functools.partial(world.Allreduce, MPI.IN_PLACE, whole), whole, np.full_like(whole, every.sum())
    if name == "reduce_scatter":
        return functools.partial(world.Reduce_scatter_block, whole, own), own, np.full_like(own, every.sum())
    if name == "all_gather":
        return functools.partial(world.Allgather, own, whole), whole, every.repeat(part)
    if name == "all_to_all":
        out = np.empty_like(whole)
        return functools.partial(world.Alltoall, whole, out), out, every.repeat(part)
    return functools.partial(world.Bcast, whole, 0), whole, np.ones_like(whole)


def main() -> None:
    """Measures, leaves the result."""
    world = MPI.COMM_WORLD
    seconds: dict[str, tuple[float, float]] = {}
    for name in COLLECTIVES:
        for num_bytes in parse_sizes(sys.argv[1]):
            call, out, expected = prepared(name, num_bytes // ELEMENT_BYTES, world)
            call()
            if not np.array_equal(out, expected):
                raise WrongValuesError(f"{name} of {num_bytes:,} bytes gave {out[:4].tolist()}… on rank {world.rank}")
            seconds[f"{name} {num_bytes}"] = measure(call, functools.partial(world.allreduce, op=MPI.MAX))
    version = ".".join(map(str, MPI.get_vendor()[1]))
    write(world.rank, seconds, {"openmpi": version})


if __name__ == "__main__":
    main()
