"""A ``model_fn``: what it is called with, what it answers, and what it creates once (``sg.get_or_create``)."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
import torchmetrics
from torch import nn

from stratagem.arguments import known_arguments
from stratagem.cluster.named_enum import NamedEnum
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.training.estimator.run_config import RunConfig
from stratagem.training.metrics import Metric

MetricKind = str | torchmetrics.Metric | torchmetrics.MetricCollection | Callable[[torch.device], Metric]
"""A name as in ``Model.compile``, one of torchmetrics, or what makes a metric for a device."""
MetricValue = torch.Tensor | tuple[MetricKind, Any, Any]
"""What is averaged (one number an example, or a scalar), or a metric with a batch's outputs and targets."""
T = TypeVar("T")

RESERVED = ("global_step", "job_start", "input_position")
"""Names of what the Estimator itself saves."""
_KNOWN = ("features", "labels", "mode", "params", "config")


class ModeKeys(NamedEnum, enum.StrEnum):
    """The purpose for which a ``model_fn`` is called."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@known_arguments
@dataclasses.dataclass(frozen=True)
class EstimatorSpec:
    """The result of a ``model_fn`` for one batch.

    Raises:
        ConfigurationError: something that the mode requires is missing.
    """

    mode: ModeKeys | str
    """The mode that ``model_fn`` got."""
    predictions: Any = None
    """PREDICT: a tensor whose first dimension is the batch, or dicts, lists and tuples of such."""
    loss: torch.Tensor | None = None
    """TRAIN and EVAL: a scalar, the mean over the examples of the batch."""
    optimizer: torch.optim.Optimizer | None = None
    """TRAIN: from :func:`get_or_create`. The Estimator calls ``zero_grad``, ``backward`` and ``step``."""
    metrics: Mapping[str, MetricValue] = dataclasses.field(default_factory=dict)
    """EVAL: metrics by name, the same names each time."""
    prepare: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """TRAIN: arguments of ``Strategy.prepare``: ``clip_norm``, ``nan``, ``sync_batchnorm`` and so on. Those of the
    first call are used."""
    weight: float | None = None
    """EVAL: the loss's denominator if it is not the number of examples (tokens, class weights); in
    TRAIN use ``strategy.set_weight``."""

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


class ModelFunction:
    """A ``model_fn``, which takes ``features``, and ``labels``, ``mode``, ``params``, ``config`` by these names where
    it wants them. ConfigurationError: it takes no features, or something else."""

    def __init__(self, function: Callable[..., EstimatorSpec], params: Mapping[str, Any], config: RunConfig) -> None:
        self._function = function
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._params = params
        self._config = config
        self._takes = taken(function, self._name, _KNOWN)
        if "features" not in self._takes:
            raise ConfigurationError(f"{self._name} takes no argument called features")

    def __call__(self, features: Any, labels: Any, mode: ModeKeys) -> EstimatorSpec:
        """The answer to a batch. ConfigurationError: it is no EstimatorSpec, or of another mode."""
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
    """Which of the known arguments a function takes by name. ConfigurationError: it needs another one."""
    takes = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.name in known and parameter.kind is not parameter.POSITIONAL_ONLY:
            takes.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise ConfigurationError(f"{name} takes {parameter.name!r}, but it can be given {', '.join(known)}")
    return takes


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

    Modules are saved and restored under their names. Every object must be created in the first call of a mode.

    Args:
        name: an identifier.
        factory: creates it; called once.

    Raises:
        ConfigurationError: called outside a ``model_fn``, for another kind of object, or for the first time in a
            later step.
    """
    made: T = _here("get_or_create").get_or_create(name, factory)
    return made


def get_global_step() -> int:
    """In a ``model_fn``: the number of updates before this one, by all workers together, for schedules.

    ``for group in optimizer.param_groups: group["lr"] = decay(sg.get_global_step())``. On asynchronous parameter
    servers it is the number of the current batch, so workers see nearby numbers; in modes EVAL and PREDICT it is that
    of the checkpoint.

    Raises:
        ConfigurationError: called outside a ``model_fn``.
    """
    return _here("get_global_step").global_step


def _here(name: str) -> ObjectSource:
    source = _current.get()
    if source is None:
        raise ConfigurationError(f"sg.{name} is for the model_fn of an Estimator, and none is running here")
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
        """Inside, objects may be created, all anew: if this was interrupted before, random numbers begin again, and
        what was half prepared is left. Modules are in eval mode: a batch leaves no traces in them."""
        self.in_use = self.made = {}
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
                f"expected an identifier without a leading underscore other than {', '.join(RESERVED)}, got {name!r}"
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
