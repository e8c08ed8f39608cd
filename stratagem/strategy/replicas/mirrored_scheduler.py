"""A scheduler where one process has several replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import lr_scheduler

from stratagem.strategy.replicas.mirrored import Mirrored, current
from stratagem.strategy.replicas.replica_threads import current_replica


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
        """The prepared optimizer."""
        return self._mirrored_optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """In a step of several replicas, done by replica 0 alone."""
        if self._mirrored_home.acts_for_all():
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
