"""BatchNorm over the examples of all ranks, and the average of buffers that differ (docs/protocol.md 21)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

# The base of all BatchNorm modules; torch's own conversion goes by it too.
from torch.nn.modules.batchnorm import _BatchNorm

from stratagem.arguments import warn_once
from stratagem.cluster.communication import ReduceOp
from stratagem.errors import ConfigurationError
from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.ring.communicator import Communicator

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Sync:
    """The means by which a converted layer reduces. Copies of the model share it."""

    communicator: Communicator
    weight: Callable[[], Weight]
    is_apart: Callable[[], bool]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Sync:
        return self


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose statistics, in training, are those of all ranks' examples together.

    Each forward and each backward is one small all-reduce, so every rank must call the layer, even with an empty share.
    :func:`convert_batch_norm` makes it from a layer and keeps that layer's parameters, buffers and state; outside of
    training it behaves like that layer. Unlike torch's own, it also works on the CPU.
    """

    sync: _Sync

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if (
            not self.training
            or self.sync.communicator.is_alone
            or (not torch.is_grad_enabled() and self.sync.is_apart())
        ):
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} channels in dimension 1, got input of {list(input.shape)}")
        count, mean, variance = _statistics(input, self.sync.communicator)
        if count == 1:
            raise ValueError(f"expected more than 1 value per channel on all ranks together, got {list(input.shape)}")
        if count:
            self._track(count, mean, variance)
        dtype = next((t.dtype for t in (self.weight, self.running_mean) if t is not None), _accumulator(input))
        out = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean.to(dtype), variance.to(dtype), self.eps, count, self.sync
        )
        assert isinstance(out, torch.Tensor)
        return out

    @torch.no_grad()
    def _track(self, count: int, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Moves the running statistics, with the unbiased variance, as BatchNorm does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), factor)
        self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var), factor)


class _SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """Takes the input of ``nn.BatchNorm1d``, and is one."""


class _SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """Takes the input of ``nn.BatchNorm2d``, and is one."""


class _SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """Takes the input of ``nn.BatchNorm3d``, and is one."""


_CONVERTED: dict[type[_BatchNorm], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: _SyncBatchNorm1d,
    nn.BatchNorm2d: _SyncBatchNorm2d,
    nn.BatchNorm3d: _SyncBatchNorm3d,
}


def convert_batch_norm(
    module: nn.Module,
    communicator: Communicator,
    weight: Callable[[], Weight],
    is_apart: Callable[[], bool] = lambda: False,
) -> None:
    """Makes every BatchNorm in ``module`` take its statistics from all ranks; the layers stay the same objects.
    ``weight``: how much this rank's gradient counts, as the reducer is told; asked in each backward. ``is_apart``:
    whether a forward without gradient is of a batch that is no step's (``update_bn``); asked in each. It takes the
    statistics of what it is given, as one process does. Raises ConfigurationError: a BatchNorm of a class of its own,
    whose forward cannot be known."""
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)]
    for name, layer in layers:
        if not isinstance(layer, SyncBatchNorm) and type(layer) not in _CONVERTED:
            raise ConfigurationError(
                f"sync_batchnorm converts nn.BatchNorm1d, 2d and 3d, but {name or 'the model'} is a "
                f"{type(layer).__name__}; use one of those, or leave sync_batchnorm off (a lazy layer: call the model "
                "once before prepare)"
            )
    for _, layer in layers:
        layer.__class__ = _CONVERTED.get(type(layer), type(layer))
        layer.sync = _Sync(communicator, weight, is_apart)  # type: ignore[assignment]  # not a tensor nor a module


def average_by_examples(models: Sequence[nn.Module], seen: Sequence[int], communicator: Communicator) -> None:
    """Makes the buffers of all ranks equal: floats become averages, integers the maximum. For saving and evaluating.
    ``models``: the same on every rank. ``seen``: examples that each model has seen on this rank, by which its floats
    are weighted; without any they do not count, whatever they are. Before the first batch nobody has seen any, and all
    have the same."""
    everybody = communicator.all_reduce(torch.tensor(seen))
    for model, count, total in zip(models, seen, everybody.tolist(), strict=True):
        _average_buffers(model, float(count) if total else 1.0, communicator)


