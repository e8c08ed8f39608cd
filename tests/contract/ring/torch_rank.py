"""One rank of a group over gloo, as a process: ``python -m tests.contract.ring.torch_rank RANK SIZE ADDRESS``.

Prints what it gets, waits for a line, then takes part in a last collective until that fails.
"""

from __future__ import annotations

import sys

import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError
from stratagem.worker.ring.group import Tag
from stratagem.worker.ring.torch_group import TorchGroup


def main() -> None:
    rank, size, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    group = TorchGroup(rank, size, "gloo", address, 20.0, torch.device("cpu"))
    out = torch.empty(5)
    group.all_reduce(torch.arange(5.0) + rank, out, ReduceOp.SUM, Tag(1, 1))
    print(*out.int().tolist(), flush=True)
    sys.stdin.readline()
    try:
        group.barrier(Tag(2, 1))
    except CollectiveError:
        print("CollectiveError", flush=True)
    group.close("done")


if __name__ == "__main__":
    main()
