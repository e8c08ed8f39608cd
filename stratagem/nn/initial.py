"""Initial values of tables: as data, because the parameter servers make them."""

from __future__ import annotations

import dataclasses
import math

import torch

from stratagem.arguments import checked
from stratagem.cluster.initial_rows import InitialRows
from stratagem.errors import ConfigurationError


@checked
@dataclasses.dataclass(frozen=True)
class Normal:
    """Normally distributed numbers."""

    mean: float = 0.0
    std: float = 1.0


@checked
@dataclasses.dataclass(frozen=True)
class Uniform:
    """Numbers from ``low`` up to ``high``."""

    low: float
    high: float


@checked
@dataclasses.dataclass(frozen=True)
class Constant:
    """The same number everywhere."""

    value: float = 0.0


Init = Normal | Uniform | Constant


def initial_rows(
    init: Init, seed: int | None, zero_row: int | None, generator: torch.Generator | None = None
) -> InitialRows:
    """What makes the rows, of which ``zero_row`` is zero. Without a ``seed`` it is drawn from the generator, or torch's
    own, as torch's layers draw weights. Raises ConfigurationError: no distribution of this module, bounds in the wrong
    order, a seed out of range."""
    drawn = int(torch.randint(1 << 62, (), device="cpu", generator=generator).item()) if seed is None else int(seed)
    if not 0 <= drawn < 1 << 64:
        raise ConfigurationError(f"expected a seed of at least 0 and below 2**64, got {drawn}")
    if isinstance(init, Normal) and math.isfinite(init.mean) and 0 <= init.std < math.inf:
        return InitialRows("normal", init.mean, init.std, drawn, zero_row)
    if isinstance(init, Uniform) and -math.inf < init.low <= init.high < math.inf:
        return InitialRows("uniform", init.low, init.high, drawn, zero_row)
    if isinstance(init, Constant) and math.isfinite(init.value):
        return InitialRows("constant", init.value, 0.0, drawn, zero_row)
    raise ConfigurationError(
        "expected init=sg.nn.Normal(mean, std), sg.nn.Uniform(low, high) or sg.nn.Constant(value), finite and in "
        f"order, got {init!r}: a parameter server makes the values, and does not run your code"
    )
