"""A prepared GradScaler where one process has several replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from stratagem.errors import ConfigurationError
from stratagem.strategy.replicas.mirrored import Mirrored, current


class MirroredScaler(Mirrored):
    """Stands for a ``torch.amp.GradScaler``. What one replica finds to be Inf or NaN makes all skip the step."""

    __slots__ = ("_mirrored_largest", "_mirrored_optimizer_of")

    harmless = frozenset({"get_scale", "is_enabled", "scale", "state_dict"})

    _mirrored_largest: Callable[[torch.Tensor], torch.Tensor]
    """Of a tensor of each replica, elementwise; all replicas have to call it."""
    _mirrored_optimizer_of: Callable[[Any], torch.optim.Optimizer]
    """The copy of an optimizer on the replica that asks."""

    def unscale_(self, optimizer: Any) -> None:
        """Divides the gradients of this replica's optimizer by the scale."""
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
