"""Losses by name: functionals of torch, and what Keras defines, as functions (outputs, targets, reduction)."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

import torch
from torch.nn import functional

KERAS_EPSILON = 1e-7
"""How near to 0 and 1 a probability counts as it is, in Keras's losses."""


def of_probabilities(outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross-entropy of the outputs of a softmax."""
    logarithms = outputs.clamp(KERAS_EPSILON, 1 - KERAS_EPSILON).log()
    return functional.cross_entropy(logarithms, targets, reduction=reduction)


def of_binary_probabilities(outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross-entropy of the outputs of a sigmoid."""
    near = outputs.clamp(KERAS_EPSILON, 1 - KERAS_EPSILON)
    return functional.binary_cross_entropy(near, targets, reduction=reduction)


def _averaged(values: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(values)
    def loss(outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        found = values(outputs, targets)
        return found if reduction == "none" else found.mean()

    return loss


@_averaged
def _relative(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 100 * (outputs - targets).abs() / targets.abs().clamp_min(KERAS_EPSILON)


@_averaged
def _logarithmic(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    near = (each.clamp_min(KERAS_EPSILON).log1p() for each in (outputs, targets))
    return (next(near) - next(near)) ** 2


def _rows(given: torch.Tensor) -> torch.Tensor:
    return given.unsqueeze(1) if given.dim() == 1 else given


@_averaged
def _divergence(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    outputs, targets = (_rows(each).clamp(KERAS_EPSILON, 1) for each in (outputs, targets))
    return (targets * (targets / outputs).log()).sum(-1)


def _short(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """By how much outputs miss the margin of 1; the targets are -1 and 1, or 0 and 1."""
    return (1 - torch.where(targets == 0, -1, targets) * outputs).clamp_min(0)


@_averaged
def _squared_hinge(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return _short(outputs, targets) ** 2


@_averaged
def _log_cosh(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    far = outputs - targets
    return far + functional.softplus(-2 * far) - math.log(2)


@_averaged
def _focal(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs + targets - 2 * outputs * targets) ** 2 * of_binary_probabilities(outputs, targets, "none")


@_averaged
def _away(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -functional.cosine_similarity(_rows(outputs), _rows(targets), dim=-1)


hinge = _averaged(_short)
_TABLE: tuple[tuple[Callable[..., torch.Tensor], tuple[str, ...]], ...] = (
    (functional.cross_entropy, ("cross_entropy",)),
    (of_probabilities, ("sparse_categorical_crossentropy", "categorical_crossentropy")),
    (functional.binary_cross_entropy_with_logits, ("bce_with_logits", "binary_cross_entropy_with_logits")),
    (functional.binary_cross_entropy, ("bce", "binary_cross_entropy")),
    (of_binary_probabilities, ("binary_crossentropy",)),
    (functional.nll_loss, ("nll", "nll_loss")),
    (functional.mse_loss, ("mse", "mse_loss", "mean_squared_error")),
    (functional.l1_loss, ("mae", "l1", "l1_loss", "mean_absolute_error")),
    (functional.smooth_l1_loss, ("smooth_l1", "smooth_l1_loss")),
    (functional.huber_loss, ("huber", "huber_loss")),
    (_relative, ("mape", "mean_absolute_percentage_error")),
    (_logarithmic, ("msle", "mean_squared_logarithmic_error")),
    (_divergence, ("kld", "kl_divergence")),
    (functools.partial(functional.poisson_nll_loss, log_input=False, eps=KERAS_EPSILON), ("poisson",)),
    (hinge, ("hinge",)),
    (_squared_hinge, ("squared_hinge",)),
    (_log_cosh, ("log_cosh",)),
    (_focal, ("binary_focal_crossentropy",)),
    (_away, ("cosine_similarity",)),
)
NAMED = {name: function for function, names in _TABLE for name in names}
OF_CLASSES = (functional.cross_entropy, of_probabilities, functional.nll_loss)
BINARY = (functional.binary_cross_entropy, of_binary_probabilities, _focal)
OF_SCORES = (functional.binary_cross_entropy_with_logits, hinge, _squared_hinge)
"""One output is above 0 for a positive answer."""
DISTANCES = (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss)
"""Of outputs and targets of one form; where their forms differ, torch compares each example with each."""


def snake(name: str) -> str:
    """The name that Keras gives a class: "MeanSquaredError" is "mean_squared_error"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
