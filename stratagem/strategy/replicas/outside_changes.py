"""Changes made outside of replicas to replica 0's objects, and how they reach the other replicas."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from stratagem.errors import ConfigurationError
from stratagem.strategy.replicas.copies import GRADIENT_HOOKS, Copies, settings_of

_OF_ONE_MODULE = frozenset({"_compiled_call_impl"})
"""Attributes that are not carried, or in a way of their own."""
_OF_ONE_OPTIMIZER = frozenset({"_opt_called", "param_groups", "state", "step"})
"""Likewise."""
_END = object()


class Seen:
    """The values of dictionaries as they were; tells which have been replaced.

    Quick, because everything is looked at in every run: 25 ns a value. ``dictionaries``: gives them, as many each time:
    ``del`` of an ``nn.Sequential`` puts another one in the place of that of its modules.
    """

    def __init__(self, dictionaries: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        self._now = dictionaries
        self._then: list[dict[str, Any]] = []
        self._values: list[Any] = []
        self.record()

    def record(self) -> None:
        if not self.is_same():
            self._then = list(map(dict, self._now()))
            self._values = [*itertools.chain.from_iterable(map(dict.values, self._then)), _END]

    def is_same(self) -> bool:
        """Whether every name has the object that it had."""
        values = map(operator.methodcaller("values"), self._now())
        now = itertools.chain(itertools.chain.from_iterable(values), (_END,))
        return all(map(operator.is_, now, self._values)) and bool(self._values)

    def replaced(self) -> Iterator[tuple[int, str]]:
        """Which dictionary, and a name in it that is new, has gone or has another value."""
        if self.is_same():
            return
        for index, (now, then) in enumerate(zip(self._now(), self._then, strict=True)):
            for name in {**then, **now}:
                if name not in now or name not in then or now[name] is not then[name]:
                    yield index, name


class HookChanges:
    """Carries hooks that were registered on replica 0's objects, or removed from them; each object is given as it is on
    every replica."""

    def __init__(self, objects: Sequence[Sequence[Any]]) -> None:
        self._hooks: list[list[dict[Any, Any]]] = []
        for one in objects:
            kinds = [name for name, value in vars(one[0]).items() if "hooks" in name and isinstance(value, dict)]
            self._hooks += [[vars(item)[kind] for item in one] for kind in kinds]
        self._firsts = [first for first, *_ in self._hooks]
        self._count = (-1, -1)
        self.record()

    def record(self) -> None:
        if self._count != (count := self._counted()):
            self._keys = list(map(set, self._firsts))
            self._count = count

    def spread(self, copies: Sequence[Copies]) -> None:
        if self._count == self._counted():
            return
        for (first, *twins), then in zip(self._hooks, self._keys, strict=True):
            if first.keys() == then:
                continue
            for twin, its in zip(twins, copies, strict=True):
                for key in then - first.keys():
                    twin.pop(key, None)
                for key in first.keys() - then:
                    twin[key] = its.of_value(first[key])

    def _counted(self) -> tuple[int, int]:
        """Hooks ever registered anywhere, and those that are on replica 0's objects: a handle removes one unseen."""
        return RemovableHandle.next_id, sum(map(len, self._firsts))


class GradientHookChanges:
    """Carries hooks of gradients that were registered on replica 0's parameters, or removed from them; each parameter
    is given as it is on every replica."""

    def __init__(self, parameters: Sequence[Sequence[nn.Parameter]]) -> None:
        self._parameters = parameters
        self._count = (-1, -1)
        self.record()

    def record(self) -> None:
        if self._count != (count := self._counted()):
            self._count = count
            self._known = [_gradient_hooks(first) for first, *_ in self._parameters]

    def spread(self) -> None:
        """As of :class:`ModelChanges`. A hook is shared by the replicas."""
        if self._count == self._counted():
            return
        for (first, *twins), known in zip(self._parameters, self._known, strict=True):
            hooks = _gradient_hooks(first)
            for twin in twins:
                for register, hook in (found for number, found in hooks.items() if number not in known):
                    getattr(twin, register)(hook)
                for _, gone in (known[number] for number in known.keys() - hooks.keys()):
                    for name in GRADIENT_HOOKS.values():
                        own = getattr(twin, name) or {}
                        for number in [number for number, hook in own.items() if hook is gone]:
                            del own[number]

    def _counted(self) -> tuple[int, int]:
        """Hooks ever registered anywhere, and those that are on replica 0's parameters."""
        firsts = [first for first, *_ in self._parameters]
        return RemovableHandle.next_id, sum(
            len(each._backward_hooks or ()) + len(each._post_accumulate_grad_hooks or ()) for each in firsts
        )


def _gradient_hooks(parameter: nn.Parameter) -> dict[int, tuple[str, Any]]:
    """By their numbers: how each is registered, and itself."""
    every = ((register, getattr(parameter, name) or {}) for register, name in GRADIENT_HOOKS.items())
    return {number: (register, hook) for register, hooks in every for number, hook in hooks.items()}


