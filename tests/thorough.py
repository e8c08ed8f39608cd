"""Which cases of a test `make test` runs, and which it leaves to `make test-all` and to the day's share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def all_but_each_third(cases: Iterable[object]) -> list[Any]:
    """Cases that show much the same: each third is quick, the others have the marker `thorough`."""
    return [
        case if number % 3 == 0 else pytest.param(case, marks=pytest.mark.thorough) for number, case in enumerate(cases)
    ]
