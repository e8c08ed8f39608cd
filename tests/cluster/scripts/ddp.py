"""A script of torch.distributed that knows nothing of clusters but what torchrun tells: a few steps of DDP."""

from __future__ import annotations

import importlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

backend = sys.argv[1]
if backend == "stratagem":
    importlib.import_module("stratagem.distributed")
dist.init_process_group(backend)
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
sums: list[float | None] = [None] * dist.get_world_size()
dist.all_gather_object(sums, sum(float(value.sum()) for value in model.parameters()))
print("agreed" if len(set(sums)) == 1 else sums, dist.get_backend(), flush=True)
dist.destroy_process_group()