@dataclasses.dataclass(eq=False, repr=False)
class ModelChanges:
    """Carries changes of replica 0's model to its copies.

    Seen in every run: attributes and buffers that were given another value, parameters that were frozen, gradients that
    were changed, tensors that were written to, hooks. Carried fully when asked to: parameters, also if written to
    through ``.data``. Not carried: what was put into a list or a dictionary, which is each replica's own.
    """

    _models: Sequence[nn.Module]
    _copies: Sequence[Copies]
    _device: torch.device
    _is_pending: Callable[[nn.Parameter], bool]
    unusable: str = dataclasses.field(default="", init=False)
    """Why replicas cannot use the model as it is now; one that is done with does not keep others from training."""

    def __post_init__(self) -> None:
        self._modules = list(zip(*(model.modules() for model in self._models), strict=True))
        firsts = [first for first, *_ in self._modules]
        attributes = list(map(vars, firsts))
        self._attributes = Seen(lambda: attributes)
        self._structure = Seen(lambda: [own[name] for own in attributes for name in ("_parameters", "_modules")])
        self._buffers = Seen(lambda: [own["_buffers"] for own in attributes])
        self._hooks = HookChanges(self._modules)
        self._parameters = list(zip(*(model.parameters() for model in self._models), strict=True))
        self._gradient_hooks = GradientHookChanges(self._parameters)
        self._tensors = self._parameters + self._find_others()
        self.record()

    @property
    def original(self) -> nn.Module:
        return self._models[0]

    def record(self) -> None:
        """The replicas have run, each has changed its own: these are not changes to be carried."""
        if self.unusable:
            return
        if not (self._buffers.is_same() and self._attributes.is_same()):
            self._tensors = self._parameters + self._find_others()
        for seen in (self._attributes, self._structure, self._buffers):
            seen.record()
        self._hooks.record()
        self._gradient_hooks.record()
        self._frozen = [parameter.requires_grad for parameter, *_ in self._parameters]
        self._gradients = [gradient_of(parameter) for parameter, *_ in self._parameters]
        self._versions = _versions(self._tensors)

    def spread(self, fully: bool) -> None:
        """Carries what has changed since :meth:`record`; a ConfigurationError where a gradient of ``no_sync`` changed.
        A model that was moved, or of which a parameter or a submodule was added or replaced, is ``unusable`` until that
        is undone. ``fully``: parameters may have changed unseen."""
        same = self._structure.is_same()
        fully |= not same or bool(self.unusable)
        self.unusable = (fully and self._misplaced()) or (not same and self._rebuilt()) or ""
        if self.unusable:
            return
        if not same:
            self._take_order()
        _spread_attributes(self._attributes, self._modules, self._copies, _OF_ONE_MODULE)
        self._hooks.spread(self._copies)
        self._gradient_hooks.spread()
        self._spread_tensors(fully)
        before = zip(self._frozen, self._gradients, self._parameters, strict=True)
        for was_needed, (gradient, version), (parameter, *twins) in before:
            if parameter.requires_grad != was_needed:
                for twin in twins:
                    twin.requires_grad_(not was_needed)
            now = parameter.grad
            if now is not gradient or (now is not None and now._version != version):
                if now is not None and any(map(self._is_pending, twins)) and bool(now.to_dense().any()):
                    raise ConfigurationError(
                        "a gradient was changed outside of strategy.run after backward() inside no_sync(): until a "
                        "backward() outside of no_sync() it is that of one replica only. Change it after that "
                        "backward(), or accumulate without no_sync(), where each backward() leaves the gradient of all "
                        "replicas"
                    )
                for twin, its in zip(twins, self._copies, strict=True):
                    twin.grad = None if now is None else now.detach().to(its.device, copy=True)

    def _spread_tensors(self, fully: bool) -> None:
        versions = _versions(self._tensors)
        if fully or versions != self._versions or -1 in versions:
            for index, (tensor, *twins) in enumerate(self._tensors):
                changed = versions[index] != self._versions[index] or versions[index] < 0
                if changed or (fully and index < len(self._parameters)):
                    self._carry(tensor, twins)
        new_buffers = list(self._buffers.replaced())
        for index, name in new_buffers:
            first, *twins = self._modules[index]
            buffer = first._buffers.get(name)
            for twin, its in zip(twins, self._copies, strict=True):
                twin._buffers[name] = None if buffer is None else buffer.detach().to(its.device, copy=True)
        if new_buffers:
            self._tensors = self._parameters + self._find_others()
            self._versions = _versions(self._tensors)
            self._buffers.record()

    def _carry(self, tensor: torch.Tensor, twins: Sequence[torch.Tensor]) -> None:
        for twin, its in zip(twins, self._copies, strict=True):
            if twin.dtype == tensor.dtype and twin.shape == tensor.shape:
                twin.copy_(tensor)
            else:
                twin.data = tensor.detach().to(its.device, copy=True)

    def _misplaced(self) -> str:
        home = self._device
        for where in {parameter.device for parameter in self._models[0].parameters()}:
            if where.type != home.type or where.index not in (None, home.index or 0):
                return (
                    f"{type(self._models[0]).__name__} was moved to {where} after strategy.prepare had placed it on "
                    f"{home}; replicas stay where they are (copy.deepcopy gives a model that can be moved)"
                )
        return ""

    def _rebuilt(self) -> str:
        for index, name in self._structure.replaced():
            part = self._modules[index // 2][0]
            path = next(path for path, each in self._models[0].named_modules() if each is part)
            way = "build the whole model, then prepare it"
            if f"{name}_mask" in part._buffers:
                way = f'to prune a prepared model, prune.identity(layer, "{name}") before strategy.prepare'
            return (
                f"{path}{path and '.'}{name} of {type(self._models[0]).__name__} was added, replaced or removed after "
                "strategy.prepare, so the other replicas and the optimizers do not have it: undo that"
                f"{' (prune.remove)' if 'prune' in way else ''}, no step can use it until then; {way}"
            )
        return ""

    def _take_order(self) -> None:
        """Nothing is new, but parts may be in another order (``prune.remove`` leaves them so)."""
        for first, *twins in self._modules:
            for kind in ("_parameters", "_modules"):
                for its in (vars(twin)[kind] for twin in twins):
                    ordered = {name: its[name] for name in vars(first)[kind] if name in its} | its
                    its.clear()
                    its.update(ordered)

    def _find_others(self) -> list[tuple[torch.Tensor, ...]]:
        """Buffers, and tensors that are plain attributes."""
        every = [[module._buffers[name] for module in its] for its in self._modules for name in its[0]._buffers]
        plain = [[vars(part).get(name) for part in its] for its in self._modules for name in _data_of(its[0])]
        every += [one for one in plain if all(isinstance(value, torch.Tensor) for value in one)]
        return [tuple(buffer for buffer in one if buffer is not None) for one in every if one[0] is not None]


@dataclasses.dataclass(eq=False, repr=False)
class OptimizerChanges:
    """Carries changes of replica 0's optimizer to its copies: settings and attributes in every run, all when asked to.
    Arguments as of :class:`ModelChanges`."""

    _optimizers: Sequence[torch.optim.Optimizer]
    _copies: Sequence[Copies]

    def __post_init__(self) -> None:
        self._attributes = Seen(lambda: [vars(self._optimizers[0])])
        self._hooks = HookChanges([self._optimizers])

    def record(self) -> None:
        self._attributes.record()
        self._hooks.record()

    def spread(self, fully: bool) -> None:
        """Carries what has changed since :meth:`record`; a ConfigurationError where a group has got parameters that no
        prepared model has. ``fully``: the state may have changed unseen."""
        first = self._optimizers[0]
        _spread_attributes(self._attributes, [self._optimizers], self._copies, _OF_ONE_OPTIMIZER)
        for twin, copies in zip(self._optimizers[1:], self._copies, strict=True):
            _same_groups(first, twin, copies)
            if fully:
                copies.take_state(first, twin)
        self._hooks.spread(self._copies)


def _spread_attributes(
    seen: Seen, objects: Sequence[Sequence[Any]], copies: Sequence[Copies], kept: frozenset[str]
) -> None:
    for index, name in seen.replaced():
        first, *twins = objects[index]
        for twin, its in zip(twins, copies, strict=True):
            if name in kept:
                continue
            if name not in vars(first):
                vars(twin).pop(name, None)
                continue
            value = vars(first)[name]
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                value = value.detach()  # its graph is replica 0's
            try:
                vars(twin)[name] = its.of_value(value)
            except Exception as error:
                raise ConfigurationError(
                    f"{name} of {type(first).__name__} was set after strategy.prepare and cannot be copied for another "
                    f"replica ({error}); keep it outside of the model, or give its class a __deepcopy__"
                ) from error


def _data_of(module: nn.Module) -> list[str]:
    """Its attributes that are tensors without a graph."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not value.requires_grad and not value.is_inference()
    ]


def _same_groups(one: torch.optim.Optimizer, other: torch.optim.Optimizer, copies: Copies) -> None:
    del other.param_groups[len(one.param_groups) :]
    other.param_groups.extend({"params": []} for _ in range(len(one.param_groups) - len(other.param_groups)))
    for mine, theirs in zip(one.param_groups, other.param_groups, strict=True):
        if len(mine["params"]) != len(theirs["params"]):
            twins = [copies.of(parameter) for parameter in mine["params"]]
            if any(twin is None for twin in twins):
                raise ConfigurationError(
                    f"{type(one).__name__} was given tensors that no prepared model has; prepare their model first"
                )
            theirs["params"] = twins
        copies.take_settings(settings_of(mine), theirs)


def gradient_of(parameter: nn.Parameter) -> tuple[torch.Tensor | None, int]:
    """Itself, and a number that grows with each write."""
    gradient = parameter.grad
    return gradient, -1 if gradient is None else gradient._version


def _versions(tensors: Sequence[tuple[torch.Tensor, ...]]) -> list[int]:
    """Of the first of each: a number that grows with each write; -1: writes are not counted."""
    try:
        return [first._version for first, *_ in tensors]
    except RuntimeError:  # made in inference mode
        return [-1 if first.is_inference() else first._version for first, *_ in tensors]
