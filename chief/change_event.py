"""Wakes everybody who waits for the state of the chief to change."""

from __future__ import annotations

import asyncio


class ChangeEvent:
    """A condition without a lock: all users run in one event loop."""

    def __init__(self) -> None:
        self._happened = asyncio.Event()

    def notify(self) -> None:
        """Something changed."""
        self._happened.set()
        self._happened = asyncio.Event()

    async def wait(self) -> None:
        """Waits for the next change."""
        await self._happened.wait()
