"""Looks at the job for the viewers of its page: one look a second for all of them, an occasional one without any."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from stratagem.chief.monitoring.recent import JobLog
from stratagem.chief.monitoring.why.reading import reading_of
from stratagem.chief.monitoring.why.verdict import judge
from stratagem.chief.web.snapshot import snapshot
from stratagem.chief.web.story import COLUMNS, JobStory
from stratagem.rpc.logs import THROTTLE
from stratagem.rpc.plain_json import to_json
from stratagem.rpc.status_view import StatusView

logger = logging.getLogger(__name__)

LIVE_S, IDLE_S = 1.0, 10.0
"""Seconds between two looks, while somebody watches and while nobody does."""
NUM_SOON = 10
"""So many first looks of a chief, which may have taken over, are as close as if somebody watched: curves begin."""
PATIENCE = 20
"""A look may take this part of the time between two: with a great many tasks there are fewer."""
MAX_VIEWERS = 32


class PageWatch:
    """What the page receives; ``look`` gives the status, with measures."""

    def __init__(self, look: Callable[[], Awaitable[StatusView]], log: JobLog) -> None:
        self.look = look
        self.num_looks = 0
        self._log = log
        self._story = JobStory()
        self._num_viewers = 0
        self._wanted = asyncio.Event()
        self._looked = asyncio.Condition()
        self._newest = ""

    async def run(self) -> None:
        while True:
            self._wanted.clear()
            took_s = 0.0
            try:
                took_s = await self.look_once()
            except Exception:  # the chief has no time, or this room a fault: no reason to show nothing for ever
                THROTTLE.log(logger, logging.WARNING, "page", "No look at the job for its page", exc_info=True)
            if self._num_viewers:
                await asyncio.sleep(max(LIVE_S, PATIENCE * took_s))
            else:
                with contextlib.suppress(TimeoutError):
                    pause_s = LIVE_S if self.num_looks < NUM_SOON else IDLE_S
                    async with asyncio.timeout(max(pause_s, PATIENCE * took_s)):
                        await self._wanted.wait()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While somebody does. OverflowError: too many do."""
        if self._num_viewers >= MAX_VIEWERS:
            raise OverflowError(f"{MAX_VIEWERS} pages are open already")
        self._num_viewers += 1
        self._wanted.set()
        try:
            yield
        finally:
            self._num_viewers -= 1

    async def messages(self) -> AsyncIterator[tuple[str, str]]:
        """Name and JSON of each message to a page: the past, then looks and news. Who reads slowly misses looks."""
        happening = line = known = 0
        while True:
            async with self._looked:
                await self._looked.wait_for(lambda: self.num_looks > known)  # noqa: B023
            if not known:
                yield "past", to_json({"columns": COLUMNS, "points": self._story.points})
            known = self.num_looks
            yield "look", self._newest
            happenings, lines = self._story.since(happening), self._log.since(line)
            if happenings or lines:
                happening = happenings[-1]["number"] if happenings else happening
                line = lines[-1]["number"] if lines else line
                yield "news", to_json({"happenings": happenings, "lines": lines})

    async def look_once(self) -> float:
        """Returns the seconds of CPU that it took here."""
        status = await self.look()
        began, at = time.thread_time(), time.time()
        self._story.add(at, status)
        reading = reading_of(status)
        shown = snapshot(status, reading, judge(reading))
        self._newest = to_json({"at": at, "point": self._story.points[-1], **shown})
        async with self._looked:
            self.num_looks += 1
            self._looked.notify_all()
        return time.thread_time() - began
