"""An Estimator of a compiled ``sg.Model``."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

import torch
from torch import nn

from stratagem.arguments import known_arguments
from stratagem.errors import ConfigurationError
from stratagem.strategy.default import get_strategy
from stratagem.training.estimator.estimator import Estimator
from stratagem.training.estimator.model_function import EstimatorSpec, ModeKeys, get_or_create
from stratagem.training.estimator.run_config import RunConfig
from stratagem.training.fit.steps import Compiled, call, precision
from stratagem.training.metrics import Metric
from stratagem.training.model import Model


@known_arguments
def model_to_estimator(
    model: Model, model_dir: str | os.PathLike[str] | None = None, config: RunConfig | None = None
) -> Estimator:
    """An Estimator that starts from the model as it is now, and does not train the model itself.

    Labels are the targets; features in a list, tuple or dict are the arguments of the module. Predictions are the
    module's outputs.

    Args:
        model: compiled, and built outside any scope: the strategies are those of ``config``.
        model_dir: see :class:`Estimator`.
        config: see :class:`Estimator`.

    Raises:
        ConfigurationError: the model is not compiled for training, belongs to a strategy, or accumulates gradients.
    """
    if not isinstance(model, Model):
        raise ConfigurationError(f"expected an sg.Model, got {type(model).__name__}")
    if model.strategy.places_models:
        raise ConfigurationError(
            f"the model was built in the scope of {type(model.strategy).__name__}; build it outside of any scope: the "
            "strategies of an Estimator are those of its RunConfig"
        )
    compiled = model.compiled
    if compiled.loss is None or model.optimizer is None:
        raise ConfigurationError("model_to_estimator needs a compiled model: compile(optimizer=..., loss=...)")
    if compiled.accumulate_steps > 1:
        raise ConfigurationError("an Estimator makes one update per batch: compile with accumulate_steps=1")
    return Estimator(_Function(model.module, model.optimizer, compiled), model_dir, config)


class _Function:
    """The ``model_fn`` of a model."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, compiled: Compiled) -> None:
        self._pair = copy.deepcopy((module, optimizer))
        self._compiled = compiled
        names = compiled.metrics_on(torch.device("cpu"))
        self._metrics = {name: functools.partial(self._metric, name) for name in names}

    def __call__(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        fresh: list[tuple[nn.Module, torch.optim.Optimizer]] = []

        def make_module() -> nn.Module:
            fresh.append(copy.deepcopy(self._pair))
            return fresh[0][0]

        module = get_or_create("model", make_module)
        with precision(self._compiled.autocast, features):
            outputs = call(module, features)
            if mode == ModeKeys.PREDICT:
                return EstimatorSpec(mode, predictions=outputs)
            assert self._compiled.loss is not None
            loss, divisor = self._compiled.loss(outputs, labels)
        if mode == ModeKeys.EVAL:
            outputs = self._compiled.counted(outputs)
            metrics = {name: (make, outputs, labels) for name, make in self._metrics.items()}
            return EstimatorSpec(mode, loss=loss, metrics=metrics, weight=divisor)
        if divisor is not None:
            get_strategy().set_weight(divisor)
        optimizer = get_or_create("optimizer", lambda: fresh[0][1])
        return EstimatorSpec(mode, loss=loss, optimizer=optimizer, prepare=self._compiled.preparation)

    def _metric(self, name: str, device: torch.device) -> Metric:
        return self._compiled.metrics_on(device)[name]
