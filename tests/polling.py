"""Waiting in a test for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.005


def until(condition: Callable[[], T], words: Callable[[], object] = str, deadline_s: float = 60.0) -> T:
    """Polls until ``condition()`` is true, and returns what it gave; after the deadline fails with ``words()``."""
    deadline = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < deadline, words() or "the condition did not come true in time"
        time.sleep(POLL_S)
    return found
