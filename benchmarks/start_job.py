"""The peer of ``start``: DistributedDataParallel over gloo on a tiny model, by torchrun.

``torchrun --nproc-per-node 2 benchmarks/start_job.py NUM_STEPS``; ends with 1 when the loss did not fall.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> int:
    """Joins, trains, leaves."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        torch.manual_seed(dist.get_rank())
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        images, labels = torch.randn(32, 64), torch.randint(10, (32,))
        losses = []
        for _ in range(int(sys.argv[1])):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        dist.barrier()  # gloo aborts now and then where the other rank has left
        return 0 if losses[-1] < losses[0] else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
