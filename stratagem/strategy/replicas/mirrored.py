"""One name for an object that every replica has a copy of: a model, an optimizer, a GradScaler, a scheduler."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.optim import lr_scheduler

from stratagem.errors import ConfigurationError
from stratagem.strategy.replicas.replica_threads import current_replica

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
"""What cannot be changed by whoever is given it."""
_CHANGING_NOTHING = {"__call__", "__dir__", "__getstate__", "__reduce__", "__reduce_ex__", "__repr__", "__str__"}
"""Special methods that leave what code outside of replicas could change as it is."""

Meet = Callable[[str, Any, Callable[[list[Any]], Sequence[Any]]], Any]
"""All replicas come together: :meth:`stratagem.strategy.replicas.replica_threads.ReplicaThreads.meet`."""


class Home(Protocol):
    """Where a mirrored object belongs."""

    which: Callable[[], int | None]
    """The local replica that asks; None: the code outside of replicas."""
    unusable: dict[int, str]
    """Why replicas cannot use an object, by the identity of the original."""

    def touch(self) -> None:
        """Code outside of replicas got hold of something that it may change without a trace."""


class Mirrored:
    """Stands for its copy on the replica that asks; outside of replicas for that of replica 0, the user's own object.

    To Python it is of the user's class: ``isinstance``, attributes, calls, ``len``, equality and ``repr`` are those of
    the copy. Deep copies and pickles of it are plain objects that know nothing of replicas. ``torch.compile`` cannot
    take it: what is compiled would be one replica's.
    """

    __slots__ = ("__weakref__", "_mirrored_copies", "_mirrored_home")

    harmless: ClassVar[frozenset[str]] = frozenset()
    """Attributes that let code outside of replicas change nothing that is not seen elsewhere."""

    _mirrored_copies: Sequence[Any]
    _mirrored_home: Home

    def __init__(self, copies: Sequence[Any], home: Home, **more: Any) -> None:
        for name, value in {"copies": copies, "home": home, **more}.items():
            object.__setattr__(self, f"_mirrored_{name}", value)

    @property  # type: ignore[misc]  # isinstance asks for it; nobody sets it
    def __class__(self) -> type:
        return type(self._mirrored_copies[0])

    def __getattr__(self, name: str) -> Any:
        value = getattr(current(self), name)
        if name not in self.harmless and not isinstance(value, _PLAIN) and self._mirrored_home.which() is None:
            self._mirrored_home.touch()
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        target = current(self)
        setattr(target, name, value)
        if isinstance(getattr(type(target), name, None), property) and self._mirrored_home.which() is None:
            self._mirrored_home.touch()

    def __delattr__(self, name: str) -> None:
        delattr(current(self), name)

    def __eq__(self, other: object) -> bool:
        return original(other) is self._mirrored_copies[0]

    def __hash__(self) -> int:
        return hash(self._mirrored_copies[0])

    def __copy__(self) -> Any:
        return copy.copy(current(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(current(self), memo)


def current(mirrored: Mirrored) -> Any:
    """The copy on the replica that asks."""
    home, copies = mirrored._mirrored_home, mirrored._mirrored_copies
    if (replica := home.which()) is None:
        return copies[0]
    if home.unusable and (why := home.unusable.get(id(copies[0]))):
        raise ConfigurationError(why)
    return copies[replica]


def copies_of(mirrored: Mirrored) -> Sequence[Any]:
    return mirrored._mirrored_copies


def copies_to_change(mirrored: Mirrored) -> Iterator[Any]:
    """The copy on the replica that asks; outside of replicas every copy."""
    if mirrored._mirrored_home.which() is None:
        yield from mirrored._mirrored_copies
    else:
        yield current(mirrored)


def original(item: Any) -> Any:
    """The object that a mirrored one was made of, which is replica 0's; anything else as it is."""
    return item._mirrored_copies[0] if isinstance(item, Mirrored) else item


def mirrored(kind: type[Mirrored], copies: Sequence[Any], home: Home, **more: Any) -> Any:
    """Makes the name for ``copies``: a ``kind`` that also has the special methods of their class, and ``more`` in its
    slots, whose names begin with ``_mirrored_``."""
    kinds: tuple[Any, Any] = (kind, type(copies[0]))
    return _with_special_methods(*kinds)(copies, home, **more)


@functools.cache
def _with_special_methods(kind: Any, wrapped: Any) -> Any:
    """Python looks for special methods in the type alone, so they cannot be found through ``__getattr__``."""
    body: dict[str, Any] = {"__slots__": (), "__doc__": wrapped.__doc__, "__module__": wrapped.__module__}
    taken = {*dir(kind), "__del__", "__set_name__", "__setstate__"} - _CHANGING_NOTHING
    for name in dir(wrapped):
        if name.startswith("__") and name.endswith("__") and name not in taken and callable(getattr(wrapped, name)):
            body[name] = _forwarding(name)
    body["__qualname__"] = wrapped.__qualname__
    return type(wrapped.__name__, (kind,), body)


