"""The wait for those that are late at the end of a job."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from unittest import mock

from stratagem.chief.chief_state import ChangeEvent
from stratagem.chief.job_end import JobEnd


def test_it_ends_with_its_chief_also_when_something_has_just_changed() -> None:
    """The cancellation was forgotten: the chief's process stayed until the time was up."""

    async def scenario(num_turns: int) -> None:
        changed, unused = ChangeEvent(), mock.Mock()
        end = JobEnd(mock.Mock(changed=changed, clock=time.monotonic), unused, unused)
        waiting: asyncio.Task[Any] = asyncio.create_task(end._until(lambda: False, time.monotonic() + 1000))
        for _ in range(3):  # it waits
            await asyncio.sleep(0)
        changed.notify()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        waiting.cancel()
        _, left = await asyncio.wait([waiting], timeout=10)
        waiting.cancel()
        assert not left

    for num_turns in range(4):
        asyncio.run(scenario(num_turns))
