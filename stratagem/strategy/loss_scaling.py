"""Losses of all replicas: divided by the global batch, with the names and rules of ``tf.nn`` (docs/semantics.md, "Loss
scaling"), and the loss that an optimizer's closure returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from stratagem.arguments import checked
from stratagem.errors import ConfigurationError
from stratagem.strategy.current import current_strategy
from stratagem.strategy.prepared import Preparation
from stratagem.strategy.replicas.replica_threads import current_replica
from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.ring.communicator import Communicator

_divided: set[int] = set()
"""Backwards that have come through a loss of this module, by torch's number of them, while they run."""


@checked
def compute_average_loss(
    per_example_loss: torch.Tensor, sample_weight: torch.Tensor | None = None, global_batch_size: float | None = None
) -> torch.Tensor:
    """A replica's losses, summed and divided by the size of the GLOBAL batch: for ``prepare(gradients="sum")``.

    Its sum over all replicas is the mean over the global batch. Under ``gradients="mean"``, which would weight
    replicas by their share once more, its ``backward()`` is an error with several replicas.

    Args:
        per_example_loss: one for each example, any shape.
        sample_weight: multiplies them, as in TensorFlow: one for each example, or of a shape that broadcasts to theirs.
        global_batch_size: examples of all replicas; None: this replica's times the replicas in sync, which is right
            if all have the same number.

    Returns:
        a scalar.

    Raises:
        ConfigurationError: a number in place of losses, weights of another shape, or no global batch size to divide by,
            as outside of the step of one of several replicas.
    """
    if not per_example_loss.dim():
        raise ConfigurationError(
            "compute_average_loss expects a loss for each example, got a number: give the loss reduction='none'"
        )
    if sample_weight is not None:
        per_example_loss = per_example_loss * _by_example(sample_weight, per_example_loss.shape)
    if global_batch_size is None:
        global_batch_size = per_example_loss.shape[0] * _num_replicas("compute_average_loss")
    if global_batch_size <= 0:
        raise ConfigurationError(f"expected a global batch size above 0, got {global_batch_size!r}")
    return _watched(per_example_loss.sum() / global_batch_size)


@checked
def scale_regularization_loss(regularization_loss: torch.Tensor) -> torch.Tensor:
    """A loss that does not depend on examples, over the replicas in sync: all replicas add it, so it counts once.

    For ``prepare(gradients="sum")``, like :func:`compute_average_loss`.

    Args:
        regularization_loss: a scalar, or several, which are added.
    """
    return _watched(regularization_loss.sum() / _num_replicas("scale_regularization_loss"))


def refuse_divided(preparation: Preparation) -> None:
    """Called in a backward that reaches prepared parameters; a ConfigurationError where the loss was divided by all
    replicas, and so would its gradient be."""
    if preparation.gradients == "mean" and torch._C._current_graph_task_id() in _divided:
        raise ConfigurationError(
            "a loss from compute_average_loss or scale_regularization_loss is already divided by the global batch size "
            'or the number of replicas, and gradients="mean" (the default of prepare) weights each replica by its '
            'share of the batch again. Prepare with strategy.prepare(model, optimizer, gradients="sum"), or use the '
            "mean over the replica's own examples, loss.mean(), and undivided penalties"
        )


def share_loss(optimizer: torch.optim.Optimizer, communicator: Communicator, weight: Callable[[], Weight]) -> None:
    """LBFGS ends its iterations and chooses its steps by the loss: by its own loss each replica would go its own way.
    So each time the closure of one was called, all reduce the loss, by the ``weight`` that its gradient has."""

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


def _num_replicas(who: str) -> int:
    strategy = current_strategy()
    if len(strategy.local_devices) > 1 and current_replica() is None:
        raise ConfigurationError(
            f"{who} divides a replica's part by the number of replicas, and this code is in none of them: call it in "
            "the step that strategy.run runs. Out here the mean of losses is loss.mean(), and a penalty counts as it is"
        )
    return strategy.num_replicas_in_sync


def _by_example(weight: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Weights along the first axes of losses, where torch would take the last: [n] beside [n, k], [n, 1] beside [n]."""
    if weight.dim() == len(shape) + 1 and weight.shape[-1] == 1:
        weight = weight.squeeze(-1)
    aligned = weight.reshape(*weight.shape, *[1] * (len(shape) - weight.dim()))
    try:
        return aligned.expand(shape)
    except RuntimeError:
        raise ConfigurationError(
            f"expected a sample_weight for each of the losses, of shape {list(shape)}, got {list(weight.shape)}"
        ) from None


def _watched(loss: torch.Tensor) -> torch.Tensor:
    if loss.requires_grad and current_strategy().num_replicas_in_sync > 1:
        loss.register_hook(_in_backward)
    return loss


def _in_backward(_: torch.Tensor) -> None:
    task = torch._C._current_graph_task_id()
    if task not in _divided:
        _divided.add(task)
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_divided.discard, task))
