"""Clipping and the NaN policy where the optimizer runs in the training process."""

from __future__ import annotations

from typing import Any

import torch

from stratagem.errors import NonFiniteGradientError
from stratagem.strategy.base import Preparation
from stratagem.worker.step_meter import StepMeter


def guard(optimizer: torch.optim.Optimizer, preparation: Preparation, meter: StepMeter) -> None:
    """Attaches clipping and the NaN policy to an optimizer that runs in this process on complete gradients."""
    stash: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def before(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not bool(torch.isfinite(norm)):
            if preparation.nan == "error":
                raise NonFiniteGradientError(
                    "expected finite gradients, got NaN or Inf; nothing was applied. Lower the learning rate, look at "
                    'the loss, or call prepare(nan="skip") to skip such updates.'
                )
            stash.extend((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None)
            for parameter, _gradient in stash:
                parameter.grad = None
            meter.skipped += 1
        elif preparation.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, preparation.clip_norm, norm)

    def after(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in stash:
            parameter.grad = gradient
        stash.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
