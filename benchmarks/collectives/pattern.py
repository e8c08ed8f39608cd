"""What the ranks reduce: known numbers, and the sum that must come out. numpy only, the peers' jobs use it too."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

PERIOD = 65_521
"""The pattern repeats after so many elements: a prime, so that no chunk of a ring can take another one's place."""
TOLERANCES = {"float32": 2.0**-22, "bfloat16": 2.0**-8, "float16": 2.0**-10}
"""Relative error that one rounding to the wire's dtype may make; a sum of N ranks may make N."""


class WrongSumError(Exception):
    """A rank holds something else than the sum of all ranks: its time says nothing."""


def contribution(rank: int, num_elements: int) -> Array:
    """What ``rank`` brings: seeded numbers in [1, 2), so that a missing or doubled rank is far outside any rounding."""
    return np.resize(_period(rank), num_elements)


def check_sum(result: Array, size: int, wire: str) -> None:
    """Refuses a result that is not the sum over ``size`` ranks.

    Raises:
        WrongSumError: some element is further off than roundings to the dtype ``wire`` explain.
    """
    expected = np.stack([_period(rank) for rank in range(size)]).astype(np.float64).sum(axis=0)
    tolerance = size * TOLERANCES[wire]
    for start in range(0, result.size, PERIOD):
        part = result[start : start + PERIOD]
        error = np.abs(part / expected[: part.size] - 1)
        if not (error <= tolerance).all():  # NaN is no sum either
            worst = int(np.argmax(np.where(np.isnan(error), np.inf, error)))
            raise WrongSumError(
                f"expected {expected[worst]:.7g} within {tolerance:.2g} at element {start + worst} of {result.size}, "
                f"the sum over {size} ranks, got {part[worst]:.7g}"
            )


def checksum(result: Array) -> int:
    """32 bits over the bits of the result; equal on all ranks when they hold the same."""
    return zlib.crc32(result.data.cast("B"))


def _period(rank: int) -> Array:
    return np.random.default_rng(rank).uniform(1, 2, PERIOD).astype(np.float32)
