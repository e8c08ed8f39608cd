"""What something costs, on any machine: tests compare it for few and for many."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable


def calls(do: Callable[[], object]) -> int:
    """Functions that run, and turns of generators. No garbage is collected meanwhile: hypothesis counts that, too."""
    made: list[str] = []
    gc.disable()
    sys.setprofile(lambda _, event, __: made.append(event) if event in ("call", "c_call") else None)
    try:
        do()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(made)
