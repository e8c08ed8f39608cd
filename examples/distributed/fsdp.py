"""FSDP2 on the small GPT of examples/charlm.py: every rank holds its shard of parameters, gradients and AdamW's state.

torchrun --nproc-per-node 2 examples/distributed/fsdp.py
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import stratagem.distributed  # noqa: F401  # registers the backend

sys.path.append(str(Path(__file__).parents[1]))
from charlm import GPT, Windows, read_source_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="stratagem")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()
    dist.init_process_group(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT(context=64, width=arguments.width, num_layers=3)
    mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    windows = Windows(read_source_text(1_000_000), arguments.windows, context=64, seed=0)
    sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]] = DistributedSampler(windows, size, rank)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        total, num_batches = torch.zeros(()), 0
        for text, following in DataLoader(windows, batch_size=16, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(text).flatten(0, 1), following.flatten())
            loss.backward()
            optimizer.step()
            total, num_batches = total + loss.detach(), num_batches + 1
        dist.all_reduce(total.div_(size))
        if rank == 0:
            print(f"epoch {epoch + 1}  {float(total) / num_batches / math.log(2):.4f} bits a byte", flush=True)
    if rank == 0:
        print(f"loss {float(total) / num_batches:.4f} over {dist.get_backend()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
