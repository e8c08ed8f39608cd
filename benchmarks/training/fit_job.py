"""One process: ``python -m benchmarks.training.fit_job WORKLOAD WARMUP TIMED``.

The same batches through a plain loop of torch, the loop that a strategy asks for, and ``Model.fit``. They
take turns of a few seconds, forward and backward: what they differ by is less than what a machine drifts in a minute.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.utils.data import DataLoader

import stratagem as sg
from benchmarks.job_files import result_path
from benchmarks.runner import turns
from benchmarks.training.cases import FIT_SYSTEMS
from benchmarks.training.result import mean_of_ends
from benchmarks.training.torch_models import Batch, make_loader, make_model, weights_finite
from benchmarks.training.workloads import LEARNING_RATE, SEED, WORKLOADS

NUM_TURNS = 4
"""Of each way; a turn is one epoch."""
Epoch = Callable[[DataLoader[Batch]], list[float]]
"""Trains on all batches of a loader; returns their losses."""


class Way:
    """One way to train a model of its own.

    Args:
        make_epoch: the way.
        model: to train.
    """

    def __init__(self, make_epoch: Callable[[nn.Module], Epoch], model: nn.Module) -> None:
        self.model = model
        self._epoch = make_epoch(model)
        self._losses: list[float] = []
        self.elapsed_s = self.cpu_s = 0.0

    def train(self, loader: DataLoader[Batch]) -> None:
        """An epoch; its time counts."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        losses = self._epoch(loader)
        self.elapsed_s += time.perf_counter() - wall_s
        self.cpu_s += time.process_time() - cpu_s
        self._losses += losses

    def warm_up(self, loader: DataLoader[Batch]) -> None:
        """An epoch whose time does not count."""
        self._losses += self._epoch(loader)

    def result(self, num_steps: int) -> dict[str, object]:
        """The fields of a :class:`~benchmarks.training.result.JobResult`."""
        first_loss, last_loss = mean_of_ends(self._losses)
        return {
            "num_steps": num_steps,
            "elapsed_s": self.elapsed_s,
            "cpu_s": self.cpu_s,
            "loopback_bytes": 0,
            "first_loss": first_loss,
            "last_loss": last_loss,
            "weights_finite": weights_finite(self.model),
            "exposed_comm": 0.0,
            "versions": {"torch": torch.__version__},
        }


def main() -> None:
    """Warms up, times, reports."""
    workload, warmup_steps, timed_steps = WORKLOADS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    ways = []
    for system in FIT_SYSTEMS:
        torch.manual_seed(SEED)
        ways.append(Way(WAYS[system], make_model(workload)))
        ways[-1].warm_up(make_loader(workload, warmup_steps))
    loader = make_loader(workload, timed_steps // NUM_TURNS)
    for index in turns(len(ways), NUM_TURNS):
        ways[index].train(loader)
    results = [way.result(timed_steps // NUM_TURNS * NUM_TURNS) for way in ways]
    result_path().write_text(json.dumps(results))


def plain_loop(model: nn.Module) -> Epoch:
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


def strategy_loop(model: nn.Module) -> Epoch:
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


def fit_loop(module: nn.Module, metrics: list[str] | None = None) -> Epoch:
    """``Model.fit`` under OneDeviceStrategy, its progress in plain lines."""
    with sg.OneDeviceStrategy("cpu").scope():
        model = sg.Model(module)
        model.compile(lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE), "cross_entropy", metrics)

    def epoch(loader: DataLoader[Batch]) -> list[float]:
        losses: list[float] = model.fit(loader, epochs=1).history["loss"]
        return losses

    return epoch


WAYS: Mapping[str, Callable[[nn.Module], Epoch]] = {
    "torch loop": plain_loop,
    "strategy loop": strategy_loop,
    "fit": fit_loop,
    "fit with accuracy": functools.partial(fit_loop, metrics=["accuracy"]),
}


if __name__ == "__main__":
    main()
