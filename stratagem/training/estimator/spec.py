"""What a ``model_fn`` is asked for, and what it answers."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torchmetrics

from stratagem.arguments import known_arguments
from stratagem.cluster.named_enum import NamedEnum
from stratagem.errors import ConfigurationError
from stratagem.training.metrics import Metric

MetricKind = str | torchmetrics.Metric | torchmetrics.MetricCollection | Callable[[torch.device], Metric]
"""A name as in ``Model.compile``, one of torchmetrics, or what makes a metric for a device."""
MetricValue = torch.Tensor | tuple[MetricKind, Any, Any]
"""What is averaged (one number an example, or a scalar), or a metric with a batch's outputs and targets."""


class ModeKeys(NamedEnum, enum.StrEnum):
    """What a ``model_fn`` is called for."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@known_arguments
@dataclasses.dataclass(frozen=True)
class EstimatorSpec:
    """The answer of a ``model_fn`` to one batch.

    Raises:
        ConfigurationError: something is missing that the mode asks for.
    """

    mode: ModeKeys | str
    """As ``model_fn`` was told."""
    predictions: Any = None
    """PREDICT: a tensor whose first dimension is the batch, or dicts, lists and tuples of such."""
    loss: torch.Tensor | None = None
    """TRAIN and EVAL: a scalar, the mean over the examples of the batch."""
    optimizer: torch.optim.Optimizer | None = None
    """TRAIN: from :func:`get_or_create`. The Estimator calls ``zero_grad``, ``backward`` and ``step``."""
    metrics: Mapping[str, MetricValue] = dataclasses.field(default_factory=dict)
    """EVAL: by name, the same names each time."""
    prepare: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """TRAIN: arguments of ``Strategy.prepare``: ``clip_norm``, ``nan``, ``sync_batchnorm`` and so on. Those of the
    first call count."""
    weight: float | None = None
    """EVAL: what the loss was divided by, where that is not the number of examples (tokens, weights of classes); in
    TRAIN ``strategy.set_weight`` says so."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", ModeKeys(self.mode))
        if self.mode == ModeKeys.PREDICT:
            if self.predictions is None:
                raise ConfigurationError("in mode PREDICT an EstimatorSpec needs predictions")
            return
        if not isinstance(self.loss, torch.Tensor) or self.loss.dim():
            got = list(self.loss.shape) if isinstance(self.loss, torch.Tensor) else self.loss
            raise ConfigurationError(
                f"in mode {self.mode} an EstimatorSpec needs a loss that is a scalar tensor, got {got}"
            )
        if self.mode == ModeKeys.TRAIN and self.optimizer is None:
            raise ConfigurationError(
                "in mode TRAIN an EstimatorSpec needs the optimizer: "
                'sg.get_or_create("optimizer", lambda: torch.optim.Adam(net.parameters()))'
            )
