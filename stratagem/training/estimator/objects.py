"""What a ``model_fn`` creates once and finds again in every step: ``sg.get_or_create``."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
import torchmetrics
from torch import nn

from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy

T = TypeVar("T")

RESERVED = ("global_step", "input_position")
"""Names of what the Estimator itself saves."""


class ObjectSource(Protocol):
    """Gives a ``model_fn`` its objects."""

    global_step: int

    def get_or_create(self, name: str, factory: Callable[[], Any]) -> Any:
        """The object called ``name``."""


_current: contextvars.ContextVar[ObjectSource | None] = contextvars.ContextVar("objects", default=None)


@contextlib.contextmanager
def giving(source: ObjectSource) -> Iterator[None]:
    """Inside, :func:`get_or_create` asks ``source``."""
    token = _current.set(source)
    try:
        yield
    finally:
        _current.reset(token)


def get_or_create(name: str, factory: Callable[[], T]) -> T:
    """In a ``model_fn``: the module or optimizer called ``name``, which the first call creates.

    Modules are saved and restored under their names. Every object has to be created in the first call of a mode.

    Args:
        name: an identifier.
        factory: makes it; called once.

    Raises:
        ConfigurationError: called outside of a ``model_fn``, for another kind of object, or for the first time in a
            later step.
    """
    made: T = _here("get_or_create").get_or_create(name, factory)
    return made


def get_global_step() -> int:
    """In a ``model_fn``: updates made before this one, by all workers together, for schedules.

    ``for group in optimizer.param_groups: group["lr"] = decay(sg.get_global_step())``. Under asynchronous parameter
    servers it is the number of the batch in hand, so workers see nearby numbers; in modes EVAL and PREDICT it is that
    of the checkpoint.

    Raises:
        ConfigurationError: called outside of a ``model_fn``.
    """
    return _here("get_global_step").global_step


def _here(name: str) -> ObjectSource:
    source = _current.get()
    if source is None:
        raise ConfigurationError(f"sg.{name} is for the model_fn of an Estimator, and none runs here")
    return source


class ModelObjects:
    """The objects of one ``model_fn`` in one mode."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        """As the factories gave them."""
        self.global_step = 0
        self.in_use: Mapping[str, Any] = self.made
        """What ``model_fn`` gets: prepared, once :meth:`prepare` was called."""
        self._is_building = False

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Inside, objects may be created. Modules are in eval mode: a batch leaves no traces in them."""
        self._is_building = True
        try:
            with giving(self), torch.no_grad():
                yield
        finally:
            self._is_building = False

    def get_or_create(self, name: str, factory: Callable[[], Any]) -> Any:
        if name in self.in_use:
            return self.in_use[name]
        if not self._is_building:
            raise ConfigurationError(
                f"model_fn creates {name!r} in a later step, but its first call in this mode created "
                f"{', '.join(self.made) or 'nothing'}: create every object in every call"
            )
        if not name.isidentifier() or name.startswith("_") or name in RESERVED:
            raise ConfigurationError(
                f"expected an identifier without a leading underscore that is none of {', '.join(RESERVED)}, "
                f"got {name!r}"
            )
        with torch.enable_grad():
            made = factory()
        if isinstance(made, nn.Module) and not isinstance(made, torchmetrics.Metric):
            made.eval()
        elif not isinstance(made, torch.optim.Optimizer):
            raise ConfigurationError(
                f"get_or_create is for modules and optimizers, got {type(made).__name__} for {name!r}. Metrics go to "
                'EstimatorSpec(metrics={"name": (metric, outputs, targets)}); make other things outside of model_fn'
            )
        self.made[name] = made
        return made

    @property
    def modules(self) -> dict[str, nn.Module]:
        """As created."""
        return {name: item for name, item in self.made.items() if isinstance(item, nn.Module)}

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """As created."""
        return {name: item for name, item in self.made.items() if isinstance(item, torch.optim.Optimizer)}

    def prepare(self, strategy: Strategy, with_optimizers: bool, arguments: Mapping[str, Any]) -> None:
        """From now on ``model_fn`` gets what the strategy makes of the objects."""
        chosen = {**self.modules, **(self.optimizers if with_optimizers else {})}
        if chosen:
            prepared = strategy.prepare(*chosen.values(), **arguments)
            stands_for = [prepared] if len(chosen) == 1 else prepared
            self.in_use = {**self.made, **dict(zip(chosen, stands_for, strict=True))}

    def train(self, mode: bool) -> None:
        for name in self.modules:
            self.in_use[name].train(mode)
