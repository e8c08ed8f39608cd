"""What ``compile`` was told, the parts of a batch, and what one replica does with it in a step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from stratagem.data.nested import map_leaves, num_examples, on_cpu, tensors
from stratagem.strategy.base import Strategy
from stratagem.training.fit.running_metrics import StepResult
from stratagem.training.losses import Loss
from stratagem.training.metrics import Metric, Metrics, metrics_of


class Batch(NamedTuple):
    """What a step works on."""

    inputs: Any
    targets: Any = None
    weights: torch.Tensor | None = None
    """One for each example."""

    @property
    def size(self) -> int:
        if isinstance(self.targets, torch.Tensor) and self.targets.ndim:
            return len(self.targets)
        return num_examples(self.inputs)


def unpack(batch: Any) -> Batch:
    """``(inputs,)``, ``(inputs, targets)`` and ``(inputs, targets, weights)`` by their parts; all else is inputs."""
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields") and 1 <= len(batch) <= 3:
        return Batch(*batch)
    return Batch(batch)


def call(module: Any, inputs: Any) -> Any:
    """``module(*inputs)``, ``module(**inputs)`` or ``module(inputs)``: a list or tuple, a dict, or anything else."""
    if isinstance(inputs, list | tuple):
        return module(*inputs)
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(inputs)


def sample_of(inputs: Any) -> Any:
    """One or two examples of ``inputs``, on the CPU and of their own memory."""
    return map_leaves(
        inputs, lambda leaf: leaf[:2].detach().cpu().clone() if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf
    )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The arguments of ``Model.compile``, checked."""

    loss: Loss | None = None
    metrics: Metrics | None = None
    autocast: torch.dtype | None = None
    """Of mixed precision."""
    accumulate_steps: int = 1
    preparation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What ``Strategy.prepare`` was told."""

    def metrics_on(self, device: torch.device) -> dict[str, Metric]:
        """The metrics of one replica, by the names they have in logs."""
        if (loss := self.loss) is None:
            return metrics_of(self.metrics, device)
        probabilities, ignore_index = loss.takes_probabilities, loss.ignore_index
        return metrics_of(self.metrics, device, takes_probabilities=probabilities, ignore_index=ignore_index)

    def counted(self, outputs: Any) -> Any:
        """The outputs as metrics take them: detached, and none in the precision of the autocast."""

        def full(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return leaf.detach().float() if leaf.dtype is self.autocast else leaf.detach()

        return map_leaves(outputs, full)


@dataclasses.dataclass(frozen=True)
class FitSteps:
    """The steps of a compiled model."""

    strategy: Strategy
    module: nn.Module
    """Prepared, as is the optimizer."""
    optimizer: torch.optim.Optimizer | None
    compiled: Compiled

    def train(self, batch: Any, num_waiting: int) -> StepResult:
        """Forward, backward and, after the last batch of an update, the update, into which go the gradients of
        ``num_waiting`` steps before this one."""
        assert self.optimizer is not None
        parts = unpack(batch)
        if not num_waiting:
            self.optimizer.zero_grad()
        outputs, loss, divisor = self._forward(parts)
        if divisor is not None:
            self.strategy.set_weight(divisor)
        accumulate_steps = self.compiled.accumulate_steps
        (loss / accumulate_steps if accumulate_steps > 1 else loss).backward()
        if num_waiting + 1 == accumulate_steps:
            self.optimizer.step()
        return self._result(parts, outputs, loss, divisor)

    def update(self) -> None:
        """The update of an epoch's last steps, of which there are fewer than ``accumulate_steps``."""
        assert self.optimizer is not None
        self.optimizer.step()

    def test(self, batch: Any) -> StepResult:
        parts = unpack(batch)
        if not parts.size:
            return StepResult(0)
        return self._result(parts, *self._forward(parts))

    def predict(self, batch: Any) -> Any:
        """The outputs, on the CPU; None of no examples."""
        parts = unpack(batch)
        if not num_examples(parts.inputs):
            return None
        with precision(self.compiled.autocast, parts.inputs):
            outputs = call(self.module, parts.inputs)
        return map_leaves(outputs, on_cpu)

    def _forward(self, parts: Batch) -> tuple[Any, torch.Tensor, float | None]:
        assert self.compiled.loss is not None
        with precision(self.compiled.autocast, parts.inputs):
            outputs = call(self.module, parts.inputs)
            loss, divisor = self.compiled.loss(outputs, parts.targets, parts.weights)
        return outputs, loss, divisor

    def _result(self, parts: Batch, outputs: Any, loss: torch.Tensor, divisor: float | None) -> StepResult:
        size = parts.size
        weight = float(size) if divisor is None else divisor
        if not self.compiled.metrics:  # nobody counts by the outputs
            return StepResult(size, loss=loss.detach(), weight=weight)
        return StepResult(size, self.compiled.counted(outputs), parts.targets, loss.detach(), weight)


def precision(autocast: torch.dtype | None, inputs: Any) -> contextlib.AbstractContextManager[Any]:
    """Mixed precision, if any, on the device of the inputs."""
    if autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(next((tensor.device.type for tensor in tensors(inputs)), "cpu"), dtype=autocast)