@torch.no_grad()
def _average_buffers(model: nn.Module, share: float, communicator: Communicator) -> None:
    """One collective for each kind."""
    buffers = list(model.buffers())
    floats = [buffer for buffer in buffers if buffer.is_floating_point()]
    integers = [buffer for buffer in buffers if not buffer.is_floating_point() and not buffer.is_complex()]
    if floats:
        flat = torch.cat([buffer.reshape(-1).double().cpu() for buffer in floats])
        mine = flat * share if share else torch.zeros_like(flat)
        total = communicator.all_reduce(torch.cat([mine, torch.tensor([share], dtype=torch.float64)]))
        if not total[-1]:  # a ring that heals has lost all who had seen any
            raise ConfigurationError("expected a share above 0 on some rank to average buffers with, got 0 on all")
        _scatter(total[:-1] / total[-1], floats)
    if integers:
        flat = torch.cat([buffer.reshape(-1).long().cpu() for buffer in integers])
        _scatter(communicator.all_reduce(flat, ReduceOp.MAX), integers)


def _scatter(flat: torch.Tensor, buffers: list[torch.Tensor]) -> None:
    for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view(buffer.shape))


def _accumulator(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


@torch.no_grad()
def _statistics(x: torch.Tensor, communicator: Communicator) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Values per channel on all ranks, their mean and their biased variance (float64, by channel)."""
    channels = x.shape[1]
    count = x.numel() // channels
    mine = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    if count:
        # Each rank's own mean and variance are exact enough in the dtype of x; only their merging needs float64.
        variance, mean = torch.var_mean(x.to(_accumulator(x)), [d for d in range(x.dim()) if d != 1], correction=0)
        mine[0] = count
        mine[1 : channels + 1] = mean.double() * count
        mine[channels + 1 :] = (variance.double() + mean.double() ** 2) * count
    total = communicator.all_reduce(mine)
    everywhere = int(total[0])
    mean, squares = total[1:].view(2, channels) / max(everywhere, 1)
    return everywhere, mean, (squares - mean**2).clamp_min_(0.0)


class _Once(torch.autograd.Function):
    """An unchanged gradient that cannot be differentiated again: that would need the gradients of other ranks."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *of: torch.Tensor | None) -> torch.Tensor:
        return gradient

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise ConfigurationError(
            "sync_batchnorm=True: a gradient of a gradient (create_graph=True, as for a gradient penalty) cannot go "
            "through a BatchNorm that takes its statistics from all replicas; leave sync_batchnorm out, or use a "
            "GroupNorm or LayerNorm instead"
        )


class _Normalise(torch.autograd.Function):
    """Normalises with statistics of all ranks, which depend on the input of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        eps: float,
        count: int,
        sync: _Sync,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps))
        ctx.count, ctx.sync = count, sync
        if not x.numel():
            return x.clone()
        return functional.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = _Normalise._gradients(ctx, grads)
        if torch.is_grad_enabled():  # create_graph=True
            found = tuple(None if one is None else _Once.apply(one, *grads, *ctx.saved_tensors[:2]) for one in found)  # type: ignore[no-untyped-call]
        return found

    @staticmethod
    @torch.no_grad()
    def _gradients(ctx: Any, grads: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """The loss of the job is the weighted sum of the ranks' losses. A rank propagates the gradient of that, divided
        by its own weight, because the reducer will multiply the gradients of its parameters by it."""
        x, weight, mean, inverse = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.dim() - 2)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        grad = grads[0].to(mean.dtype)
        normal = (x.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)
        of_bias, of_weight = grad.sum(dims), (grad * normal).sum(dims)
        of_x: torch.Tensor | None = None
        if ctx.needs_input_grad[0]:
            scale = ctx.sync.weight().scale
            sums = torch.stack([of_bias, of_weight]).double()
            total = ctx.sync.communicator.all_reduce(sums * scale if scale else torch.zeros_like(sums))
            if scale and x.numel():
                shared = (total / (ctx.count * scale)).to(mean.dtype)
                factor = inverse if weight is None else inverse * weight
                of_x = (grad - shared[0].view(shape) - normal * shared[1].view(shape)) * factor.view(shape)
                of_x = of_x.to(x.dtype)
            else:
                if x.numel() and total.any():
                    warn_once(
                        logger,
                        "set_weight(0) with sync_batchnorm=True: this replica's examples are in the statistics of "
                        "BatchNorm, but no gradient comes back through them, so the weights will not be those of one "
                        "process. Divide a loss of reduction='sum' by max(n, 1), and call set_weight(max(n, 1e-9))",
                    )
                of_x = torch.zeros_like(x)
        return (
            of_x,
            of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            of_bias.to(weight.dtype) if ctx.needs_input_grad[2] else None,
            *[None] * 5,
        )
