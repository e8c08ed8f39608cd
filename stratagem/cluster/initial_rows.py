"""How a table on parameter servers begins, as data: the holder of a row makes its values. Pure, no I/O."""

from __future__ import annotations

import dataclasses
from typing import Literal

Distribution = Literal["normal", "uniform", "constant", "assigned"]


@dataclasses.dataclass(frozen=True)
class InitialRows:
    distribution: Distribution
    """Assigned: whoever creates the table sends them."""
    first: float = 0.0
    """Mean, lower bound, or the value."""
    second: float = 0.0
    """Standard deviation, or upper bound."""
    seed: int = 0
    """Below 2 ** 64."""
    zero_row: int | None = None
    """A row that is zero (padding)."""
