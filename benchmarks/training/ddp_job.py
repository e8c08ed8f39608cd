"""torch's DistributedDataParallel, over gloo (the peer) or over our backend: one process a rank.

``python -m benchmarks.training.ddp_job WORKLOAD WARMUP_STEPS TIMED_STEPS BACKEND`` with torchrun's variables set.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stratagem.distributed  # noqa: F401  # registers the backend
from benchmarks.job_files import root_pid
from benchmarks.training.result import write_result, write_steps
from benchmarks.training.torch_models import (
    in_format,
    make_loader,
    make_model,
    make_step,
    own_device,
    weights_checksum,
    weights_finite,
)
from benchmarks.training.workloads import LEARNING_RATE, SEED, WORKLOADS, Workload
from benchmarks.window import between, read_counters


def train(workload: Workload, warmup_steps: int, timed_steps: int) -> None:
    """Warms up, times, reports; every rank runs this. Steps are counted over all ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    device = own_device(rank)
    model = in_format(make_model(workload), workload).to(device)
    # A static graph lets DDP plan its buckets once; gradients that are views of the buckets need no copy.
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=workload.momentum)
    train_step = make_step(replica, optimizer, device)
    losses = [train_step(batch) for batch in make_loader(workload, warmup_steps, rank, num_ranks)]
    loader = make_loader(workload, timed_steps, rank, num_ranks)
    dist.barrier()
    begin = read_counters(root_pid())
    timed_losses = [train_step(batch) for batch in loader]
    window = between(begin, read_counters(root_pid()))
    write_steps(len(timed_losses), weights_checksum(model))
    if rank == 0:
        write_result(window, losses + timed_losses, weights_finite(model), None, {"torch": torch.__version__})
    dist.barrier()


def main() -> None:
    """Joins, trains, leaves."""
    torch.set_num_threads(1)
    dist.init_process_group(sys.argv[4])
    try:
        train(WORKLOADS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3]))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
