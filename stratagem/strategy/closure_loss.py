"""The loss that an optimizer asks its closure for: that of the global batch, on each replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.ring.communicator import Communicator


def share_loss(optimizer: torch.optim.Optimizer, communicator: Communicator, weight: Callable[[], Weight]) -> None:
    """LBFGS ends its iterations and chooses its steps by the loss: by its own loss each replica would go its own way.

    Args:
        optimizer: of one replica.
        communicator: of that replica; each time the closure was called, all reduce its loss.
        weight: of the replica's gradient, and so of its loss.
    """

    def before(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs["closure"] if kwargs else args[-1]

        def shared() -> torch.Tensor:
            loss, own = torch.as_tensor(closure()).detach(), weight()
            told = own.scale if own.numerator is None else own.numerator
            parts = [float(loss) * own.scale if own.scale else 0.0, told]
            total, divisor = communicator.all_reduce(torch.tensor(parts, dtype=torch.float64)).tolist()
            is_mean = own.is_share or own.numerator is not None
            return loss.new_tensor(total / divisor if is_mean else total)

        return (args, {"closure": shared}) if kwargs else ((*args[:-1], shared), kwargs)

    optimizer.register_step_pre_hook(before)
