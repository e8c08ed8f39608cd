"""What the chief does by itself at every tick: open the books, watch for initial values, take checkpoints."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from stratagem.chief.checkpointing import checkpoints
from stratagem.chief.checkpointing.saving import Saving
from stratagem.chief.journal.journal import Journal
from stratagem.chief.membership.sessions import Sessions
from stratagem.chief.recovery import Recovery
from stratagem.chief.servers.ps_pool import PsPool
from stratagem.cluster.config import ChiefConfig
from stratagem.errors import CheckpointError, StratagemError

logger = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, None]]


class Maintenance:
    """The chief's own initiative.

    Args:
        config: of the chief.
        sessions: of the tasks.
        journal: of the job.
        ps_pool: the ps.
        recovery: settled first.
        saving: takes checkpoints.
        spawn: runs work beside the rest.
        stop: ends the job with an exit code, for a reason.
    """

    def __init__(
        self,
        config: ChiefConfig,
        sessions: Sessions,
        journal: Journal,
        ps_pool: PsPool,
        recovery: Recovery,
        saving: Saving,
        *,
        spawn: Callable[[Work], None],
        stop: Callable[[int, str], None],
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._journal = journal
        self._ps_pool = ps_pool
        self._recovery = recovery
        self._saving = saving
        self._spawn = spawn
        self._stop = stop
        self._busy = False
        self._first = asyncio.Lock()
        self._saved_step: int | None = None
        self._next_save_at: float | None = None
        self._delay = ""

    def tick(self) -> None:
        """Starts what is due, one thing at a time."""
        if self._busy or self._sessions.stopping is not None or not self._sessions.ready:
            return
        if not self._recovery.is_open:
            if self._sessions.all_known and not self._sessions.pending_fences:
                self._start(self._recovery.open_books)
        elif not self._journal.history.initialized:
            self._start(self._watch)
        elif self._config.checkpoint_dir and self._saved_step is None:
            self._start(self._save_first)
        elif self._next_save_at is not None and time.monotonic() >= self._next_save_at:
            self._start(self._save)

    async def before_leasing(self) -> None:
        """Takes the initial checkpoint before the first unit is leased: no update can be lost before there is one.

        Returns at once when there are no variables yet, or checkpoints are off; returns without one while a ps is away
        (the caller asks again).
        """
        if not self._config.checkpoint_dir or self._saved_step is not None:
            return
        if not self._journal.history.initialized:
            await self._watch()
        if self._journal.history.initialized:
            await self._save_first()

    @property
    def may_lease(self) -> bool:
        """No unit may be leased between the initial values and the first checkpoint."""
        return bool(
            not self._config.checkpoint_dir or self._saved_step is not None or not self._journal.history.initialized
        )

    async def save_last(self) -> None:
        """The checkpoint at the end, if there is anything that the last one lacks.

        Raises:
            StratagemError: it cannot be taken.
        """
        if self._config.checkpoint_dir and self._journal.history.initialized and await self._step() != self._saved_step:
            # The workers end too, perhaps in mid-commit. What only some ps have is completed when the job goes on.
            await self._saving.save(self._config.checkpoint_dir, automatic=True, complete=False)

    def _start(self, work: Work) -> None:
        self._busy = True

        async def run() -> None:
            try:
                await work()
            finally:
                self._busy = False

        self._spawn(run)

    async def _step(self) -> int:
        return max((each.step for each in (await self._ps_pool.describe()).values()), default=0)

    async def _watch(self) -> None:
        """Notes when all ps hold values. A ps without variables never does: nobody waits for it once training runs."""
        described = await self._ps_pool.describe()
        holding = [incarnation.task for incarnation, each in described.items() if each.initialized]
        trained = any(each.step for each in described.values())
        if holding and (trained or len(holding) == self._config.num_ps):
            self._journal.write("initialized", tasks=sorted(holding))

    async def _save_first(self) -> None:
        """The initial checkpoint: from then on a lost ps has something to come back from."""
        async with self._first:
            if self._saved_step is not None:
                return
            newest = checkpoints.newest(self._config.checkpoint_dir)
            if newest is not None and newest[1].step == await self._step():
                self._saved(newest[1].step)
                return
            try:
                self._saved((await self._saving.save(self._config.checkpoint_dir, automatic=True)).step)
            except CheckpointError as error:
                self._stop(2, str(error))
            except StratagemError as error:
                if str(error) != self._delay:
                    self._delay = str(error)
                    logger.info("The first checkpoint has to wait: %s", error)

    async def _save(self) -> None:
        try:
            if await self._step() == self._saved_step:
                self._saved(self._saved_step)
            else:
                self._saved((await self._saving.save(self._config.checkpoint_dir, automatic=True)).step)
        except StratagemError as error:
            logger.warning("No checkpoint: %s", error)
            self._saved(self._saved_step)

    def _saved(self, step: int | None) -> None:
        self._saved_step = step
        every_s = self._config.checkpoint_every_s
        self._next_save_at = time.monotonic() + every_s if every_s else None
