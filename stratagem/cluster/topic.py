"""Names for what workers count and agree on. Pure, no I/O."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Topic:
    """What workers count or agree on: a group ("fit 1", say) and a number in it, the same on every worker."""

    group: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.group}/{self.ordinal}"
