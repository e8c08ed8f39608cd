"""What a step writes to and was not prepared: it is one object for all replicas, and each of them changes it again."""

from __future__ import annotations

import collections
import functools
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from stratagem.strategy.replicas.mirrored import Mirrored

logger = logging.getLogger(__name__)

FIRST, EVERY = 32, 16
"""The first runs are looked at, and of later ones one in so many."""
MAX_DEPTH = 6
"""From the step function: a function that it calls, an object, its attribute, and so on."""
MAX_OBJECTS = 1_000
"""That are looked at in a run; and elements of a list or dictionary that is."""
_LIBRARIES = frozenset({"builtins", "numpy", "stratagem", "torch", "torchmetrics"})
"""Whose objects are not looked into, other than models and what a method is bound to."""

T = TypeVar("T")


class UnpreparedWrites:
    """Warns once where several replicas write to the same weights in one run, such as a moving average kept by hand.

    Looked at are models, and tensors in lists and dictionaries, that the step function names, its own or in what it
    calls; not a tensor by itself, which often is a sum over the replicas. ``prepared``: the modules of prepared models,
    on all replicas. A replica has written where the tensors have newer versions when it ends than before.
    """

    def __init__(self, prepared: Callable[[], Iterable[nn.Module]]) -> None:
        self._prepared = prepared
        self._has_warned = False
        self._num_runs = 0

    def watched(self, work: Sequence[Callable[[], T]], uses: Sequence[Any]) -> Sequence[Callable[[], T]]:
        """The work of each replica, looked at; ``uses``: the step function, and its arguments."""
        self._num_runs += 1
        if self._has_warned or (self._num_runs > FIRST and self._num_runs % EVERY):
            return work
        if not (found := self._found(uses)):
            return work
        versions = {name: _versions(tensors) for name, tensors in found.items()}
        num_writers = collections.Counter[str]()

        def looked_at(one: Callable[[], T]) -> T:
            result = one()
            for name, tensors in found.items():
                if (now := _versions(tensors)) != versions[name]:
                    versions[name] = now
                    num_writers[name] += 1
                    if num_writers[name] > 1:
                        self._warn(name)
            return result

        return [functools.partial(looked_at, one) for one in work]

    def _warn(self, name: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s was not prepared, so it is one object for all replicas, and several of them wrote to it in one "
                "step: a moving average is updated once per replica. Update it outside of strategy.run, after the "
                "step, or prepare an AveragedModel (a mere copy of weights is right as it is)",
                name,
            )

    def _found(self, uses: Sequence[Any]) -> dict[str, list[torch.Tensor]]:
        found: dict[str, list[torch.Tensor]] = {}
        prepared: set[int] = set()
        for name, value in _reached("the step", uses):
            if isinstance(value, torch.Tensor):
                found.setdefault(name, []).append(value)
                continue
            for module in value.modules():
                if not module._parameters and not module._buffers:
                    continue
                prepared = prepared or {id(each) for each in self._prepared()}
                if id(module) not in prepared:
                    found.setdefault(name, []).extend((*module._parameters.values(), *module._buffers.values()))
        counted = {
            name: [one for one in its if one is not None and not one.is_inference()] for name, its in found.items()
        }
        return {name: tensors for name, tensors in counted.items() if tensors}


def _reached(name: str, uses: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Models, and tensors in containers, with the names by which the step reaches them."""
    waiting = collections.deque([(name, value, 0) for value in uses])
    seen: set[int] = set()
    while waiting and len(seen) < MAX_OBJECTS:
        name, value, depth = waiting.popleft()
        if id(value) in seen or depth > MAX_DEPTH or issubclass(type(value), Mirrored):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield name, value
            continue
        for inner, part in _parts(value):
            if not isinstance(part, torch.Tensor):
                is_global = isinstance(value, types.FunctionType)
                path = inner if is_global or not inner else f"{name}.{inner}"
                waiting.append((path or name, part, depth + 1))
            elif type(part) in (torch.Tensor, nn.Parameter) and isinstance(value, list | tuple | dict) and depth:
                yield name, part


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object has or names, with its name; empty: it has none of its own."""
    if isinstance(value, types.MethodType):
        yield "", value.__func__
        yield from getattr(value.__self__, "__dict__", {}).items()
    elif isinstance(value, types.FunctionType):
        yield from _named_by(value)
    elif isinstance(value, functools.partial):
        yield from (("", part) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, list | tuple | dict):
        if len(value) <= MAX_OBJECTS:
            yield from (("", part) for part in (value.values() if isinstance(value, dict) else value))
    elif not isinstance(value, type | types.ModuleType) and type(value).__module__.split(".")[0] not in _LIBRARIES:
        yield from dict(getattr(value, "__dict__", {})).items()


def _named_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from (("", value) for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
    if function.__module__ is not None and function.__module__.split(".")[0] in _LIBRARIES:
        return
    code: list[types.CodeType] = [function.__code__]
    outer: Mapping[str, Any] = function.__globals__
    while code:
        one = code.pop()
        yield from ((name, outer[name]) for name in one.co_names if name in outer)
        code += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]


def _versions(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor._version for tensor in tensors)
