"""What a strategy of a cluster is in the cluster's evaluator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stratagem.errors import ConfigurationError
from stratagem.strategy.devices import default_device
from stratagem.strategy.preparation import Preparation
from stratagem.strategy.synchronous import SynchronousStrategy
from stratagem.worker.step_meter import StepMeter


class EvaluatorStrategy(SynchronousStrategy):
    """One replica, in this process alone, that evaluates and refuses to train.

    A script that builds its strategy first, and leaves it to the Estimator who trains, has one in the evaluator too.
    """

    def __init__(self) -> None:
        super().__init__((default_device(),), StepMeter())

    def _prepare(self, objects: Sequence[Any], preparation: Preparation) -> Sequence[Any]:
        if any(isinstance(item, torch.optim.Optimizer) for item in objects):
            raise ConfigurationError(
                "an evaluator does not train: in the script, ask sg.is_evaluator() before preparing an optimizer, and "
                "loop over sg.new_checkpoints()"
            )
        return super()._prepare(objects, preparation)
