"""Clipping and the NaN policy where the optimizer runs in the training process."""

from __future__ import annotations

import cmath
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stratagem.errors import NonFiniteGradientError
from stratagem.strategy.preparation import Preparation


def guard(optimizer: torch.optim.Optimizer, preparation: Preparation, on_skip: Callable[[], None]) -> None:
    """Attaches clipping and the NaN policy to an optimizer that runs in this process on complete gradients."""
    stash: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def before(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm: torch.Tensor | None = None
        if preparation.clip_norm is None:
            is_finite = _are_finite(gradients)
        else:
            norm = torch.nn.utils.get_total_norm([_values(gradient) for gradient in gradients])
            is_finite = bool(torch.isfinite(norm))
        if not is_finite:
            if preparation.nan == "error":
                raise NonFiniteGradientError(
                    "expected finite gradients, got NaN or Inf; nothing was applied. Lower the learning rate, look at "
                    'the loss, or call prepare(nan="skip") to skip such updates.'
                )
            stash.extend((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None)
            for parameter, _gradient in stash:
                parameter.grad = None
            on_skip()
        elif preparation.clip_norm is not None and norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, preparation.clip_norm, norm)

    def after(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in stash:
            parameter.grad = gradient
        stash.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _are_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether no element is NaN or Inf: then their sum is not either, and it is had at half the price of a norm."""
    sums = [_values(each).sum(dtype=torch.promote_types(each.dtype, torch.float32)) for each in gradients]
    if all(each.device.type == "cpu" for each in sums):
        return all(cmath.isfinite(each.item()) for each in sums)
    # One wait for the device, not one for each.
    return bool(torch.isfinite(torch.stack([each.to(sums[0].device) for each in sums])).all())


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """All elements that may not be zero; of a sparse gradient, which may name a row twice, the sums."""
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
