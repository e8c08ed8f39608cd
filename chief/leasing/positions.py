"""Sums and differences of positions: which units, of each pass over each dataset. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from stratagem.cluster.units import Unit, UnitBitmap

Positions = dict[tuple[int, int], UnitBitmap]
"""Units of each (dataset, epoch)."""
_Units = Mapping[tuple[int, int], UnitBitmap]


def units_of(positions: _Units) -> list[Unit]:
    return [Unit(*key, index) for key, bitmap in positions.items() for index in bitmap]


def has(positions: _Units, unit: Unit) -> bool:
    return unit.index in positions.get((unit.dataset, unit.epoch), UnitBitmap())


def plus(*several: _Units) -> Positions:
    """Units of any."""
    found: Positions = {}
    for each in several:
        for key, bitmap in each.items():
            found[key] = found.get(key, UnitBitmap()) | bitmap
    return found


def minus(left: _Units, right: _Units) -> Positions:
    """Units of the first that the second lacks."""
    rest = {key: bitmap - right.get(key, UnitBitmap()) for key, bitmap in left.items()}
    return {key: bitmap for key, bitmap in rest.items() if len(bitmap)}


def common(several: Sequence[_Units]) -> Positions:
    """Units of all."""
    found = dict(several[0]) if several else {}
    for each in several[1:]:
        found = {key: bitmap & each.get(key, UnitBitmap()) for key, bitmap in found.items()}
    return found


@dataclasses.dataclass(frozen=True)
class RollBack:
    """The consequences of rolling all ps back to a checkpoint."""

    revoked: int
    """Units that will be computed again."""
    lost: Positions
    """Accepted units that the checkpoint lacks, of epochs that nobody will ask for again."""
