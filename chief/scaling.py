"""Changing the number of workers or parameter servers while training runs, and a ps that receives SIGTERM
(docs/design/scale.md)."""

from __future__ import annotations

import asyncio
import logging
import pathlib
from collections.abc import Iterable

from stratagem.chief.checkpointing.checkpoints import ServersManifest
from stratagem.chief.checkpointing.saving import CommittedCheckpoint, unfinished_units
from stratagem.chief.chief_state import ChiefPart, ChiefState
from stratagem.chief.leasing.positions import minus, plus
from stratagem.chief.maintenance import Maintenance
from stratagem.chief.membership.roster import MAX_PS
from stratagem.chief.membership.session import Session, SessionState
from stratagem.chief.membership.session_streams import SessionStreams
from stratagem.chief.recovery import Recovery
from stratagem.errors import CheckpointError, ConfigurationError, JobStoppedError, PeerUnavailableError, StratagemError

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Until the next attempt, when one has failed."""


class Scaling(ChiefPart):
    """The requested numbers, and how they take effect."""

    def __init__(
        self, state: ChiefState, streams: SessionStreams, recovery: Recovery, maintenance: Maintenance
    ) -> None:
        super().__init__(state)
        self._streams = streams
        self._recovery = recovery
        self._maintenance = maintenance
        self._is_moving = False
        self._move_at = 0.0
        self._failure = ""
        self.newest: CommittedCheckpoint | None = None
        """The checkpoint that was taken for the last change; None: other values were loaded since, say."""
        self._gone: set[int] = set()
        """ps that were let go while commits are held, and are not back."""

    def refusal(self, num_ps: int) -> str:
        """Why the job cannot have another number of workers, or of ps (0: as many as there are); empty: it can."""
        sessions = self._sessions
        if not sessions.ready:
            return "the cluster is not complete yet: scale it once `stratagem status` says that it is running"
        if not sessions.num_ps:
            return (
                "to scale a ring, start it with --min-workers and --max-workers, and further workers by hand; "
                "`stratagem scale` is for jobs with parameter servers"
            )
        if self._lease_book.synchronous:
            return (
                "at staleness 0 every batch is cut for the workers that the job started with, and all ps have parts of "
                "it: start the job again with another number, and it resumes from its newest checkpoint"
            )
        if num_ps in (0, sessions.num_ps):
            return ""
        if num_ps > MAX_PS:
            return f"expected at most {MAX_PS:,} ps, got {num_ps:,}"
        if self._config.ps_replicas > 1:
            return "the number of ps is fixed if each one has a copy on another (--ps-replicas 2)"
        if not self._config.checkpoint_dir:
            return "another number of ps starts from a checkpoint: start the chief with --checkpoint-dir"
        if not self._lease_book.plans:
            return (
                "another number of ps needs to know which updates are applied, and the script has leased no data yet "
                "(strategy.distribute_dataset): those of a pipeline of its own have no names"
            )
        return ""

    def scale(self, num_workers: int, num_ps: int) -> None:
        """There are to be so many from now on; 0: as many as there are. Answers before it is so. ConfigurationError:
        this job cannot have another number. JobStoppedError: it is over."""
        sessions = self._sessions
        if sessions.stopping is not None:
            raise JobStoppedError(f"the job is over: {sessions.stopping.reason}", sessions.stopping.exit_code)
        if why := self.refusal(num_ps):
            raise ConfigurationError(why)
        self._want(num_workers, num_ps)
        if num_workers:
            self._streams.perform(sessions.want_workers(num_workers))

    def _want(self, num_workers: int, num_ps: int) -> None:
        history = self._journal.history
        workers, ps = num_workers or history.wanted_workers, num_ps or history.wanted_ps
        self._journal.write("wanted", workers=workers, ps=ps)
        told = f"{workers} worker{'s' * (workers != 1)} and " if workers else ""  # else as many as come
        logger.info("The target is %s%d ps", told, ps or self._sessions.num_ps)
        self._failure, self._move_at = "", 0.0
        self._changed.notify()

    @property
    def words(self) -> str:
        """Why there are not as many ps as wanted; empty: there are."""
        wanted = self._journal.history.wanted_ps
        if wanted in (0, self._sessions.num_ps):
            return ""
        if late := self._awaited(wanted):
            return f"waiting for {', '.join(late)} to join"
        return self._refusal or self._failure or "the ps are changing"

    @property
    def _refusal(self) -> str:
        return self.refusal(self._journal.history.wanted_ps)

    def _awaited(self, num_ps: int) -> list[str]:
        here = {str(session.task) for session in (*self._sessions.ps, *self._sessions.newcomers)}
        return [task for task in (f"ps:{index}" for index in range(num_ps)) if task not in here]

    @property
    def _target(self) -> int:
        """How many ps there are to be now: as many as wanted, once that can be."""
        wanted = self._journal.history.wanted_ps
        return self._sessions.num_ps if self._awaited(wanted) or self._refusal else wanted or self._sessions.num_ps

    def tick(self) -> bool:
        """Looks who came and who is to end; whether :meth:`move` has something to do."""
        sessions, history = self._sessions, self._journal.history
        if sessions.stopping is not None or self._is_moving:
            return False
        self._let_go_idle()
        if not (sessions.ready and self._config.checkpoint_dir):
            self._let_go(sessions.leaving)  # there is nothing to save, or nowhere to save it
        if not self._state.is_open:
            return False
        self._follow()
        is_wanted = self._target != sessions.num_ps or bool(sessions.leaving)
        return bool(is_wanted and history.initialized and self._clock() >= self._move_at)

    def _follow(self) -> None:
        """Where ps come and go by themselves (``max_ps``): those that have come are wanted, those that are to end are
        not. Tasks go by index, so it is the last ones that leave the job; any other is waited for."""
        sessions = self._sessions
        if not self._config.max_ps or self.refusal(sessions.num_ps + 1):
            return
        leaving = {session.task.index for session in sessions.leaving} | self._gone
        here = {session.task.index for session in sessions.newcomers}
        number = staying = sessions.num_ps
        while staying and staying - 1 in leaving:
            staying -= 1
        while number in here and number < self._config.max_ps:
            number += 1
        wanted = self._journal.history.wanted_ps or sessions.num_ps
        if 0 < staying < min(sessions.num_ps, wanted):
            self._want(0, staying)
        elif staying == sessions.num_ps and number > max(staying, wanted):
            self._want(0, number)

    def _let_go_idle(self) -> None:
        self._let_go([session for session in self._sessions.leaving if not self._sessions.serves(session)])

    def _let_go(self, leaving: Iterable[Session]) -> None:
        for session in leaving:
            self._streams.perform(self._sessions.let_go(session, self._clock()))

    async def move(self) -> None:
        """Gives the variables to the number of ps that is wanted, and lets those end that are to. If that fails before
        it is in the journal, everything stays as it was, and another attempt follows."""
        sessions, ps_return, began = self._sessions, self._recovery.ps_return, self._clock()
        self._is_moving = True
        self._gone.clear()
        # Without workers nobody completes what only some ps have: it stays so until the job goes on.
        is_complete = bool(sessions.live("worker")) or not sessions.leaving
        try:
            async with self._commit_hold.held("another number of ps", complete=is_complete):
                saved = await self._save(is_complete)
                while sessions.stopping is None:
                    self._let_go_idle()
                    self._follow()
                    states = {session.task.index: session.state for session in sessions.ps}
                    self._gone = {index for index in self._gone if states.get(index) not in (None, SessionState.LIVE)}
                    target = self._target if is_complete else sessions.num_ps
                    if target != sessions.num_ps and self._gone.isdisjoint(range(target)):
                        await self._route(saved.path, target)
                        held_s = self._clock() - began
                        logger.info("The job has %d ps now; commits were held for %.2f s", target, held_s)
                    elif sessions.leaving:
                        await self._check_units(saved.path)
                        ps_return.await_back()
                        self._gone.update(session.task.index for session in sessions.leaving)
                        self._let_go(sessions.leaving)
                    elif self._gone and (saved.manifest.unfinished or not self._lease_book.synchronous):
                        # In step all go back with it anyway, but what others get of a batch that it has half would
                        # count as done, in an epoch that is over perhaps.
                        await self._changed.wait()
                    else:
                        break
            self._failure = ""
        except StratagemError as error:
            is_news, self._failure = str(error) != self._failure, str(error)
            if isinstance(error, CheckpointError):
                self.newest = None
            told = ", ".join(str(session.task) for session in sessions.leaving)
            logger.log(
                logging.WARNING if is_news else logging.DEBUG,  # it is tried again every second
                "%s for now: %s",
                f"{told} cannot end" if told else f"The number of ps remains {sessions.num_ps}",
                error,
            )
        finally:
            self._is_moving, self._move_at = False, self._clock() + RETRY_S
            ps_return.is_awaited = False
            self._changed.notify()

    async def _save(self, is_complete: bool) -> CommittedCheckpoint:
        """With commits held: all that the ps have, in a checkpoint."""
        await self._recovery.count_lost()
        is_named = bool(self._lease_book.plans)  # updates of no unit are told by nothing
        newest, described = self.newest, (await self._ps_pool.describe()).values()
        # Until a worker has told that a batch has several updates, units do not tell whether all of them are there.
        if newest is None or not is_named or newest.lacks(described) or await self._num_more(newest.path):
            self.newest = await self._maintenance.save(complete=is_complete)
        assert self.newest is not None
        return self.newest

    async def _route(self, checkpoint: str, num_ps: int) -> None:
        """With commits held: so many ps go on from a checkpoint that has all they hold."""
        sessions = self._sessions
        newcomers = [session for session in sessions.newcomers if session.task.index < num_ps]
        servers = [self._state.connect(session.incarnation, session.address) for session in newcomers]
        async with self._maintenance.saving.lock:
            try:
                await self._recovery.ps_return.begin_on(checkpoint, num_ps, servers)
            finally:
                await asyncio.gather(*(server.close() for server in servers))
            await self._commit_hold.outlive_chief()
            await self._check_units(checkpoint)  # the hold may have run out, had this chief stood still
            if late := self._awaited(num_ps):
                raise PeerUnavailableError(f"{', '.join(late)} were lost meanwhile")
            self._journal.write("routed", num_ps=num_ps)
            self._streams.perform(sessions.route(num_ps))
            moved = [session.incarnation for session in sessions.ps if session.open]
            while sessions.stopping is None and any(
                sessions.tasks[each.task].incarnation == each and sessions.tasks[each.task].state is SessionState.JOINED
                for each in moved
            ):
                await self._changed.wait()

    async def _check_units(self, checkpoint: str) -> None:
        """An earlier checkpoint with the same weights counts as this one, and may know of fewer units: of those that
        are lost, say, or whose updates were skipped."""
        if num_more := await self._num_more(checkpoint):
            raise CheckpointError(
                f"{checkpoint} has the weights of now, and {num_more} units fewer: the next update makes another one"
            )

    async def _num_more(self, checkpoint: str) -> int:
        """Units that have more of their updates now than in a checkpoint."""
        manifest = await asyncio.to_thread(ServersManifest.read, pathlib.Path(checkpoint))
        done, begun = (manifest.done, manifest.unfinished) if manifest is not None else ({}, {})
        described = (await self._ps_pool.describe()).values()
        now = plus(self._lease_book.positions(), *(each.applied() for each in described))
        unfinished = unfinished_units(described, self._lease_book.steps.per_unit)
        more = (minus(minus(now, unfinished), done), minus(unfinished, begun))
        return sum(len(bitmap) for units in more for bitmap in units.values())
