"""Wakes everybody who waits for the state of the chief to change."""

from __future__ import annotations

import asyncio


class Bell:
    """A condition without a lock: all users run in one event loop."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Something changed."""
        self._rung.set()
        self._rung = asyncio.Event()

    async def heard(self) -> None:
        """Waits for the next ring."""
        await self._rung.wait()
