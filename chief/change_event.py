"""Wakes everybody who waits for the state of the chief to change."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class ChangeEvent:
    """A condition without a lock: all users run in one event loop."""

    def __init__(self) -> None:
        self._happened = asyncio.Event()

    def notify(self) -> None:
        self._happened.set()
        self._happened = asyncio.Event()

    def wait(self) -> Coroutine[None, None, bool]:
        """Waits for the next change after this call, not after the first ``await`` of it.

        ``asyncio.wait_for`` begins what it is given one turn of the loop later: a change in between would be missed.
        """
        return self._happened.wait()
