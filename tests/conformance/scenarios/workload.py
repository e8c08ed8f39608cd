"""A training run as data, so that a strategy and a plain loop can both do it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.nn.remote_rows import RemoteRows
from stratagem.strategy.synchronous import SynchronousStrategy

Batch = Sequence[torch.Tensor]
Step = Callable[[Sequence[Any], Batch, int], tuple[torch.Tensor, float]]
"""A step with the objects, a batch and the number of the step: its loss, and what the loss was divided by."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained, and how."""

    objects: Sequence[Any]
    """Models first, then optimizers, schedulers."""
    data: Sequence[torch.Tensor]
    """Columns; the rows are the examples, in order."""
    step: Step
    batch_size: int = 7
    """Of global batches."""
    epochs: int = 3
    prepare: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    after_epoch: Callable[[Sequence[Any]], None] = lambda objects: None

    @property
    def loader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """Global batches, in order."""
        return DataLoader(TensorDataset(*self.data), batch_size=self.batch_size)


def train(strategy: sg.Strategy, workload: Workload) -> dict[str, Any]:
    """Losses, learning rates and weights, as this worker sees them.

    ``parts`` are the losses of its replicas, by epoch, step and replica: each with what it was divided by. Buffers are
    those of ``averaged_buffers``; its own are those outside of it.
    """
    prepared = strategy.prepare(*workload.objects, **workload.prepare)
    dataset = strategy.distribute_dataset(workload.loader)

    def step(batch: Batch, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        loss, divisor = workload.step(prepared, batch, number)
        return loss.detach(), torch.tensor(divisor)

    losses: list[float] = []
    parts: list[list[list[list[float]]]] = []
    rates: list[float] = []
    for _ in range(workload.epochs):
        parts.append([])
        for batch in dataset:
            results = strategy.run(step, args=(batch, len(losses)))
            losses.append(float(strategy.reduce_mean(results)[0]))
            pairs = [(float(loss), float(divisor)) for loss, divisor in strategy.local_results(results)]
            parts[-1].append([[loss if divisor else 0.0, divisor] for loss, divisor in pairs])
            rates += rates_of(prepared)
        workload.after_epoch(prepared)
        rates += rates_of(prepared)
    models = models_of(prepared)
    agree = not isinstance(strategy, SynchronousStrategy) or strategy.replicas_agree(*models)
    own = buffers_of(prepared)
    with strategy.averaged_buffers(*models):
        return {
            "losses": losses,
            "parts": parts,
            "rates": rates,
            "weights": weights_of(prepared),
            "buffers": buffers_of(prepared),
            "own buffers": own,
            "agree": agree,
        }


def alone(workload: Workload) -> dict[str, Any]:
    """The same in plain PyTorch: one process, the joined batches."""
    clip_norm = workload.prepare.get("clip_norm")
    for item in workload.objects:
        if clip_norm is not None and isinstance(item, torch.optim.Optimizer):
            item.register_step_pre_hook(lambda optimizer, *_: _clip(optimizer, clip_norm))
    losses: list[float] = []
    rates: list[float] = []
    for _ in range(workload.epochs):
        for batch in workload.loader:
            loss, _divisor = workload.step(workload.objects, batch, len(losses))
            losses.append(float(loss.detach()))
            rates += rates_of(workload.objects)
        workload.after_epoch(workload.objects)
        rates += rates_of(workload.objects)
    return {
        "losses": losses,
        "rates": rates,
        "weights": weights_of(workload.objects),
        "buffers": buffers_of(workload.objects),
    }


class Training:
    """A scenario that trains a workload.

    Args:
        workload: makes it of ``arguments``; a decorated one takes none.
        name: of the scenario in the module of ``workload``; None: that of ``workload``.
        in_scope: whether it is made in the scope of the strategy, for tables.
    """

    __name__: str

    def __init__(
        self, workload: Callable[..., Workload], *arguments: Any, name: str | None = None, in_scope: bool = False
    ) -> None:
        self.workload = functools.partial(workload, *arguments)
        self.__module__, self.__name__ = workload.__module__, name or workload.__name__
        self._in_scope = in_scope

    def __call__(self, strategy: sg.Strategy) -> dict[str, Any]:
        with strategy.scope() if self._in_scope else contextlib.nullcontext():
            workload = self.workload()
        return train(strategy, workload)

    def alone(self) -> dict[str, Any]:
        return alone(self.workload())


def _clip(optimizer: torch.optim.Optimizer, clip_norm: float) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip_norm)


def models_of(objects: Sequence[Any]) -> list[nn.Module]:
    """The models among them."""
    return [item for item in objects if isinstance(item, nn.Module)]


def rates_of(objects: Sequence[Any]) -> list[float]:
    """Learning rates of all optimizers."""
    optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
    return [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]


def weights_of(objects: Sequence[Any]) -> dict[str, Any]:
    """All parameters by model and name, as lists; tables that live elsewhere too."""
    found: dict[str, Any] = {}
    for at, model in enumerate(models_of(objects)):
        elsewhere = {
            f"{name}.weight": part.whole_weight()
            for name, part in model.named_modules()
            if isinstance(part, RemoteRows)
        }
        for name, parameter in model.named_parameters():
            found[f"{at}.{name}"] = elsewhere.get(name, parameter).detach().tolist()
    return found


def buffers_of(objects: Sequence[Any]) -> dict[str, Any]:
    """All buffers, likewise."""
    models = enumerate(models_of(objects))
    return {f"{at}.{name}": b.tolist() for at, model in models for name, b in model.named_buffers()}


def filled(module: nn.Module, seed: int = 3) -> nn.Module:
    """``module`` with weights that depend on ``seed`` alone: threads of one process share torch's generator."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return module


def normal(*shape: int, seed: int) -> torch.Tensor:
    """Random numbers that depend on ``seed`` alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int) -> torch.Tensor:
    """Random integers below ``high``, likewise."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))
