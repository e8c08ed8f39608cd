"""Things done in the middle of a training that it must not notice."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def random_untouched() -> Iterator[None]:
    """Afterwards this process's random number generators are where they were: torch, numpy, Python."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    numpy, python = np.random.get_state(legacy=True), random.getstate()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        np.random.set_state(numpy)
        random.setstate(python)
