"""A loop whose forward, backward and rest take a known time."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg

FORWARD_S, BACKWARD_S, REST_S = 0.004, 0.03, 0.002
NUM_STEPS = 4


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


class SlowBackward(torch.autograd.Function):
    """The identity, whose gradient takes a while."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        pause(BACKWARD_S)
        return gradient


class Net(nn.Module):
    """The slow part of its backward comes after the first gradient of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pause(FORWARD_S)
        output: torch.Tensor = self.last(SlowBackward.apply(self.first(x)))  # type: ignore[no-untyped-call]
        return output


def spent(strategy: sg.Strategy) -> dict[str, Any]:
    """What the meter says of the loop, and how long that took by the clock."""
    torch.manual_seed(0)
    model = Net()
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
    dataset = strategy.distribute_dataset(DataLoader(TensorDataset(torch.ones(24, 2)), batch_size=24 // NUM_STEPS))

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        model(batch[0]).mean().backward()
        optimizer.step()
        pause(REST_S)

    meter = strategy._meter
    assert meter is not None
    start, before = time.perf_counter(), meter.values()
    for batch in dataset:
        strategy.run(step, (batch,))
    now, after = time.perf_counter(), meter.values()
    return {
        "elapsed_s": now - start,
        "steps": after["steps"] - before["steps"],
        "values": {name: value - before.get(name, 0.0) for name, value in after.items()},
    }
