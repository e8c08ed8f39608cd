"""Two ranks; one fails while a collective of it waits in the background. Neither destroys its process group."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import stratagem.distributed  # noqa: F401

dist.init_process_group(sys.argv[1])
if dist.get_rank() == 1:
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    dist.barrier(async_op=True)
    raise ValueError("rank 1 has had enough")
dist.all_reduce(torch.ones(1))
received = torch.zeros(1)
try:
    dist.recv(received, 1)  # what rank 1 never sends
except Exception as error:
    print(f"rank 0 was told: {error}", flush=True)
try:
    dist.all_reduce(torch.ones(3))
except Exception as error:
    print(f"rank 0 was told: {error}", flush=True)
