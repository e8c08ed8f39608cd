"""DistributedDataParallel as torch's tutorial has it; our backend is one import and one word.

torchrun --nproc-per-node 2 examples/distributed/ddp.py
stratagem run --workers 2 examples/distributed/ddp.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stratagem.distributed  # noqa: F401  # registers the backend


class ToyModel(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net2(self.relu(self.net1(x)))
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="stratagem")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    dist.init_process_group(arguments.backend)
    torch.manual_seed(dist.get_rank())  # DDP gives every rank the parameters of rank 0
    model = DistributedDataParallel(ToyModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(arguments.steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5))
        loss.backward()
        optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"loss {total / dist.get_world_size():.4f} over {dist.get_backend()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
