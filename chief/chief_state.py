"""What the parts of the chief share: its books, the connections to the ps, background work, who may speak, and who
waits for what."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from stratagem.chief.checkpointing import checkpoints
from stratagem.chief.checkpointing.commit_hold import CommitHold
from stratagem.chief.journal.journal import Journal
from stratagem.chief.leasing.lease_book import LeaseBook
from stratagem.chief.leasing.steps import NUM_UNSYNCED
from stratagem.chief.membership.sessions import Sessions
from stratagem.chief.servers.servers import PsPool, Server
from stratagem.cluster.config import ChiefConfig
from stratagem.cluster.task import Incarnation
from stratagem.errors import JobStoppedError, JournalLostError
from stratagem.rpc.security import OPEN, Security

logger = logging.getLogger(__name__)

Work = Callable[..., Coroutine[Any, Any, None]]


class ChangeEvent:
    """Wakes all who wait for a change of the chief's state. Without a lock: all run in one event loop."""

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


class Background:
    """Tasks that nobody waits for. One that fails unexpectedly ends the job (``stop``): an error of the chief must not
    leave anything hanging."""

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


SAME_S = 2.0
"""A call that follows within this on one that waited for the same goes on waiting."""


Note = Callable[[str, Sequence[Incarnation]], None]
"""Of a call: what it waits for, and for whom to do it; for nobody in particular: ()."""


class Waits:
    """Records who waits for what, and since when, by a monotonic ``clock`` of seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.noted: dict[Incarnation, tuple[str, float]] = {}
        """In words, and since when."""
        self.others: dict[Incarnation, Sequence[Incarnation]] = {}
        """Who is waited for, of each that is noted for others."""
        self._left: dict[Incarnation, tuple[str, float, float]] = {}
        self._calls: dict[Incarnation, object] = {}

    @contextlib.contextmanager
    def of(self, incarnation: Incarnation, what: str = "") -> Iterator[Note]:
        """Around a call of ``incarnation``, which waits for nothing after it; all the time for ``what``, if given, else
        for what it notes. A worker makes one call at a time: one that it has given up, and that has yet to end here,
        notes nothing any more, and its end ends nothing."""
        self._end(incarnation)
        call = self._calls[incarnation] = object()
        if what:
            self.noted[incarnation] = what, self._clock()
        try:
            yield functools.partial(self._note, incarnation, call)
        finally:
            if self._calls.get(incarnation) is call:
                del self._calls[incarnation]
                self._end(incarnation)

    def _end(self, incarnation: Incarnation) -> None:
        self.others.pop(incarnation, None)
        if incarnation in self.noted:
            self._left[incarnation] = (*self.noted.pop(incarnation), self._clock())

    def _note(self, incarnation: Incarnation, call: object, what: str, others: Sequence[Incarnation]) -> None:
        if self._calls.get(incarnation) is not call:
            return
        self.others[incarnation] = others
        text = f"{', '.join(other.task for other in others)} {what}" if others else what
        if self.noted.get(incarnation, ("",))[0] != text:
            now = self._clock()
            before, since, until = self._left.pop(incarnation, ("", now, now))
            # Calls that wait long are made anew, to see the end of the job: it is the same wait then.
            self.noted[incarnation] = (text, since if before == text and now - until < SAME_S else now)


class ChiefState(abc.ABC):
    """The books of a job, as an earlier chief has left them; ``security``: of connections to the ps."""

    def __init__(self, config: ChiefConfig, security: Security = OPEN) -> None:
        self.config = config
        self.clock = time.monotonic
        self.journal = Journal(config.state_dir)
        history = self.journal.history
        self.is_new = history.is_new
        """Whether no task had ever joined the job when this chief started."""
        self.newest_before = history.newest_incarnation
        """The last incarnation that an earlier chief issued."""
        newest = checkpoints.newest(config.checkpoint_dir) if config.checkpoint_dir else None
        self.epoch = max(history.chief_epoch, newest[1].chief_epoch if newest else 0) + 1
        self.journal.write("chief", epoch=self.epoch, num_ps=config.num_ps)
        self.changed = ChangeEvent()
        """Notified at every change that somebody may wait for."""
        self.sessions = Sessions(config, history, self.clock())
        self.lease_book = LeaseBook(history.next_step, 0 if self.is_new else NUM_UNSYNCED)
        self.lease_book.steps.per_unit = history.steps_per_unit
        self.lease_book.restores = int(not self.is_new)  # nobody knows what an earlier chief put back
        for dataset, plan in history.plans.items():
            self.lease_book.open_dataset(dataset, plan)
        self.lease_book.know_accepted(history.accepted)
        self.lease_book.readmit(history.steps)
        for (task, dataset), epoch in history.left.items():
            self.lease_book.loops.left(Incarnation(task, history.live.get(task, 0)), dataset, epoch)
        self.connect = functools.partial(Server, chief=config.task, chief_epoch=self.epoch, security=security)
        """Makes the connection to a ps, also to one that does not serve yet."""
        self.ps_pool = PsPool(self.connect, self.sessions)
        self.waits = Waits(self.clock)
        self.commit_hold = CommitHold(self.ps_pool, chief_epoch=self.epoch, nobody_sends=self._everybody_waits)
        self.is_open = False
        """Units may be leased: nothing is unknown any more about who holds what."""
        self.background = Background(self.stop)

    @abc.abstractmethod
    def stop(self, exit_code: int, reason: str) -> None:
        """Ends the job; the first reason counts."""

    def _everybody_waits(self) -> bool:
        """There are workers, and each waits for something of the chief: none has an update under way."""
        workers = self.sessions.live("worker")
        return bool(workers) and all(worker in self.waits.noted for worker in workers)

    async def admit(self, incarnation: Incarnation) -> None:
        """Waits until the cluster is complete and the books are open; everybody else may go on at once.
        JobStoppedError: the job is over. FencedError: the caller is."""
        while True:
            stopping = self.sessions.stopping
            if stopping is not None:
                raise JobStoppedError(f"the job is over: {stopping.reason}", stopping.exit_code)
            self.sessions.check(incarnation)
            if self.sessions.ready and self.is_open:
                return
            await self.changed.wait()


class ChiefPart:
    """One duty of the chief, with access to what all its parts share."""

    def __init__(self, state: ChiefState) -> None:
        self._state = state
        self._config = state.config
        self._clock = state.clock
        self._journal = state.journal
        self._changed = state.changed
        self._sessions = state.sessions
        self._lease_book = state.lease_book
        self._ps_pool = state.ps_pool
        self._commit_hold = state.commit_hold
        self._waits = state.waits
        self._admit = state.admit
        self._spawn = state.background.spawn
        self._stop = state.stop
