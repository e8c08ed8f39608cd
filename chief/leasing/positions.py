"""Sums and differences of positions: which units, of each pass over each dataset. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stratagem.chief.leasing.lease_book import Positions
from stratagem.cluster.units import UnitBitmap

_Units = Mapping[tuple[int, int], UnitBitmap]


def plus(left: _Units, right: _Units) -> Positions:
    """Units of either."""
    keys = {*left, *right}
    return {key: left.get(key, UnitBitmap()) | right.get(key, UnitBitmap()) for key in keys}


def minus(left: _Units, right: _Units) -> Positions:
    """Units of the first that the second lacks."""
    rest = {key: bitmap - right.get(key, UnitBitmap()) for key, bitmap in left.items()}
    return {key: bitmap for key, bitmap in rest.items() if len(bitmap)}


def common(several: Sequence[_Units]) -> Positions:
    """Units of all."""
    if not several:
        return {}
    found = dict(several[0])
    for each in several[1:]:
        found = {key: bitmap & each.get(key, UnitBitmap()) for key, bitmap in found.items()}
    return found
