"""What ``Model.compile`` was told, for those who build something of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from stratagem.training.losses import Loss
from stratagem.training.metrics import Metric, Metrics, metrics_of


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
        probabilities = self.loss is not None and self.loss.takes_probabilities
        return metrics_of(self.metrics, device, takes_probabilities=probabilities)
