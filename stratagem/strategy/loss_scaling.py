"""Losses divided by the global batch, by the names and rules of ``tf.nn`` (SEMANTICS.md, "Loss scaling")."""

from __future__ import annotations

import torch

from stratagem.errors import ConfigurationError
from stratagem.strategy.base import current_strategy


def compute_average_loss(
    per_example_loss: torch.Tensor, sample_weight: torch.Tensor | None = None, global_batch_size: float | None = None
) -> torch.Tensor:
    """The sum of a replica's losses over the size of the GLOBAL batch: for ``prepare(gradients="sum")``.

    The sum of it over all replicas is the mean over the global batch.

    Args:
        per_example_loss: one for each example, any shape.
        sample_weight: multiplies them; same shape, or one that broadcasts to it.
        global_batch_size: examples of all replicas; None: this replica's times the replicas in sync, which is right
            where all have the same number.

    Returns:
        a scalar.
    """
    if sample_weight is not None:
        per_example_loss = per_example_loss * sample_weight
    if global_batch_size is None:
        if not per_example_loss.dim():
            raise ConfigurationError("compute_average_loss expects a loss for each example, got a number")
        global_batch_size = per_example_loss.shape[0] * current_strategy().num_replicas_in_sync
    if global_batch_size <= 0:
        raise ConfigurationError(f"expected a global batch size above 0, got {global_batch_size!r}")
    return per_example_loss.sum() / global_batch_size


def scale_regularization_loss(regularization_loss: torch.Tensor) -> torch.Tensor:
    """A loss that does not depend on examples, over the replicas in sync: all replicas add it, so it counts once.

    Args:
        regularization_loss: a scalar, or several, which are added up.
    """
    return regularization_loss.sum() / current_strategy().num_replicas_in_sync
