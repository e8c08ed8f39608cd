"""Prepared optimizers, GradScalers and schedulers where one process has several replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import lr_scheduler

from stratagem.errors import ConfigurationError
from stratagem.strategy.replicas.mirrored import Home, Mirrored, copies_to_change, current
from stratagem.strategy.replicas.replica_threads import current_replica


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
            "a GradScaler that was not prepared keeps one book for all replicas. Write model, optimizer, scaler = "
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
