"""Clipping, and the handling of NaN and Inf, before an optimizer of this process or of a ps takes gradients."""

from __future__ import annotations

import cmath
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from stratagem.arguments import above_zero, some_of, warn_once
from stratagem.errors import ConfigurationError, NonFiniteGradientError
from stratagem.measuring import measures
from stratagem.worker.step_meter import StepMeter

logger = logging.getLogger(__name__)

SMALL_ELEMENTS = 4096
"""Of a gradient that is looked at together with others."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Those of all its groups, in the order by which its ``state_dict()`` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@dataclasses.dataclass(frozen=True)
class GradientPolicy:
    """How gradients are treated before they are applied. Raises ConfigurationError: an argument is out of its range."""

    gradients: Literal["mean", "sum"] = "mean"
    """Losses are means over examples, or already divided by the global batch."""
    clip_norm: float | None = None
    """Largest global norm of an optimizer's gradient; None leaves it alone."""
    nan: Literal["error", "skip"] = "error"
    """What a NaN or Inf in a gradient does: raise, or skip the update and count it."""

    def __post_init__(self) -> None:
        if self.gradients not in ("mean", "sum"):
            raise ConfigurationError(f"expected gradients='mean' or 'sum', got {self.gradients!r}")
        if self.nan not in ("error", "skip"):
            raise ConfigurationError(f"expected nan='error' or 'skip', got {self.nan!r}")
        above_zero(clip_norm=self.clip_norm)

    def factor(self, norm: float) -> float:
        """What a gradient of this norm is multiplied by."""
        return 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + 1e-6))


def are_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether no element is NaN or Inf: then their sum is not either, and it is had at half the price of a norm."""
    small: list[torch.Tensor] = []  # and of the CPU: they are put together, as a call for each costs more than a copy
    sums: list[torch.Tensor] = []
    on_gpu: dict[torch.device, list[torch.Tensor]] = {}
    for each in gradients:
        values = each if each.layout is torch.strided else _values(each)
        if values.is_cpu and values.numel() <= SMALL_ELEMENTS:
            small.append(values)
        elif values.is_cuda and values.is_floating_point():
            on_gpu.setdefault(values.device, []).append(values)
        else:
            sums.append(_sum(values))
    if small:
        sums.append(_sum(torch.cat([each.reshape(-1) for each in small]) if len(small) > 1 else small[0]))
    # Two kernels and one wait for a device, not one for each gradient.
    sums += [torch.stack(torch._foreach_norm(each, math.inf)).amax() for each in on_gpu.values()]
    return all([cmath.isfinite(each.item()) for each in sums])


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of dense gradients together. Those of float16 may have one that float16 cannot hold."""
    half = torch.float16
    wide = [torch.linalg.vector_norm(each, dtype=torch.float32) if each.dtype is half else each for each in gradients]
    return torch.nn.utils.get_total_norm(wide)


def _sum(values: torch.Tensor) -> torch.Tensor:
    if values.dtype is torch.float32:
        return values.sum()
    return values.sum(dtype=torch.promote_types(values.dtype, torch.float32))


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """All elements that may not be zero; of a sparse gradient, which may name a row twice, the sums."""
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient


def not_finite(where: str = "") -> NonFiniteGradientError:
    """The error to raise; ``where``: in words, which gradients are not."""
    return NonFiniteGradientError(
        f"expected finite gradients, got NaN or Inf{where}; nothing was applied. Lower the learning rate, look at the "
        'loss, or call prepare(nan="skip") to skip and count such updates.'
    )


def skipped(models: Iterable[torch.nn.Module], meter: StepMeter | None) -> None:
    """An update of ``models`` was left out: ``meter`` counts it, which a line tells. What the forward pass wrote into
    buffers stays, as in torch: a NaN in running statistics is there in every later step, of which a warning tells,
    once."""
    if meter is not None:
        meter.skipped += 1
        logger.warning("skipped an update with a NaN or Inf gradient (%d so far)", meter.skipped)
    buffers = [pair for model in models for pair in model.named_buffers() if pair[1].is_floating_point()]
    if names := [name for name, buffer in buffers if bool(buffer.isnan().any())]:
        warn_once(
            logger,
            f"an update was skipped, but the forward pass left NaN in {some_of(names)}, which no later "
            "batch removes: look at the inputs before the forward pass, and leave out what is not finite; reset the "
            "buffers (reset_running_stats() of a BatchNorm)",
        )


def guard(
    optimizer: torch.optim.Optimizer,
    policy: GradientPolicy,
    on_skip: Callable[[], None],
    meter: StepMeter | None = None,
) -> None:
    """Attaches clipping and the NaN policy to an optimizer that runs in this process on complete gradients, and tells
    ``meter`` when it does. A closure brings its gradients in the step: they are looked at each time it was called."""
    stash: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def before(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if meter is not None:
            meter.computes(measures.OPTIMIZER)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args begin with the optimizer itself
        if closure is None:
            judge()
            return None

        def judged() -> Any:
            loss = closure()
            judge()
            return loss

        return (args, {**kwargs, "closure": judged}) if "closure" in kwargs else ((args[0], judged), kwargs)

    def judge() -> None:
        parameters = parameters_of(optimizer)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm: torch.Tensor | None = None
        if policy.clip_norm is None:
            is_finite = are_finite(gradients)
        else:
            norm = total_norm([_values(gradient) for gradient in gradients])
            is_finite = bool(torch.isfinite(norm))
        if not is_finite:
            if policy.nan == "error":
                raise not_finite()
            stash.extend((parameter, parameter.grad) for parameter in parameters if parameter.grad is not None)
            for parameter, _gradient in stash:
                parameter.grad = None
            on_skip()
        elif policy.clip_norm is not None and norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, policy.clip_norm, norm)

    def after(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in stash:
            parameter.grad = gradient
        stash.clear()
        if meter is not None:
            meter.computes(measures.SCRIPT, after=measures.OPTIMIZER)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
