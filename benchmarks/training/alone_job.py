"""One process, plain PyTorch: ``python -m benchmarks.training.alone_job WORKLOAD WARMUP_STEPS TIMED_STEPS``."""

from __future__ import annotations

import sys

import torch

from benchmarks.job_files import root_pid
from benchmarks.training.result import write_result, write_steps
from benchmarks.training.torch_models import in_format, make_loader, make_model, make_step, own_device, weights_finite
from benchmarks.training.workloads import LEARNING_RATE, SEED, WORKLOADS
from benchmarks.window import between, read_counters


def main() -> None:
    """Warms up, times, reports."""
    workload, warmup_steps, timed_steps = WORKLOADS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    device = own_device()
    model = in_format(make_model(workload), workload).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=workload.momentum)
    train_step = make_step(model, optimizer, device)
    losses = [train_step(batch) for batch in make_loader(workload, warmup_steps)]
    loader = make_loader(workload, timed_steps)
    begin = read_counters(root_pid())
    timed_losses = [train_step(batch) for batch in loader]
    window = between(begin, read_counters(root_pid()))
    write_steps(len(timed_losses))
    write_result(window, losses + timed_losses, weights_finite(model), 0.0, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
