"""What a script passed to ``prepare`` and what it got, and an error for anything that trains inside ``run`` unprepared
(docs/semantics.md, "Contexts and values")."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import _reduction
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from stratagem.arguments import is_metric
from stratagem.data.values import PerReplica
from stratagem.errors import ConfigurationError
from stratagem.worker.gradient_guard import GradientPolicy, parameters_of

logger = logging.getLogger(__name__)

_outside: dict[int, weakref.ref[nn.Module]] = {}
"""Modules that were given parameters outside of any scope, and that no strategy has watched so far, by identity."""

_inside: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[Any]]] = {}
"""Modules that were given parameters in a scope, and the strategy of that, by identity: a module may define what its
hash is by what it does not have yet."""

_SUM = _reduction.get_enum("sum")
_MOST_TERMS = 32
_NUM_LOOKS = 16
"""Steps whose result is looked at: a script returns the same from all."""
_NUM_DIMENSIONS = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _adds_up(node: Any) -> bool:
    """Whether a loss, or one of its first terms, is one of torch's losses with ``reduction="sum"``."""
    nodes = [node]
    for one in nodes:
        if one is not None and one.name() in ("AddBackward0", "SubBackward0") and len(nodes) < _MOST_TERMS:
            nodes += [term for term, _ in one.next_functions]
    return any(getattr(one, "_saved_reduction", None) == _SUM for one in nodes)


