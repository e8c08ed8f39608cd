"""The optimizers of tables: they change rows that have a gradient and no other, as torch does with sparse gradients.

A row that a batch does not use keeps its weights and slots; the number of updates is the table's. Momentum and weight
decay would have to change every row in every update: they are refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stratagem.errors import UnsupportedOptimizerError

Hyper = Mapping[str, Any]
Update = Callable[[Hyper, int, torch.Tensor, Sequence[torch.Tensor], torch.Tensor], None]
"""Changes weights and slots in place: hyper-parameters, number of this update (from 1), weights, slots, gradient."""


def _sgd(hyper: Hyper, step: int, weights: torch.Tensor, slots: Sequence[torch.Tensor], gradient: torch.Tensor) -> None:
    weights.add_(gradient, alpha=-_rate(hyper))


def _adagrad(
    hyper: Hyper, step: int, weights: torch.Tensor, slots: Sequence[torch.Tensor], gradient: torch.Tensor
) -> None:
    (total,) = slots
    total.addcmul_(gradient, gradient)
    rate = _rate(hyper) / (1 + (step - 1) * hyper["lr_decay"])
    weights.addcdiv_(gradient, total.sqrt().add_(hyper["eps"]), value=-rate)


def _sparse_adam(
    hyper: Hyper, step: int, weights: torch.Tensor, slots: Sequence[torch.Tensor], gradient: torch.Tensor
) -> None:
    mean, square = slots
    beta1, beta2 = hyper["betas"]
    mean.lerp_(gradient.neg() if hyper["maximize"] else gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    rate = float(hyper["lr"]) * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    weights.addcdiv_(mean, square.sqrt().add_(hyper["eps"]), value=-rate)


def _rate(hyper: Hyper) -> float:
    return -float(hyper["lr"]) if hyper["maximize"] else float(hyper["lr"])


@dataclasses.dataclass(frozen=True)
class RowRule:
    """How one torch.optim class treats tables."""

    update: Update
    must_be_off: tuple[str, ...] = ()
    """Hyper-parameters that have to be 0 or False, because they concern every row."""


ROW_RULES: Mapping[str, RowRule] = {
    "SGD": RowRule(_sgd, ("momentum", "weight_decay", "nesterov")),
    "Adagrad": RowRule(_adagrad, ("weight_decay",)),
    "SparseAdam": RowRule(_sparse_adam),
}
"""By the name of the torch.optim class."""


def check_for_rows(optimizer: str, hyper_parameters: Hyper) -> None:
    """Refuses what cannot be done for the rows of a batch alone.

    Raises:
        UnsupportedOptimizerError: another class, or momentum or weight decay.
    """
    rule = ROW_RULES.get(optimizer)
    if rule is None:
        raise UnsupportedOptimizerError(
            f"the rows of a table cannot be changed by {optimizer}: it changes every row in every update, also those "
            f"that a batch does not use. Give the tables an optimizer of their own, of {', '.join(ROW_RULES)}, or all "
            "parameters one of the first two"
        )
    on = [name for name in rule.must_be_off if hyper_parameters.get(name)]
    if on:
        raise UnsupportedOptimizerError(
            f"{optimizer} with {on[0]}={hyper_parameters[on[0]]} changes every row of a table in every update, also "
            f"those that a batch does not use. Set {on[0]}=0, or give the tables an optimizer of their own"
        )