def _forwarding(name: str) -> Callable[..., Any]:
    def forward(self: Mirrored, *args: Any, **kwargs: Any) -> Any:
        return Mirrored.__getattr__(self, name)(*args, **kwargs)

    def call(self: Mirrored, *args: Any, **kwargs: Any) -> Any:
        return getattr(current(self), name)(*args, **kwargs)

    chosen = call if name in _CHANGING_NOTHING else forward
    chosen.__name__ = name
    return chosen


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
        raise ConfigurationError("a prepared model cannot be compiled: only replica 0's copy would be")

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


@dataclasses.dataclass(eq=False, repr=False)
class OnlyReplica:
    """Forward pre-hook that refuses a replica's module to the other replicas (docs/protocol.md 16)."""

    _replica: int
    _which: Callable[[], int | None]

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
    given = "the object that was given to strategy.prepare, or a part of a model that was taken outside of the step"
    what = "an object that it kept" if owner else given
    whose, own = ("all", "") if owner is None else (f"replica {owner}", ", which is each replica's own")
    return ConfigurationError(
        f"replica {here} {did} of {whose}: the step uses {what}; use what strategy.prepare returned{own}"
    )


def taken_outside(who: str, what: str, owner: str) -> ConfigurationError:
    """The error for using in a step what is another replica's, or no replica's own."""
    return ConfigurationError(
        f"{who} used {what} of {owner}: what is taken from a model outside of the step "
        "(w = model[0].weight) is not each replica's own. Take it from the model inside"
    )


class MirroredOptimizer(Mirrored):
    """Stands for an optimizer (see :class:`Mirrored`).

    A step outside of replicas is made by replica 0; the others have its result when they run again.
    """

    __slots__ = ("_mirrored_step",)

    harmless = frozenset({"defaults", "param_groups", "state_dict"})

    _mirrored_step: Callable[..., Any]

    def __init__(self, copies: Sequence[Any], home: Home, **more: Any) -> None:
        super().__init__(copies, home, step=self._mirrored_own_step, **more)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a GradScaler asks; one that is prepared asks the optimizer of its replica."""
        raise ConfigurationError(
            "a GradScaler that was not prepared keeps one state for all replicas. Write model, optimizer, scaler = "
            "strategy.prepare(model, optimizer, scaler), or use bfloat16 autocast, which needs no scaling"
        )

    @property
    def step(self) -> Callable[..., Any]:
        """Makes a step. A scheduler that is built on a prepared optimizer puts its counter around it."""
        return self._mirrored_step

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "step":
            object.__setattr__(self, "_mirrored_step", value)
        else:
            Mirrored.__setattr__(self, name, value)
            if name == "state" and self._mirrored_home.which() is None:
                self._mirrored_home.touch()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """On every replica, when called outside of them."""
        for optimizer in copies_to_change(self):
            optimizer.zero_grad(set_to_none)

    def _mirrored_own_step(self, *args: Any, **kwargs: Any) -> Any:
        return current(self).step(*args, **kwargs)


class MirroredScaler(Mirrored):
    """Stands for a ``torch.amp.GradScaler``. What one replica finds to be Inf or NaN makes all skip the step."""

    __slots__ = ("_mirrored_largest", "_mirrored_optimizer_of")

    harmless = frozenset({"get_scale", "is_enabled", "scale", "state_dict"})

    _mirrored_largest: Callable[[torch.Tensor], torch.Tensor]
    """Of a tensor of each replica, elementwise; all replicas have to call it."""
    _mirrored_optimizer_of: Callable[[Any], torch.optim.Optimizer]
    """The copy of an optimizer on the replica that asks."""

    def unscale_(self, optimizer: Any) -> None:
        self._refuse_outside("unscale_")
        current(self).unscale_(self._mirrored_optimizer_of(optimizer))

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Steps this replica's optimizer if all replicas have finite gradients."""
        self._refuse_outside("step")
        scaler, own = current(self), self._mirrored_optimizer_of(optimizer)
        if scaler.is_enabled():
            state = scaler._per_optimizer_states[id(own)]
            if state["stage"] is OptState.READY:
                scaler.unscale_(own)
            for found in state["found_inf_per_device"].values():
                found.copy_(self._mirrored_largest(found))
        return scaler.step(own, *args, **kwargs)

    def _refuse_outside(self, what: str) -> None:
        if self._mirrored_home.which() is None:
            raise ConfigurationError(f"a prepared GradScaler: call {what}(optimizer) in the step, inside strategy.run")


class MirroredScheduler(Mirrored):
    """Stands for a scheduler, of which there is only one: it moves the settings of replica 0's optimizer.

    The other replicas take them over in their next step, so that every step is made with the same settings everywhere.
    """

    __slots__ = ("_mirrored_optimizer",)

    _mirrored_optimizer: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(current(self), name)  # what a scheduler moves is carried anyway

    @property
    def optimizer(self) -> Any:
        return self._mirrored_optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """In a step of several replicas, done by replica 0 alone."""
        if not current_replica():
            current(self).step(*args, **kwargs)


@functools.cache
def watch_schedulers() -> None:
    """From now on torch's schedulers, also those that are not prepared, move once in a step of several replicas."""
    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and "step" in vars(kind):
            kind.step = _of_the_first_replica(kind.step)  # type: ignore[method-assign]


def _of_the_first_replica(step: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(step)
    def once(scheduler: lr_scheduler.LRScheduler, *args: Any, **kwargs: Any) -> None:
        if not current_replica():
            step(scheduler, *args, **kwargs)

    return once
