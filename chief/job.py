"""The job: one object in one event loop, one method for each verb of the service. State needs no locks.

Requests change the state at once; the consequences for the ps (fences, closed steps, restores) run in the background of
the same loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pathlib

from stratagem.checkpoint.draft import remove_unfinished
from stratagem.checkpoint.ended import forget_ends, note_leaving
from stratagem.chief.checkpointing.saving import CommittedCheckpoint, Saving
from stratagem.chief.chief_state import ChiefState
from stratagem.chief.counting.metric_store import MetricStore
from stratagem.chief.job_end import JobEnd
from stratagem.chief.journal.lock import standing_by
from stratagem.chief.leasing.evaluation_units import EvaluationUnits
from stratagem.chief.leasing.lending import TrainingUnits
from stratagem.chief.maintenance import Maintenance
from stratagem.chief.membership.session import Fence, Prepare, Release, StopJob
from stratagem.chief.membership.session_streams import SessionStreams
from stratagem.chief.monitoring import status
from stratagem.chief.monitoring.standstill import Standstill
from stratagem.chief.recovery import Recovery
from stratagem.chief.scaling import Scaling
from stratagem.chief.servers.servers import Server
from stratagem.cluster.config import ChiefConfig
from stratagem.cluster.exit_codes import EXIT_PREEMPTED
from stratagem.cluster.task import Incarnation
from stratagem.errors import ConfigurationError, JournalLostError, PeerUnavailableError
from stratagem.rpc.confinement import AllowedFolders
from stratagem.rpc.security import OPEN, Security

logger = logging.getLogger(__name__)


class ChiefJob(ChiefState):
    """The chief: its books, and what it does with them. Arguments as there."""

    def __init__(self, config: ChiefConfig, security: Security = OPEN) -> None:
        super().__init__(config, security)
        self.saving = Saving(self, lambda: self.recovery.count_lost())
        self.recovery = Recovery(self, self.saving, begin_anew=self._begin_anew)
        self.streams = SessionStreams(self, self.recovery, carry=self._carry)
        self._maintenance = Maintenance(self, self.recovery, self.saving)
        self.scaling = Scaling(self, self.streams, self.recovery, self._maintenance)
        self.metric_store = MetricStore(self)
        self.evaluation = EvaluationUnits(self, self.metric_store.write)
        self.training = TrainingUnits(self, self.recovery, self._maintenance, self.metric_store)
        self._end = JobEnd(self, self.streams, self._maintenance)
        self._standstill = Standstill(self, self.streams)
        self._finishing = self._is_leaving = False
        self.address = config.bind
        """Where the chief serves; set to the port really bound once it listens."""
        self.finished: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        history = self.journal.history
        if not self.is_new:
            logger.info("Chief epoch %d continues from the journal in %s", self.epoch, config.state_dir)
            if history.wanted_ps not in (0, history.num_ps):
                logger.info("There are %d ps, and the target is %d", history.num_ps, history.wanted_ps)
        if config.checkpoint_dir:
            remove_unfinished(pathlib.Path(config.checkpoint_dir))
            if not history.ending:
                try:
                    forget_ends(config.checkpoint_dir)
                except OSError as error:
                    logger.warning("The end of another job cannot be removed from %s: %s", config.checkpoint_dir, error)

    # Verbs of the service

    async def leave_group(self, incarnation: Incarnation, group: str) -> None:
        """Nobody need wait for the caller in a group of agreements, nor in the steps that are asked for in it."""
        await self.admit(incarnation)
        self.metric_store.leave_group(incarnation, group)
        book = self.lease_book
        await self.recovery.take_out(incarnation, lambda: book.remove(book.steps.reserved_in(incarnation, group), {}))

    async def save_checkpoint(self, incarnation: Incarnation, directory: str) -> CommittedCheckpoint:
        """Takes a checkpoint. ConfigurationError: no directory is given and the chief has none. ForbiddenError: the
        directory is none of those that the chief was started for. CheckpointError: it cannot be written.
        PeerUnavailableError: a ps is away."""
        await self.admit(incarnation)
        await self.recovery.count_torn(incarnation)
        target = self._place(directory) if directory else self.config.checkpoint_dir
        if not target:
            raise ConfigurationError(
                "expected a directory for the checkpoint; name one, or start the chief with --checkpoint-dir"
            )
        with self.waits.of(incarnation, "a checkpoint"):
            return await self.saving.save(target, automatic=False)

    async def check_folder(self, incarnation: Incarnation, directory: str) -> None:
        """Refuses a directory that :meth:`save_checkpoint` would: a ForbiddenError. A ps that is away is not asked."""
        await self.admit(incarnation)
        place = self._place(directory)
        for server in self.ps_pool.ready:
            with contextlib.suppress(PeerUnavailableError):
                await server.save_shards(0, place, "")

    def _place(self, directory: str) -> str:
        folders = AllowedFolders.of(self.config.checkpoint_dir, self.config.checkpoint_roots)
        return str(folders.resolve(os.path.abspath(directory)))

    async def save_loaded(self, incarnation: Incarnation) -> CommittedCheckpoint | None:
        """Takes a checkpoint of values that a worker has just loaded; see :meth:`Maintenance.save_loaded`."""
        await self.admit(incarnation)
        await self.recovery.count_torn(incarnation)
        self.scaling.newest = None
        with self.waits.of(incarnation, "a checkpoint"):
            return await self._maintenance.save_loaded()

    def get_status(self) -> status.JobStatus:
        standby = standing_by(self.config.state_dir)
        return status.report(self, self.streams, self.address, self.scaling.words, standby)

    # From start to end

    async def run(self) -> int:
        """Keeps time until the job is over, or this chief is not its chief any more; returns the exit code."""
        try:
            if self.journal.history.ending:  # whoever was started again meanwhile has nothing to do any more
                self.stop(0, self.journal.history.ending)
            while not self.finished.done():
                self.journal.check()
                self.streams.tick()
                self.streams.recent.add("chief:0", self.saving.totals.values(), self.clock())
                await self.ps_pool.drop_lost()
                self._maintenance.tick()
                if self.sessions.stopping is None and (why := self._standstill.found()):
                    self.stop(2, why)
                if self.scaling.tick() and self._maintenance.newest is not None:
                    self.background.spawn(self.scaling.move)
                await asyncio.wait([self.finished], timeout=min(self.config.heartbeat_interval_s, 0.25))
            return self.finished.result()
        except JournalLostError as error:
            logger.error("%s: this chief exits, and the job continues with the next one", error)
            return EXIT_PREEMPTED
        finally:
            self.streams.close()
            self.commit_hold.close()
            await self.background.close()
            await self.ps_pool.close()

    def close(self) -> None:
        """The last thing of all: a chief that is killed before it is followed by one that knows that all is done."""
        try:
            if self.finished.done() and self.finished.result() == 0 and self.sessions.stopping is not None:
                note_leaving(self.config.checkpoint_dir, self.config.task, self.sessions.stopping.reason)
                self.journal.write("stopped", reason=self.sessions.stopping.reason)
        except JournalLostError as error:
            logger.error("%s: the next chief will find out by itself that the job is over", error)
        finally:
            self.journal.close()

    def stop(self, exit_code: int, reason: str) -> None:
        self.streams.perform(self.sessions.stop(exit_code, reason))

    def leave(self, exit_code: int, reason: str) -> None:
        """Ends this chief and not the job: the next one goes on from the journal. A job without one ends. Told again,
        it does so at once."""
        if not self.config.state_dir:
            self.stop(exit_code, reason)
        elif not self._finishing:
            self._finishing = self._is_leaving = True
            self.background.spawn(self._leave, exit_code, reason)
        elif self._is_leaving and not self.finished.done():
            self.finished.set_result(exit_code)

    async def _leave(self, exit_code: int, reason: str) -> None:
        try:
            await self._end.save_to_leave(reason)
        finally:
            if self._is_leaving and not self.finished.done():
                self.finished.set_result(exit_code)

    def _carry(self, action: Prepare | Fence | Release | StopJob) -> None:
        if isinstance(action, Prepare):
            self.background.spawn(self._prepare, action.incarnation)
        elif isinstance(action, Fence):
            for server in action.servers:
                self.background.spawn(self._fence, action.incarnation, server)
        elif isinstance(action, Release):
            self.background.spawn(self._release, action.incarnation)
        elif self._is_leaving or not self._finishing:  # the end of the job is more than that of its chief
            self._finishing, self._is_leaving = True, False
            self.background.spawn(self._finish, action)

    async def _prepare(self, incarnation: Incarnation) -> None:
        await self.recovery.prepare(incarnation, self.sessions.tasks[incarnation.task].address)
        server = self.ps_pool.get(incarnation)
        if server is not None:
            await self.commit_hold.include(server, is_older=incarnation.number <= self.newest_before)
            await self.evaluation.pin_again()
            if incarnation not in self.ps_pool.without_memory:  # else a chief that follows tries it again
                self.journal.write("prepared", task=incarnation.task, incarnation=incarnation.number)
        self.streams.perform(self.sessions.prepared(incarnation))

    async def _release(self, incarnation: Incarnation) -> None:
        await self.recovery.release(incarnation)
        await self.evaluation.release(incarnation)

    async def _fence(self, incarnation: Incarnation, of_server: Incarnation) -> None:
        server: Server | None = self.ps_pool.get(of_server)
        if server is None:
            return
        committed = await self.ps_pool.insist(server, lambda each: each.fence(incarnation))
        if committed is not None:
            self.recovery.fenced(incarnation, committed)
            self.streams.perform(self.sessions.fence_acknowledged(incarnation, of_server))

    async def _finish(self, stop: StopJob) -> None:
        """Ends the chief whatever happens: nobody else would."""
        exit_code = stop.exit_code or 1
        try:
            if self.sessions.work_is_done and not self.journal.history.ending:
                await self.recovery.open_books()  # a chief that starts when all workers have gone looks what is there
                await self.recovery.count_dropped()
                await self.recovery.ps_return.lost_after_restarts(self.lease_book.positions())
            exit_code = await self._end.see_off(stop)
        except JournalLostError as error:
            logger.error("%s: the next chief ends the job", error)
            exit_code = EXIT_PREEMPTED
        finally:
            if not self.finished.done():
                self.finished.set_result(exit_code)

    def _begin_anew(self) -> None:
        self.metric_store.begin_anew()
        self.evaluation.evaluations.clear()
