"""Work beside the requests, in the same event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from stratagem.errors import JournalLostError

logger = logging.getLogger(__name__)

Work = Callable[..., Coroutine[Any, Any, None]]


class Background:
    """Tasks that nobody waits for. One that fails unexpectedly ends the job (``stop``): nothing may hang as the chief
    stumbled."""

    def __init__(self, stop: Callable[[int, str], None]) -> None:
        self._stop = stop
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Work, *arguments: Any) -> None:
        task = asyncio.create_task(self._guard(work, *arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Work, *arguments: Any) -> None:
        try:
            await work(*arguments)
        except JournalLostError:
            pass  # the job is another chief's now; this one leaves
        except Exception as error:
            logger.exception("The chief cannot go on")
            self._stop(1, f"the chief failed: {error}")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
