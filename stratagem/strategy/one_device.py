"""One device: parameters, steps and input there; nothing is sent anywhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from stratagem.data.distributed import DistributedDataset, LocalUnits
from stratagem.data.loaders import plan_of
from stratagem.strategy.base import Preparation, Strategy
from stratagem.strategy.devices import parse_device
from stratagem.strategy.guard import guard
from stratagem.worker.step_meter import StepMeter


class OneDeviceStrategy(Strategy):
    """Trains on one device.

    Args:
        device: for example "cpu" or "cuda:0"; TensorFlow's "/gpu:0" and "/cpu:0" are understood.
        seed: seed of the order of the examples; the same seed gives the same order under every strategy.
    """

    def __init__(self, device: str | torch.device = "cpu", seed: int = 0) -> None:
        self.device = parse_device(device)
        self._seed = seed
        self._num_datasets = 0
        self._meter = StepMeter()

    def _prepare(self, objects: Sequence[Any], preparation: Preparation) -> None:
        for item in objects:
            if isinstance(item, torch.nn.Module):
                item.to(self.device)
            elif isinstance(item, torch.optim.Optimizer):
                guard(item, preparation, self._meter)

    def _saw_loss(self, loss: torch.Tensor) -> None:
        self._meter.newest_loss = loss

    def report(self, **metrics: float) -> None:
        self._meter.metrics.update({name: float(value) for name, value in metrics.items()})

    def distribute_dataset(self, loader: DataLoader[Any]) -> DistributedDataset:
        plan = dataclasses.replace(plan_of(loader, num_slices=1, staleness=math.inf), seed=self._seed)
        self._num_datasets += 1
        return DistributedDataset(
            loader, plan, self._num_datasets, LocalUnits(plan, self._num_datasets, self._meter), self.device
        )
