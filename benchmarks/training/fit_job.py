"""One process: ``python -m benchmarks.training.fit_job WORKLOAD WARMUP TIMED loop|strategy|fit|fit+metrics``.

The same batches through a plain loop of torch, through the loop that a strategy asks for, and through ``Model.fit``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader

import stratagem as sg
from benchmarks.job_files import root_pid
from benchmarks.training.result import write_result, write_steps
from benchmarks.training.torch_models import Batch, make_loader, make_model, weights_finite
from benchmarks.training.workloads import LEARNING_RATE, SEED, WORKLOADS
from benchmarks.window import between, read_counters

Epoch = Callable[[DataLoader[Batch]], list[float]]
"""Trains on all batches of a loader; returns their losses."""


def main() -> None:
    """Warms up, times, reports."""
    workload, warmup_steps, timed_steps, how = WORKLOADS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = make_model(workload)
    epoch = {"loop": plain_loop, "strategy": strategy_loop}.get(how, fit_loop)(model, how)
    first = epoch(make_loader(workload, warmup_steps))
    loader = make_loader(workload, timed_steps)
    begin = read_counters(root_pid())
    timed = epoch(loader)
    window = between(begin, read_counters(root_pid()))
    write_steps(timed_steps)
    write_result(window, first + timed, weights_finite(model), 0.0, {"torch": torch.__version__})


def plain_loop(model: nn.Module, how: str) -> Epoch:
    """What people write with torch alone; the loss is looked at once in 50 steps, as a progress bar does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def epoch(loader: DataLoader[Batch]) -> list[float]:
        losses = []
        for number, (inputs, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            if number % 50 == 0:
                losses.append(loss.item())
        return [*losses, loss.item()]

    return epoch


def strategy_loop(model: nn.Module, how: str) -> Epoch:
    """The same loop under OneDeviceStrategy."""
    strategy = sg.OneDeviceStrategy("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    strategy.prepare(model, optimizer)

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    def epoch(loader: DataLoader[Batch]) -> list[float]:
        losses = []
        for number, batch in enumerate(strategy.distribute_dataset(loader)):
            result = strategy.run(step, args=(batch,))
            if number % 50 == 0:
                losses.append(float(strategy.reduce_mean(result)))
        return [*losses, float(strategy.reduce_mean(result))]

    return epoch


def fit_loop(module: nn.Module, how: str) -> Epoch:
    """``Model.fit`` under OneDeviceStrategy, its progress in plain lines."""
    with sg.OneDeviceStrategy("cpu").scope():
        model = sg.Model(module)
        metrics = ["accuracy"] if how == "fit+metrics" else None
        model.compile(lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE), "cross_entropy", metrics)

    def epoch(loader: DataLoader[Batch]) -> list[float]:
        losses: list[float] = model.fit(loader, epochs=1).history["loss"]
        return losses

    return epoch


if __name__ == "__main__":
    main()
