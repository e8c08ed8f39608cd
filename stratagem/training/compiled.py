"""What ``Model.compile`` was told, for those who build something of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from stratagem.training.losses import Loss
from stratagem.training.metrics import Metrics


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The arguments of ``Model.compile``, checked."""

    loss: Loss | None
    metrics: Metrics | None
    autocast: torch.dtype | None
    """Of mixed precision."""
    accumulate_steps: int
    preparation: Mapping[str, Any]
    """What ``Strategy.prepare`` was told."""
