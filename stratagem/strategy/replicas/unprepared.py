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
_CONTAINERS = (list, tuple, dict)
_PLAIN = (torch.Tensor, nn.Parameter)

T = TypeVar("T")


class UnpreparedWrites:
    """Warns once where several replicas write to the same weights in one run, such as a moving average kept by hand.

    Looked at are models, and tensors in lists and dictionaries, that the step function names, its own or in what it
    calls; not a tensor by itself or of one number, which often is a sum over the replicas. ``prepared``: the modules of
    prepared models, on all replicas. A replica has written to a tensor whose version is newer when it ends than before.
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
        versions = [tensor._version for _, tensor in found]
        written: set[int] = set()

        def looked_at(one: Callable[[], T]) -> T:
            result = one()
            for index, (name, tensor) in enumerate(found):
                if tensor._version != versions[index]:
                    versions[index] = tensor._version
                    # Not two tensors of one object: on GPUs one replica may end while another writes.
                    if index in written:
                        self._warn(name)
                    written.add(index)
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

    def _found(self, uses: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
        found = [(name, tensor) for name, tensor in _reached("the step", uses) if not tensor.is_inference()]
        prepared = {id(each) for module in (self._prepared() if found else ()) for each in _tensors_of(module)}
        return [(name, tensor) for name, tensor in found if id(tensor) not in prepared]


def _reached(name: str, uses: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of models, and in containers, with the names by which the step reaches them."""
    waiting = collections.deque([(name, value, 0) for value in uses])
    seen: set[int] = set()
    while waiting and len(seen) < MAX_OBJECTS:
        name, value, depth = waiting.popleft()
        if id(value) in seen or depth > MAX_DEPTH or issubclass(type(value), Mirrored):
            continue
        seen.add(id(value))
        if issubclass(type(value), nn.Module):
            yield from ((name, tensor) for tensor in _tensors_of(value) if type(tensor) in _PLAIN)
            waiting.extend((name, part, depth) for part in _attributes(value).get("_modules", {}).values())
            continue
        for inner, part in _parts(value):
            if not issubclass(type(part), torch.Tensor):
                is_global = type(value) is types.FunctionType
                path = inner if is_global or not inner else f"{name}.{inner}"
                waiting.append((path or name, part, depth + 1))
            elif type(part) in _PLAIN and issubclass(type(value), _CONTAINERS) and depth and part.numel() > 1:
                yield name, part


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object has or names, with its name; empty: it has none of its own."""
    kind = type(value)  # isinstance, len and so on would call what the user's class may have in their place
    if kind is types.MethodType:
        yield "", value.__func__
        yield from _attributes(value.__self__).items()
    elif kind is types.FunctionType:
        yield from _named_by(value)
    elif kind is functools.partial:
        yield from (("", part) for part in (value.func, *value.args, *value.keywords.values()))
    elif issubclass(kind, _CONTAINERS):
        base = next(each for each in _CONTAINERS if issubclass(kind, each))
        if base.__len__(value) <= MAX_OBJECTS:  # a copy, because another thread may change it
            yield from (("", part) for part in list(dict.values(value) if base is dict else base.__iter__(value)))
    elif not issubclass(kind, type | types.ModuleType) and kind.__module__.split(".")[0] not in _LIBRARIES:
        yield from _attributes(value).items()


def _attributes(value: Any) -> dict[str, Any]:
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}


def _tensors_of(module: nn.Module) -> Iterator[Any]:
    own = _attributes(module)  # those of a lazy one, or one that is not initialized, may be missing
    yield from (*own.get("_parameters", {}).values(), *own.get("_buffers", {}).values())


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
