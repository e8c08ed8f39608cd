"""Calling a user's ``model_fn`` with what it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.errors import ConfigurationError
from stratagem.training.estimator.run_config import RunConfig
from stratagem.training.estimator.spec import EstimatorSpec, ModeKeys

_KNOWN = ("features", "labels", "mode", "params", "config")


class ModelFunction:
    """A ``model_fn``, which takes ``features``, and ``labels``, ``mode``, ``params``, ``config`` by these names where
    it wants them.

    Raises:
        ConfigurationError: it takes no features, or something else.
    """

    def __init__(self, function: Callable[..., EstimatorSpec], params: Mapping[str, Any], config: RunConfig) -> None:
        self._function = function
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._params = params
        self._config = config
        self._takes = taken(function, self._name, _KNOWN)
        if "features" not in self._takes:
            raise ConfigurationError(f"{self._name} takes no argument called features")

    def __call__(self, features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        """The answer to a batch.

        Raises:
            ConfigurationError: it is no EstimatorSpec, or of another mode.
        """
        if labels is not None and "labels" not in self._takes:
            raise ConfigurationError(f"{self._name} takes no labels, but the input gives some: (features, labels)")
        given = {"features": features, "labels": labels, "mode": mode, "params": self._params, "config": self._config}
        spec: object = self._function(**{name: given[name] for name in self._takes})
        if not isinstance(spec, EstimatorSpec) or spec.mode != mode:
            got = f"one of mode {spec.mode}" if isinstance(spec, EstimatorSpec) else type(spec).__name__
            raise ConfigurationError(f"{self._name} must return an EstimatorSpec of mode {mode}, got {got}")
        return spec

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelFunction:
        return self


def taken(function: Callable[..., Any], name: str, known: tuple[str, ...]) -> list[str]:
    """Which of the known arguments a function takes by name.

    Raises:
        ConfigurationError: it needs another one.
    """
    takes = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.name in known and parameter.kind is not parameter.POSITIONAL_ONLY:
            takes.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise ConfigurationError(f"{name} takes {parameter.name!r}, but it can be given {', '.join(known)}")
    return takes
