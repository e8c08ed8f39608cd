"""What something costs, on any machine: tests compare it for few and for many."""

from __future__ import annotations

import sys
from collections.abc import Callable


def calls(do: Callable[[], object]) -> int:
    """Functions that run, and turns of generators."""
    made: list[str] = []
    sys.setprofile(lambda _, event, __: made.append(event) if event in ("call", "c_call") else None)
    try:
        do()
    finally:
        sys.setprofile(None)
    return len(made)
