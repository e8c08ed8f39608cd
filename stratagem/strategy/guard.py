"""Clipping and the NaN policy where the optimizer runs in the training process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stratagem.errors import NonFiniteGradientError
from stratagem.strategy.base import Preparation


def guard(optimizer: torch.optim.Optimizer, preparation: Preparation, on_skip: Callable[[], None]) -> None:
    """Attaches clipping and the NaN policy to an optimizer that runs in this process on complete gradients."""
    stash: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def before(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([_elements(gradient) for gradient in gradients])
        if not bool(torch.isfinite(norm)):
            if preparation.nan == "error":
                raise NonFiniteGradientError(
                    "expected finite gradients, got NaN or Inf; nothing was applied. Lower the learning rate, look at "
                    'the loss, or call prepare(nan="skip") to skip such updates.'
                )
            stash.extend((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None)
            for parameter, _gradient in stash:
                parameter.grad = None
            on_skip()
        elif preparation.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, preparation.clip_norm, norm)

    def after(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in stash:
            parameter.grad = gradient
        stash.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _elements(gradient: torch.Tensor) -> torch.Tensor:
    """What a gradient has that may not be zero: torch has no norm of sparse tensors."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """All elements that may not be zero; of a sparse gradient, which may name a row twice, the sums."""
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
