"""One device: parameters, steps and input there; nothing is sent anywhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from stratagem.data.distributed import DistributedDataset, LocalUnits
from stratagem.data.loaders import plan_of
from stratagem.errors import ConfigurationError, NonFiniteGradientError
from stratagem.strategy.base import Strategy
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

    def _prepare(
        self,
        objects: Sequence[Any],
        gradients: Literal["mean", "sum"],
        clip_norm: float | None,
        nan: Literal["error", "skip"],
    ) -> None:
        for item in objects:
            if isinstance(item, torch.nn.Module):
                item.to(self.device)
            elif isinstance(item, torch.optim.Optimizer):
                _guard(item, clip_norm, nan, self._meter)

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


def parse_device(device: str | torch.device) -> torch.device:
    """The torch device of a name in torch's or TensorFlow's spelling.

    Raises:
        ConfigurationError: no such device.
    """
    if isinstance(device, torch.device):
        return device
    name = device.lower().removeprefix("/").removeprefix("device:").replace("gpu", "cuda")
    try:
        parsed = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(f"expected a device like 'cpu', 'cuda:0' or '/gpu:0', got {device!r}") from None
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"{device!r} was asked for, but torch sees no CUDA device here; use 'cpu'")
    # torch has one CPU; "cpu:1" is a logical one.
    return torch.device("cpu") if parsed.type == "cpu" else parsed


def _guard(optimizer: torch.optim.Optimizer, clip_norm: float | None, nan: str, meter: StepMeter) -> None:
    """Clipping and the NaN policy for an optimizer that runs in this process."""
    stash: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def before(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not bool(torch.isfinite(norm)):
            if nan == "error":
                raise NonFiniteGradientError(
                    "expected finite gradients, got NaN or Inf; nothing was applied. Lower the learning rate, look at "
                    'the loss, or call prepare(nan="skip") to skip such updates.'
                )
            stash.extend((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None)
            for parameter, _gradient in stash:
                parameter.grad = None
            meter.skipped += 1
        elif clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)

    def after(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in stash:
            parameter.grad = gradient
        stash.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
