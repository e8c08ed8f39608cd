"""A prepared model where one process has several replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

from stratagem.errors import ConfigurationError
from stratagem.strategy.replicas.mirrored import Mirrored, copies_to_change, current


class MirroredModule(Mirrored):
    """Stands for a model (see :class:`Mirrored`)."""

    __slots__ = ()

    harmless = frozenset(
        {"__call__", "__contains__", "__len__", "eval", "forward", "requires_grad_", "state_dict", "train"}
    )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """On every replica, when called outside of them."""
        for module in copies_to_change(self):
            module.zero_grad(set_to_none)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Cannot be done any more."""
        raise ConfigurationError("a prepared model cannot be compiled: what is compiled would be replica 0's alone")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = copy.deepcopy(current(self), memo)
        drop_checks(twin)
        return twin


def _returning_self(name: str) -> Callable[..., Any]:
    def call(self: MirroredModule, *args: Any, **kwargs: Any) -> Any:
        Mirrored.__getattr__(self, name)(*args, **kwargs)
        return self

    call.__name__, call.__doc__ = name, getattr(nn.Module, name).__doc__
    return call


_RETURNING_SELF = "apply bfloat16 cpu cuda double eval float half requires_grad_ share_memory to to_empty train type"
for _name in _RETURNING_SELF.split():
    setattr(MirroredModule, _name, _returning_self(_name))


class OnlyReplica:
    """Forward pre-hook that refuses a replica's module to the other replicas (docs/protocol.md 16)."""

    def __init__(self, replica: int, which: Callable[[], int | None]) -> None:
        self._replica = replica
        self._which = which

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        here = self._which()
        if here is not None and here != self._replica:
            raise foreign(f"called {type(module).__name__}", here, self._replica)

    def __reduce__(self) -> Any:
        # In a copy or a pickle, a hook that does nothing, and needs nothing of ours to be read.
        return getattr, (nullcontext(), "__exit__")


def drop_checks(model: nn.Module) -> None:
    """Takes the checks, and what they are in a copy, off a model: one that is to be compiled they would cut into
    pieces. Whoever uses it in another replica is still found out, in backward.
    """
    for part in model.modules():
        for key, hook in list(part._forward_pre_hooks.items()):
            if isinstance(hook, OnlyReplica) or getattr(hook, "__func__", None) is nullcontext.__exit__:
                del part._forward_pre_hooks[key]


def foreign(did: str, here: int, owner: int | None) -> ConfigurationError:
    """The error for using what is another replica's, or (None) that of all."""
    what = "an object that it kept" if owner else "the object that was given to strategy.prepare"
    whose, own = ("all", "") if owner is None else (f"replica {owner}", ", which is each replica's own")
    return ConfigurationError(
        f"replica {here} {did} of {whose}: the step uses {what}; use what strategy.prepare returned{own}"
    )
