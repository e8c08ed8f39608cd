"""The peer: gloo through torch.distributed, one process a rank, in place as DDP uses it.

``python -m benchmarks.collectives.gloo_job SIZES`` with torchrun's variables in the environment.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from benchmarks.collectives.loop import measure_and_write
from benchmarks.collectives.pattern import Array
from benchmarks.collectives.sizes import parse_sizes


class GlooBuffer:
    """A tensor that is reduced in place, again and again: the numbers grow, the work stays the same."""

    def __init__(self, num_elements: int) -> None:
        self._tensor = torch.empty(num_elements)

    def fill(self, values: Array) -> None:
        self._tensor.copy_(torch.from_numpy(values))

    def all_reduce(self) -> None:
        dist.all_reduce(self._tensor)

    def result(self) -> Array:
        array: Array = self._tensor.numpy()
        return array


class Gloo:
    """torch.distributed's default group."""

    wire = "float32"

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def buffer(self, num_elements: int) -> GlooBuffer:
        return GlooBuffer(num_elements)


def main() -> None:
    """Joins, measures, leaves."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        measure_and_write(Gloo(), parse_sizes(sys.argv[1]), {"torch": torch.__version__})
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
