"""The answers of a ``model_fn`` as a plain module, which can be exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from stratagem.errors import ConfigurationError
from stratagem.training.estimator.model_function import ModelFunction
from stratagem.training.estimator.objects import giving
from stratagem.training.estimator.spec import ModeKeys


class Predictor(nn.Module):
    """Its parts are the modules of ``model_fn``, by their names.

    Args:
        modules: what it creates in mode PREDICT.
        global_step: of their weights.
    """

    def __init__(self, function: ModelFunction, modules: dict[str, nn.Module], global_step: int) -> None:
        super().__init__()
        self.global_step = global_step
        self._function = function
        for name, module in modules.items():
            self.add_module(name, module)
        self.eval()

    def forward(self, features: Any) -> Any:
        """The predictions that ``model_fn`` gives for these features in mode ``PREDICT``."""
        with giving(self):
            return self._function(features, None, ModeKeys.PREDICT).predictions

    def get_or_create(self, name: str, factory: Callable[[], Any]) -> Any:
        if name not in self._modules:
            raise ConfigurationError(f"model_fn did not create {name!r} in mode PREDICT at first")
        return self._modules[name]