@dataclasses.dataclass(frozen=True)
class Preparation(GradientPolicy):
    """What a script asked of ``prepare``; ``Strategy.prepare`` explains each."""

    sync_batchnorm: bool = False
    torch_compile: bool | str | Mapping[str, Any] | None = None
    memory_format: torch.memory_format | None = None
    is_whole: bool = True
    """Whether all that was prepared with it is connected."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_format is not None and self.memory_format not in _NUM_DIMENSIONS:
            known = " or ".join(map(str, _NUM_DIMENSIONS))
            raise ConfigurationError(f"expected memory_format={known}, or None, got {self.memory_format!r}")

    @property
    def alike(self) -> str:
        """What has to be the same on every worker."""
        return (
            f"prepare(gradients={self.gradients!r}, clip_norm={self.clip_norm}, nan={self.nan!r}, "
            f"sync_batchnorm={self.sync_batchnorm})"
        )

    @contextlib.contextmanager
    def begun(self, objects: Sequence[Any], known: MutableMapping[Any, Preparation]) -> Iterator[None]:
        """Around the preparation of ``objects``: keeps in mind what Ctrl-C has left half connected. ``known``: with
        what others were prepared before. Raises ConfigurationError: see :meth:`check_place`; one is half connected."""
        kept = [item for item in objects if isinstance(item, nn.Module | torch.optim.Optimizer)]
        for item in kept:
            if item in known and not known[item].is_whole:
                raise ConfigurationError(
                    f"prepare of this {type(item).__name__} was interrupted, and nobody knows how far it came: build "
                    "the model and the optimizer anew, and prepare those"
                )
        self.check_place(objects, known)
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                for item in kept:
                    known.setdefault(item, dataclasses.replace(self, is_whole=False))
            raise

    def check_place(self, objects: Iterable[Any], known: Mapping[Any, Preparation]) -> None:
        """Says which options have nothing that they are about among the ``objects`` that come with them. Raises
        ConfigurationError: models among ``known``, which were prepared before, were given other ``gradients`` than an
        optimizer of their parameters now."""

        def takes(item: Any, option: str) -> bool:
            # A model is laid out again each time; the others are of its first prepare.
            before = self if option == "memory_format" else known.get(item, self)
            return bool(getattr(before, option) == getattr(self, option))

        of_updates = {"clip_norm": (self.clip_norm, None), "nan": (self.nan, "error")}
        of_models = {
            "sync_batchnorm": (self.sync_batchnorm, False),
            "torch_compile": (self.torch_compile or None, None),
            "memory_format": (self.memory_format, None),
        }
        kinds: list[tuple[str, Any, dict[str, Any]]] = [
            ("an optimizer", torch.optim.Optimizer, of_updates),
            ("a model", nn.Module, of_models),
        ]
        for owner, kind, asked in kinds:
            own = [item for item in objects if isinstance(item, kind)]
            given = [name for name, (value, default) in asked.items() if value != default]
            idle = [f"{name}={getattr(self, name)!r}" for name in given if not any(takes(item, name) for item in own)]
            if idle:
                text = "prepare(%s): no effect without %s that was not prepared before; give it together with one"
                logger.warning(text, ", ".join(idle), owner)
        for optimizer in (item for item in objects if isinstance(item, torch.optim.Optimizer)):
            parts = {*map(id, parameters_of(optimizer))}
            for model, before in ((item, before) for item, before in known.items() if isinstance(item, nn.Module)):
                if before.gradients != self.gradients and not parts.isdisjoint(map(id, model.parameters())):
                    raise ConfigurationError(
                        f"prepare(gradients={self.gradients!r}) of {type(optimizer).__name__}, whose model was "
                        f"prepared with gradients={before.gradients!r}: give both the same, or prepare them in one call"
                    )

    def lay_out(self, model: torch.nn.Module) -> None:
        """Gives what convolutions compute with the memory format that was asked for, in place."""
        if self.memory_format is None:
            return
        for tensor in (*model.parameters(), *model.buffers()):
            if not is_lazy(tensor) and tensor.dim() == _NUM_DIMENSIONS[self.memory_format]:
                tensor.data = tensor.data.contiguous(memory_format=self.memory_format)

    def compile(self, models: Iterable[torch.nn.Module]) -> None:
        """Has torch compile models, in place, if that was asked for."""
        if self.torch_compile is None or self.torch_compile is False:
            return
        chosen = self.torch_compile
        options = {"mode": chosen} if isinstance(chosen, str) else {} if chosen is True else dict(chosen)
        for model in models:
            # As nn.Module.compile does it, but from a frame that is not torch's own: dynamo leaves those alone, so that
            # an nn.Sequential would not be compiled at all.
            try:
                model._compiled_call_impl = torch.compile(_frame_around(model._call_impl), **options)
            except (RuntimeError, TypeError) as error:  # a mode, a backend or an argument that it does not have
                raise ConfigurationError(
                    f"expected torch_compile=True, a mode or arguments of torch.compile, got {chosen!r}: {error}"
                ) from error


def created_inside(module: nn.Module, strategy: Any) -> None:
    """A parameter was given to a module in the scope of a strategy."""
    forget = functools.partial(_inside.pop, id(module))
    _inside[id(module)] = weakref.ref(module, forget), weakref.ref(strategy)


def strategy_of_scope(model: nn.Module) -> Any:
    """In whose scope a model, or a part of it that trains, was given parameters; None: in none, or that strategy is
    gone."""
    known = (part for part in model.modules() if id(part) in _inside)
    training = (part for part in known if any(each.requires_grad for each in part.parameters(recurse=False)))
    return next(filter(None, (_inside[id(part)][1]() for part in training)), None)


def created_outside(module: nn.Module) -> None:
    """A parameter was given to a module outside of any scope."""
    _outside[id(module)] = weakref.ref(module, functools.partial(_outside.pop, id(module)))


def _frame_around(call: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return forward


class Prepared:
    """Knows what ``prepare`` was given, as it is on every local replica, and refuses steps of anything else.

    Of steps of optimizers, and of parameters that modules of the open scope are given, :func:`.watch_torch` tells it.
    With ``has_nested`` an optimizer that was not prepared may step with parameters that one that was has on the same
    replica: it is a part of that one.
    """

    def __init__(self, has_nested: bool = True) -> None:
        self._has_nested = has_nested
        self._owned: list[tuple[weakref.ref[nn.Module | torch.optim.Optimizer], dict[int, nn.Parameter]]] = []
        """Models and optimizers, and the parameters that each had, by identity; kept, so that identities stay."""
        self._parameters: dict[int, nn.Parameter] = {}
        """Of all of them."""
        self._optimizers: dict[int, tuple[weakref.ref[torch.optim.Optimizer], Container[int]]] = {}
        """By identity, and the parameters that it may change."""
        self._optimized: dict[int, int] = {}
        """Parameters of optimizers, by identity: the local replica that each is on."""
        self._looked_at: set[int] = set()
        """Parameters that were not prepared and have had a gradient, by identity."""
        self._created: list[tuple[weakref.ref[nn.Module], str]] = []
        """Parameters created in the scope, neither prepared nor watched so far: by module and name, for torch does not
        move a parameter to XLA that has a weak reference."""
        self._models: list[weakref.ref[nn.Module]] = []
        """Those that no step has run with since they were added."""
        self.is_running = self._has_warned = self._has_warned_of_metric = False
        self.is_alone = False
        """Whether there is one replica, with which the gradient of what was not prepared is right too."""
        self.is_weighted = False
        self._num_looks = 0

    def add_model(self, model: nn.Module) -> None:
        """A model whose gradients the strategy sees to."""
        self._add(model, model.parameters())
        self._models.append(weakref.ref(model))

    def _add(self, owner: nn.Module | torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        added = {id(parameter): parameter for parameter in parameters}
        if any(reference() is None for reference, _ in self._owned):
            self._forget()
        self._owned.append((weakref.ref(owner), added))
        self._parameters.update(added)

    def _forget(self) -> None:
        """Leaves out what belonged to models and optimizers that are gone."""
        self._owned = [(reference, owned) for reference, owned in self._owned if reference() is not None]
        self._parameters.clear()
        for _, owned in self._owned:
            self._parameters.update(owned)
        self._optimizers = {key: known for key, known in self._optimizers.items() if known[0]() is not None}
        self._optimized = {key: replica for key, replica in self._optimized.items() if key in self._parameters}
        self._looked_at.clear()

    def add_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        fixed: bool = False,
        replica: int = 0,
    ) -> None:
        """An optimizer, as it is on a local replica, that steps in this process, or in its stead on parameter servers.
        ``fixed``: it may never change other parameters; else all that were prepared."""
        parameters = list(parameters)
        self._add(optimizer, parameters)
        numbers = frozenset(map(id, parameters))
        self._optimized.update(dict.fromkeys(numbers, replica))
        self._optimizers[id(optimizer)] = weakref.ref(optimizer), numbers if fixed else self._parameters

    def __enter__(self) -> None:
        """Around :meth:`Strategy.run`."""
        if self._created:
            self._watch_created()
        while _outside:
            self._watch_outside(_outside.popitem()[1]())
        while self._models:
            self._warn_of_metric(self._models.pop()())
        self.is_running = True

    def __exit__(self, *_: object) -> None:
        self.is_running = False

    def _watch_created(self) -> None:
        waiting = []
        for reference, name in self._created:
            module = reference()
            parameter = None if module is None else module._parameters.get(name)
            if parameter is None or id(parameter) in self._parameters:
                continue
            if parameter.requires_grad:
                with torch._C.DisableTorchFunctionSubclass():  # the handle of a table has no hooks for others
                    parameter.register_post_accumulate_grad_hook(self._check_gradient)
            else:
                waiting.append((reference, name))
        self._created = waiting

    def _watch_outside(self, module: nn.Module | None) -> None:
        for parameter in () if module is None else module.parameters(recurse=False):
            known = id(parameter) in self._parameters or parameter._post_accumulate_grad_hooks  # of another strategy
            if parameter.requires_grad and not known and not is_lazy(parameter):
                hook = functools.partial(self._warn_of_gradient, type(module).__name__)
                parameter.register_post_accumulate_grad_hook(hook)

    def _warn_of_metric(self, model: nn.Module | None) -> None:
        parts = () if model is None or self.is_alone or self._has_warned_of_metric else model.named_modules()
        inside = (name for name, part in parts if is_metric(part) and not hasattr(part, "prepared"))
        if (name := next(inside, None)) is not None:
            self._has_warned_of_metric = True
            logger.warning(
                "the metric %s is a part of a %s: each replica has its own, and compute() covers only the examples of "
                "one. Keep it outside of the model, and pass it to strategy.prepare too",
                *(name, type(model).__name__),
            )

    def created(self, module: nn.Module, name: str) -> None:
        """A parameter was given to a module in the scope."""
        self._created.append((weakref.ref(module), name))

    def check_step(self, optimizer: torch.optim.Optimizer, replica: int = 0) -> None:
        """An optimizer is about to step in a local replica. Raises ConfigurationError: something is unprepared."""
        parameters = parameters_of(optimizer)
        kind = type(optimizer).__name__
        reference, own = self._optimizers.get(id(optimizer), (None, ()))
        if reference is None or reference() is not optimizer:
            if self._has_nested and all(self._optimized.get(id(each)) == replica for each in parameters):
                return
            raise ConfigurationError(
                f"{kind}.step() inside strategy.run, but the optimizer was not prepared: each replica would train on "
                f"its own. {_LINE.capitalize()}"
            )
        if foreign := [each for each in parameters if id(each) not in own]:
            raise ConfigurationError(
                f"the optimizer {kind} steps with a parameter of shape {list(foreign[0].shape)} that it did not have "
                "when it was prepared: add it before strategy.prepare, frozen if it should not train yet"
            )

    def _check_gradient(self, parameter: torch.Tensor) -> None:
        if self.is_running and id(parameter) not in self._parameters:
            parameter.grad = None
            raise ConfigurationError(
                f"a parameter of shape {list(parameter.shape)}, built inside strategy.scope(), got a gradient inside "
                "strategy.run, but its model was not prepared: each replica would train on its own. If it should not "
                f"train, call requires_grad_(False) on it. Otherwise {_LINE}"
            )

    def look_at_loss(self, result: Any, preparations: Iterable[Preparation]) -> None:
        """A step of one of several replicas in sync returned this."""
        if self.is_alone or self.is_weighted or self._num_looks == _NUM_LOOKS:
            return
        parts = result.values if isinstance(result, PerReplica) else (result,)
        items = [[*part.values()] if isinstance(part, Mapping) else part for part in parts]
        found = [one for each in items for one in (each if isinstance(each, list | tuple) else (each,))]
        nodes = [one.grad_fn for one in found if isinstance(one, torch.Tensor) and one.grad_fn is not None]
        self._num_looks += bool(nodes)
        if any(map(_adds_up, nodes)) and all(each.gradients == "mean" for each in preparations):
            self._num_looks = _NUM_LOOKS
            logger.warning(
                "the step returns a loss with reduction='sum', but gradients='mean' (the default of prepare) averages "
                "the losses of replicas: the update is smaller than in one process, by the number of replicas. For the "
                "sum, strategy.prepare(model, optimizer, gradients='sum') and strategy.reduce('SUM', loss); or divide "
                "the loss by the number of its examples"
            )

    def _warn_of_gradient(self, owner: str, parameter: torch.Tensor) -> None:
        number = id(parameter)
        if not self.is_running or self._has_warned or number in self._parameters or number in self._looked_at:
            return
        self._looked_at.add(number)
        models = [each for reference, _ in self._owned if isinstance(each := reference(), nn.Module)]
        parts = (named for model in models for named in model.named_parameters())
        if (name := next((name for name, part in parts if part is parameter), None)) is not None:
            self._has_warned = True
            logger.warning(
                "%s was put into the model after strategy.prepare, so no prepared optimizer trains it: put it in "
                "before, and make the optimizer after that",
                name,
            )
        elif not self.is_alone:
            self._has_warned = True
            logger.warning(
                "a parameter of shape %s of a %s got a gradient inside strategy.run but was not prepared: the gradient "
                "covers only this replica's examples, and whatever it updates differs between replicas. Pass its "
                "module to strategy.prepare and its parameters to an optimizer; call requires_grad_(False) on what "
                "should not train",
                *(list(parameter.shape), owner),
            )

    def check_average(self, average: AveragedModel) -> None:
        """An average is about to be updated in a replica; a ConfigurationError where all replicas have this one."""
        if any(id(parameter) not in self._parameters for parameter in average.parameters()):
            raise ConfigurationError(
                "AveragedModel.update_parameters inside strategy.run, but the average was not prepared: it is one "
                "object, and every replica would update it again. Update it outside of run, after the step, or pass it "
                "to strategy.prepare and use what that returns"
            )


_LINE = (
    "write, before the first step and outside of run, and use what it returns:\n"
    "    model, optimizer = strategy.prepare(model, optimizer)"
)
