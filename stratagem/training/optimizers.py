"""Optimizers by name, as instances and as factories."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from stratagem.arguments import nearest
from stratagem.errors import ConfigurationError
from stratagem.worker.gradient_guard import parameters_of

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_NAMED: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}


def optimizer_of(given: str | torch.optim.Optimizer | OptimizerFactory, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a module. ``given``: a class of ``torch.optim`` by name, in any case, with torch's defaults; an
    optimizer over the module's parameters; or what makes one of them. ConfigurationError: an unknown name, or an
    optimizer of other parameters."""
    if isinstance(given, torch.optim.Optimizer):
        own = {id(parameter) for parameter in module.parameters()}
        if any(id(parameter) not in own for parameter in parameters_of(given)):
            raise ConfigurationError(
                f"the {type(given).__name__} has parameters that are not in this model's module: build it over "
                "module.parameters() of the module given to sg.Model, or give a name or a factory"
            )
        return given
    factory: Any = given
    if isinstance(given, str) and (factory := _NAMED.get(given.lower())) is None:
        raise ConfigurationError(
            f"expected the name of an optimizer of torch.optim, got {given!r}; {nearest(given.lower(), _NAMED)}"
        )
    if not callable(factory):
        raise ConfigurationError(
            "expected the name of an optimizer of torch.optim, an optimizer or f(parameters) that makes one, got "
            f"{type(given).__name__}"
        )
    optimizer: object = factory(module.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"expected a factory of a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return optimizer
