"""Our own side: ``stratagem run --strategy ring … stratagem_job.py LANE WIRE SIZES``, or a worker started by hand.

Sources and results lie in the strategy's arena, as gradients do: out of place, and without a copy where the lane can.
"""

from __future__ import annotations

import sys
from importlib import metadata

import torch

import stratagem as sg
from benchmarks import machine
from benchmarks.collectives.loop import measure_and_write
from benchmarks.collectives.pattern import Array
from benchmarks.collectives.sizes import ELEMENT_BYTES, parse_sizes
from stratagem.worker.ring.communicator import Communicator


class WrongLaneError(Exception):
    """The ranks talk over another lane than the one that is to be measured."""


class ArenaBuffer:
    """Flat views of the arena: reduced from one to the other."""

    def __init__(self, communicator: Communicator, source: torch.Tensor, result: torch.Tensor) -> None:
        self._communicator, self._source, self._result = communicator, source, result

    def fill(self, values: Array) -> None:
        self._source.copy_(torch.from_numpy(values))
        self._result.fill_(torch.nan)

    def all_reduce(self) -> None:
        self._communicator.all_reduce(self._source, out=self._result)

    def result(self) -> Array:
        array: Array = self._result.numpy()
        return array


class Stratagem:
    """One rank of ours.

    Args:
        communicator: the strategy's.
        wire: element type between ranks.
        max_bytes: of the largest buffer; all sizes use the same memory, one after the other.
    """

    def __init__(self, communicator: Communicator, wire: str, max_bytes: int) -> None:
        self.rank, self.size, self.wire = communicator.rank, communicator.size, wire
        self._communicator, self._arena = communicator, communicator.arena(max_bytes)

    def buffer(self, num_elements: int) -> ArenaBuffer:
        num_bytes = num_elements * ELEMENT_BYTES
        views = [part[:num_bytes].view(torch.float32) for part in (self._arena.source, self._arena.result)]
        return ArenaBuffer(self._communicator, *views)


def check_lane(group_name: str, lane: str) -> None:
    """Refuses a group, named for example "ring over tcp", that does not use ``lane``.

    Raises:
        WrongLaneError: what was chosen is another lane.
    """
    if group_name.split()[-1] != lane:
        raise WrongLaneError(f"expected the {lane} lane, the strategy chose {group_name!r}")


def main() -> None:
    """Joins, measures, leaves; every worker runs this."""
    lane, wire, sizes = sys.argv[1], sys.argv[2], parse_sizes(sys.argv[3])
    strategy = sg.MultiWorkerMirroredStrategy()
    check_lane(strategy.communicator.group.name, lane)
    versions = {**machine.library_versions(), "stratagem": metadata.version("stratagem")}
    measure_and_write(Stratagem(strategy.communicator, wire, max(sizes)), sizes, versions)
    strategy.communicator.barrier()


if __name__ == "__main__":
    main()
