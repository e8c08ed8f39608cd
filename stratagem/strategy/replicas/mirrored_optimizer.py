"""A prepared optimizer where one process has several replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stratagem.strategy.replicas.mirrored import Home, Mirrored, copies_to_change, current


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
    def step(self) -> Callable[..., Any]:
        """Makes a step. A scheduler that is built on a prepared optimizer puts its counter around it."""
        return self._mirrored_step

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "step":
            object.__setattr__(self, "_mirrored_step", value)
        else:
            Mirrored.__setattr__(self, name, value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """On every replica, when called outside of them."""
        for optimizer in copies_to_change(self):
            optimizer.zero_grad(set_to_none)

    def _mirrored_own_step(self, *args: Any, **kwargs: Any) -> Any:
        return current(self).step(*args, **kwargs)
