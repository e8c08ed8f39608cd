"""The job: one object in one event loop, one method for each verb of the service. State needs no locks.

Requests change the state at once; what follows for the ps (fences, closed steps, restores) runs in the background of
the same loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pathlib
import time
from collections.abc import Callable, Sequence

from stratagem.checkpoint.draft import remove_unfinished
from stratagem.chief.background import Background
from stratagem.chief.change_event import ChangeEvent
from stratagem.chief.checkpointing import checkpoints
from stratagem.chief.checkpointing.commit_hold import CommitHold
from stratagem.chief.checkpointing.restoring import Restoring
from stratagem.chief.checkpointing.saving import CommittedCheckpoint, Saving
from stratagem.chief.counting.metric_store import MetricStore
from stratagem.chief.job_end import JobEnd
from stratagem.chief.journal.journal import Journal
from stratagem.chief.journal.lock import standing_by
from stratagem.chief.leasing.evaluation_units import EvaluationUnits
from stratagem.chief.leasing.lease_book import LeaseBook
from stratagem.chief.leasing.lending import TrainingUnits
from stratagem.chief.leasing.steps import NUM_UNSYNCED
from stratagem.chief.maintenance import Maintenance
from stratagem.chief.membership.session import Fence, Prepare, Release, StopJob
from stratagem.chief.membership.session_streams import SessionStreams
from stratagem.chief.membership.sessions import Sessions
from stratagem.chief.monitoring import status
from stratagem.chief.monitoring.waits import Waits
from stratagem.chief.recovery import Recovery
from stratagem.chief.scaling import Scaling
from stratagem.chief.servers.ps_pool import Connect, PsPool
from stratagem.chief.servers.servers import Server
from stratagem.cluster.config import ChiefConfig
from stratagem.cluster.incarnation import Incarnation
from stratagem.errors import ConfigurationError, JobStoppedError, JournalLostError
from stratagem.rpc.confinement import AllowedFolders
from stratagem.rpc.session import PREEMPTED

logger = logging.getLogger(__name__)


class ChiefJob:
    """The chief's state and what it does with it.

    Args:
        config: of the chief.
        connect: given the chief's epoch, what makes the connection to a ps: (incarnation, address).
        clock: seconds, monotonic.
    """

    def __init__(
        self, config: ChiefConfig, connect: Callable[[int], Connect], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.journal = Journal(config.state_dir)
        history = self.journal.history
        newest = checkpoints.newest(config.checkpoint_dir) if config.checkpoint_dir else None
        is_new = history.is_new
        self._newest_before = history.newest_incarnation
        epoch = max(history.chief_epoch, newest[1].chief_epoch if newest else 0) + 1
        self.journal.write("chief", epoch=epoch, num_ps=config.num_ps)
        self._clock = clock
        self.changed = ChangeEvent()
        self.sessions = Sessions(
            num_workers=config.num_workers,
            max_workers=config.max_workers,
            min_workers=config.min_workers,
            wanted_workers=history.wanted_workers,
            num_ps=history.num_ps,
            session_timeout_s=config.session_timeout_s,
            heartbeat_interval_s=config.heartbeat_interval_s,
            session_grace_s=config.session_grace_s,
            worker_timeout_s=config.worker_timeout_s,
            start_timeout_s=config.start_timeout_s,
            now=clock(),
            newest_incarnation=history.newest_incarnation,
            awaited=history.live,
            prepared=history.prepared,
            done=history.done,
            fenced=history.fenced,
            ready=history.ready,
            joining=history.joining,
            taken_in=history.taken_in,
        )
        self.lease_book = LeaseBook(history.next_step, 0 if is_new else NUM_UNSYNCED)
        self.lease_book.restores = int(not is_new)  # nobody knows what an earlier chief put back
        for dataset, plan in history.plans.items():
            self.lease_book.open_dataset(dataset, plan)
        self.lease_book.know_accepted(history.accepted)
        self.lease_book.readmit(history.steps)
        self.ps_pool = PsPool(
            connect(epoch),
            lambda incarnation: incarnation in self.sessions.servers,
            self.sessions.is_live,
            lambda: self.sessions.num_ps,
        )
        self.commit_hold = CommitHold(self.ps_pool, chief_epoch=epoch)
        self.saving = Saving(
            self.lease_book,
            chief_epoch=epoch,
            commit_hold=self.commit_hold,
            keep=config.keep_checkpoints,
            committed=self._committed,
        )
        self.recovery = Recovery(
            self.sessions,
            self.lease_book,
            self.ps_pool,
            self.saving,
            self.journal,
            self.changed,
            restoring=Restoring(self.ps_pool, config.checkpoint_dir),
            num_copied=config.num_ps if config.ps_replicas > 1 else 0,
            give_up=self.stop,
            begin_anew=self._begin_anew,
        )
        self.streams = SessionStreams(
            self.sessions,
            self.journal,
            self.changed,
            clock=clock,
            heartbeat_interval_s=config.heartbeat_interval_s,
            session_timeout_s=config.session_timeout_s,
            ps_replicas=config.ps_replicas,
            job_started=lambda: bool(self.journal.history.initialized),
            carry=self._carry,
            resume=self.recovery.resume,
        )
        self.scaling = Scaling(
            config,
            self.sessions,
            self.streams,
            self.lease_book,
            self.journal,
            self.changed,
            commit_hold=self.commit_hold,
            saving=self.saving,
            recovery=self.recovery,
            ps_pool=self.ps_pool,
            connect=connect(epoch),
            saved=lambda step: self._maintenance.saved(step),
            clock=clock,
        )
        self._waits = Waits(clock)
        self._background = Background(self.stop)
        self._maintenance = Maintenance(
            config,
            self.sessions,
            self.journal,
            self.ps_pool,
            self.recovery,
            self.saving,
            clock=clock,
            spawn=self._background.spawn,
            stop=self.stop,
            admit=self._admit,
        )
        self.metric_store = MetricStore(
            self.sessions,
            self.lease_book,
            self.journal,
            self.changed,
            admit=self._admit,
            waits=self._waits,
            page_bytes=config.max_message_bytes // 4,
        )
        lender = self.journal, self.changed, self._admit, self._waits
        self.evaluation = EvaluationUnits(
            *lender,
            ps_pool=self.ps_pool,
            commit_hold=self.commit_hold,
            write=self.metric_store.write,
        )
        self.training = TrainingUnits(
            *lender,
            sessions=self.sessions,
            lease_book=self.lease_book,
            recovery=self.recovery,
            first_checkpoint=self._maintenance.first_checkpoint,
            metric_store=self.metric_store,
            config=config,
        )
        self._end = JobEnd(
            config, self.sessions, self.streams, self._maintenance, self.journal, self.changed, clock=clock
        )
        self._finishing = False
        self.address = config.bind
        """Where the chief serves; set to the port really bound once it listens."""
        self.finished: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if not is_new:
            logger.info("chief epoch %d goes on from the journal in %s", epoch, config.state_dir)
            if history.wanted_ps not in (0, history.num_ps):
                logger.info("There are %d ps, and there are to be %d", history.num_ps, history.wanted_ps)
        if config.checkpoint_dir:
            remove_unfinished(pathlib.Path(config.checkpoint_dir))
            if not history.ending:
                self._end.write("", ())

    # Verbs of the service

    async def leave_group(self, incarnation: Incarnation, group: str) -> None:
        """Nobody need wait for the caller in a group of agreements, nor in the steps that are asked for in it."""
        await self._admit(incarnation)
        self.metric_store.leave(incarnation, group)
        await self.recovery.carry_out(
            incarnation, self.lease_book.remove(self.lease_book.steps.reserved_in(incarnation, group), {})
        )

    async def take_in(self, incarnation: Incarnation, newcomers: Sequence[Incarnation]) -> None:
        """Newcomers of a ring become ranks of it; without any the caller is one, and can be taken in."""
        await self._admit(incarnation)
        self.streams.take_in(incarnation, newcomers)

    async def save_checkpoint(self, incarnation: Incarnation, directory: str) -> CommittedCheckpoint:
        """Takes a checkpoint.

        Raises:
            ConfigurationError: no directory is given and the chief has none.
            ForbiddenError: the directory is none of those that the chief was started for.
            CheckpointError: it cannot be written.
            PeerUnavailableError: a ps is away.
        """
        await self._admit(incarnation)
        target = self.config.checkpoint_dir
        if directory:
            folders = AllowedFolders.of(target, self.config.checkpoint_roots)
            target = str(folders.resolve(os.path.abspath(directory)))
        if not target:
            raise ConfigurationError(
                "expected a directory for the checkpoint; name one, or start the chief with --checkpoint-dir"
            )
        return await self.saving.save(target, automatic=False)

    def get_status(self) -> status.JobStatus:
        """What every task is doing."""
        return status.report(
            self.sessions,
            self.lease_book,
            self.journal.history,
            self.streams.progress,
            self.streams.waiting_steps,
            self._waits.noted,
            self.streams.recent,
            status.chief_report(
                self.address,
                self.journal.history.chief_epoch,
                os.getpid(),
                self.streams.recent.of("chief:0", self._clock()),
            ),
            self._clock(),
            self.scaling.words,
            standing_by(self.config.state_dir),
        )

    # Incarnation of the job

    async def run(self) -> int:
        """Keeps time until the job is over, or this chief is not its chief any more; returns the exit code."""
        try:
            while not self.finished.done():
                self.journal.check()
                self.streams.tick()
                self.streams.recent.add("chief:0", self.saving.totals.values(), self._clock())
                await self.ps_pool.drop_lost()
                self._maintenance.tick()
                if self.scaling.tick() and self._maintenance.has_saved:
                    self._background.spawn(self.scaling.move)
                await asyncio.wait([self.finished], timeout=min(self.config.heartbeat_interval_s, 0.25))
            return self.finished.result()
        except JournalLostError as error:
            logger.error("%s: this chief leaves, and the job goes on with the next one", error)
            return PREEMPTED
        finally:
            self.streams.close()
            self.commit_hold.close()
            await self._background.close()
            await self.ps_pool.close()

    def close(self) -> None:
        """The last thing of all: a chief that is killed before it is followed by one that knows that all is done."""
        try:
            if self.finished.done() and self.finished.result() == 0 and self.sessions.stopping is not None:
                self.journal.write("stopped", reason=self.sessions.stopping.reason)
        except JournalLostError as error:
            logger.error("%s: the next chief finds out by itself that the job is over", error)
        finally:
            self.journal.close()

    def stop(self, exit_code: int, reason: str) -> None:
        """Ends the job."""
        self.streams.perform(self.sessions.stop(exit_code, reason))

    def leave(self, exit_code: int, reason: str) -> None:
        """Ends this chief and not the job: the next one goes on from the journal. A job without one ends."""
        if not self.config.state_dir:
            self.stop(exit_code, reason)
        elif not self._finishing:
            self._finishing = True
            self._background.spawn(self._leave, exit_code, reason)

    async def _leave(self, exit_code: int, reason: str) -> None:
        try:
            await self._end.save_to_leave(reason)
        finally:
            if not self.finished.done():
                self.finished.set_result(exit_code)

    def _carry(self, action: Prepare | Fence | Release | StopJob) -> None:
        if isinstance(action, Prepare):
            self._background.spawn(self._prepare, action.incarnation)
        elif isinstance(action, Fence):
            for server in action.servers:
                self._background.spawn(self._fence, action.incarnation, server)
        elif isinstance(action, Release):
            self._background.spawn(self._release, action.incarnation)
        elif not self._finishing:
            self._finishing = True
            self._background.spawn(self._finish, action)

    async def _prepare(self, incarnation: Incarnation) -> None:
        await self.recovery.prepare(incarnation, self.sessions.tasks[incarnation.task].address)
        server = self.ps_pool.get(incarnation)
        if server is not None:
            await self.commit_hold.include(server, is_older=incarnation.number <= self._newest_before)
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
            await self._end.see_off(stop)
            exit_code = stop.exit_code
        finally:
            if not self.finished.done():
                self.finished.set_result(exit_code)

    def _begin_anew(self) -> None:
        self.metric_store.begin_anew()
        self.evaluation.evaluations.clear()

    def _committed(self, committed: CommittedCheckpoint) -> None:
        self.journal.write("checkpoint", path=committed.path)
        logger.info("Checkpoint of step %d: %s", committed.step, committed.path)

    # Callers

    async def _admit(self, incarnation: Incarnation) -> None:
        """Waits until the cluster is complete and the books are open; everybody else may go on at once.

        Raises:
            JobStoppedError: the job is over.
            FencedError: the caller is.
        """
        while True:
            stopping = self.sessions.stopping
            if stopping is not None:
                raise JobStoppedError(f"the job is over: {stopping.reason}", stopping.exit_code)
            self.sessions.check(incarnation)
            if self.sessions.ready and self.recovery.is_open:
                return
            await self.changed.wait()
