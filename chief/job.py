"""The job: one object in one event loop, one method for each verb of the service. State needs no locks.

Requests change the state at once; what follows for the ps (fences, closed steps, restores) runs as tasks of the same
loop. A task that fails unexpectedly stops the job: nothing may hang because the chief stumbled.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import pathlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from stratagem.checkpoint.draft import sweep
from stratagem.checkpoint.ended import write_end
from stratagem.chief.change_event import ChangeEvent
from stratagem.chief.checkpointing import checkpoints
from stratagem.chief.checkpointing.commit_hold import CommitHold
from stratagem.chief.checkpointing.restoring import Restoring
from stratagem.chief.checkpointing.saving import CommittedCheckpoint, Saving
from stratagem.chief.counting.metric_store import MetricStore
from stratagem.chief.events import Event, Request, Stop
from stratagem.chief.journal.journal import Journal
from stratagem.chief.leasing.evaluation_units import EvaluationUnits
from stratagem.chief.leasing.lease_book import LeaseBook
from stratagem.chief.leasing.lending import TrainingUnits
from stratagem.chief.maintenance import Maintenance
from stratagem.chief.membership.session import Fence, Prepare, Release, StopJob
from stratagem.chief.membership.session_streams import SessionStreams
from stratagem.chief.membership.sessions import Sessions
from stratagem.chief.monitoring import status
from stratagem.chief.monitoring.waits import Waits
from stratagem.chief.recovery import Recovery
from stratagem.chief.servers.ps_pool import Connect, PsPool
from stratagem.chief.servers.servers import Server
from stratagem.cluster.config import ChiefConfig
from stratagem.cluster.incarnation import Incarnation
from stratagem.cluster.units import Lease, Plan
from stratagem.errors import ConfigurationError, JobStoppedError, StratagemError
from stratagem.rpc.confinement import AllowedFolders

logger = logging.getLogger(__name__)

LEAVE_S = 15.0  # for the checkpoint of a chief that leaves: less than a supervisor waits before it kills
RETRY_S = 0.25  # between two looks whether all ps are back for the first checkpoint
LATE_S = 20.0  # for tasks that have not joined yet, or a ps that was lost, when the job is over already


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
        is_new = not history.newest_incarnation
        epoch = max(history.chief_epoch, newest[1].chief_epoch if newest else 0) + 1
        self.journal.write("chief", epoch=epoch)
        self._clock = clock
        self.changed = ChangeEvent()
        self.sessions = Sessions(
            num_workers=config.num_workers,
            max_workers=config.max_workers,
            num_ps=config.num_ps,
            session_timeout_s=config.session_timeout_s,
            session_grace_s=config.session_grace_s,
            worker_timeout_s=config.worker_timeout_s,
            start_timeout_s=config.start_timeout_s,
            now=clock(),
            newest_incarnation=history.newest_incarnation,
            awaited=history.live,
            done=history.done,
            fenced=history.fenced,
            ready=history.ready,
        )
        self.lease_book = LeaseBook(history.next_step)
        for dataset, plan in history.plans.items():
            self.lease_book.open_dataset(dataset, plan)
        self.lease_book.know_accepted(history.accepted)
        self.ps_pool = PsPool(
            connect(epoch), lambda incarnation: incarnation in self.sessions.servers, self.sessions.is_live
        )
        self.commit_hold = CommitHold(self.ps_pool, chief_epoch=epoch, num_ps=config.num_ps)
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
            restoring=Restoring(self.ps_pool, config.checkpoint_dir, config.num_ps),
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
            job_started=lambda: bool(self.journal.history.initialized),
            carry=self._carry,
            resume=self._resume,
        )
        self._waits = Waits(clock)
        self._maintenance = Maintenance(
            config,
            self.sessions,
            self.journal,
            self.ps_pool,
            self.recovery,
            self.saving,
            spawn=self.spawn,
            stop=self.stop,
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
            num_ps=config.num_ps,
            write=self.metric_store.write,
        )
        self.training = TrainingUnits(
            *lender,
            sessions=self.sessions,
            lease_book=self.lease_book,
            recovery=self.recovery,
            first_checkpoint=self._first_checkpoint,
            metric_store=self.metric_store,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._finishing = False
        self.address = config.bind
        """Where the chief serves; set to the port really bound once it listens."""
        self.finished: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if not is_new:
            logger.info("chief epoch %d goes on from the journal in %s", epoch, config.state_dir)
        if config.checkpoint_dir:
            sweep(pathlib.Path(config.checkpoint_dir))
            if not history.ending:
                write_end(config.checkpoint_dir, "", ())

    # Verbs of the service

    def session(self, requests: AsyncIterator[Request]) -> AsyncIterator[Event]:
        """One session; see :class:`SessionStreams`."""
        return self.streams.attend(requests)

    async def open_dataset(self, incarnation: Incarnation, dataset: int, plan: Plan) -> Plan:
        """Registers a plan, or checks it against the one that stands; returns that.

        Raises:
            ConfigurationError: another plan stands; names each difference. Or the worker was added to a job whose
                batches are cut for those it started with.
        """
        await self._admit(incarnation)
        if dataset < 1:
            raise ConfigurationError(f"datasets are counted from 1, got {dataset}")
        if plan.staleness == 0 and self.sessions.was_added(incarnation.task):
            raise ConfigurationError(
                f"{incarnation.task} cannot be added at staleness 0: every batch is cut for the "
                f"{self.config.num_workers} workers that the job started with (num_workers)"
            )
        is_new = dataset not in self.lease_book.plans
        known = self.lease_book.open_dataset(dataset, plan)
        if is_new:
            self.journal.write("plan", dataset=dataset, plan=dataclasses.asdict(known))
        return known

    async def leave_group(self, incarnation: Incarnation, group: str) -> None:
        """Nobody need wait for the caller in a group of agreements, nor in the steps that are asked for in it."""
        await self._admit(incarnation)
        self.metric_store.leave(incarnation, group)
        await self.recovery.carry_out(
            incarnation, self.lease_book.remove(self.lease_book.steps.reserved_in(incarnation, group), {})
        )

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
            status.chief_report(self.address, self.journal.history.chief_epoch, os.getpid()),
            self._clock(),
        )

    # Incarnation of the job

    async def run(self) -> int:
        """Keeps time until the job is over; returns the exit code."""
        try:
            while not self.finished.done():
                self.streams.tick()
                await self.ps_pool.drop_lost()
                self._maintenance.tick()
                await asyncio.wait([self.finished], timeout=min(self.config.heartbeat_interval_s, 0.25))
            return self.finished.result()
        finally:
            self.streams.close()
            self.commit_hold.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.ps_pool.close()
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
            self.spawn(self._leave, exit_code, reason)

    async def _leave(self, exit_code: int, reason: str) -> None:
        """Saves first: perhaps all tasks are told to end, and then the memory of the ps goes too."""
        logger.warning("%s: it saves and leaves; the job goes on with the chief that is started in its place", reason)
        try:
            await asyncio.wait_for(self._maintenance.save_last(), LEAVE_S)
        except (StratagemError, TimeoutError) as error:
            logger.warning("No checkpoint before the chief leaves: %s", error)
        finally:
            if not self.finished.done():
                self.finished.set_result(exit_code)

    def spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Runs work beside the requests; its failure stops the job."""
        task = asyncio.create_task(self._guard(work, *arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        try:
            await work(*arguments)
        except Exception as error:
            logger.exception("The chief cannot go on")
            self.stop(1, f"the chief failed: {error}")

    def _carry(self, action: Prepare | Fence | Release | StopJob) -> None:
        if isinstance(action, Prepare):
            self.spawn(self._prepare, action.incarnation)
        elif isinstance(action, Fence):
            for server in action.servers:
                self.spawn(self._fence, action.incarnation, server)
        elif isinstance(action, Release):
            self.spawn(self._release, action.incarnation)
        elif not self._finishing:
            self._finishing = True
            self.spawn(self._finish, action)

    async def _prepare(self, incarnation: Incarnation) -> None:
        await self.recovery.prepare(incarnation, self.sessions.tasks[incarnation.task].address)
        server = self.ps_pool.get(incarnation)
        if server is not None:
            await self.commit_hold.include(server)
            await self.evaluation.pin_again()
        self.streams.perform(self.sessions.prepared(incarnation))

    async def _release(self, incarnation: Incarnation) -> None:
        await self.recovery.release(incarnation)
        await self.evaluation.release(incarnation)

    async def _fence(self, incarnation: Incarnation, server_life: Incarnation) -> None:
        server: Server | None = self.ps_pool.get(server_life)
        refs = await self.ps_pool.insist(server, lambda each: each.fence(incarnation)) if server is not None else None
        if refs is not None:
            self.recovery.fenced(incarnation, refs)
            self.streams.perform(self.sessions.fence_acknowledged(incarnation, server_life))

    async def _finish(self, stop: StopJob) -> None:
        log = logger.info if stop.exit_code == 0 else logger.error
        log("The job ends with exit code %d: %s", stop.exit_code, stop.reason)
        # Scripts may end before every task of their cluster has started, and a ps may have died a moment ago: who comes
        # late is to hear of the end, and a ps that is back in time is part of the last checkpoint.
        sessions, is_good = self.sessions, stop.exit_code == 0
        if not self.journal.history.ending:  # else an earlier incarnation of the chief has come that far
            if stop.exit_code in (0, 143):
                await self._save_last(self._clock() + (self.config.worker_timeout_s if is_good else 0.0))
            self._write_end(stop, [task for task in sessions.required if task.startswith("ps:")] + sessions.unfinished)
        # A chief that dies before it has told all goes on with that; only then the next one begins another job.
        self.journal.write("ending" if is_good else "stopped", reason=stop.reason)
        self.streams.broadcast(Stop(stop.exit_code, stop.reason))

        deadline = self._clock() + (LATE_S if is_good else 0.0)

        def all_gone() -> bool:
            is_late = sessions.absent_servers or sessions.never_came
            return sessions.deserted and not (is_good and is_late)

        await self._until(all_gone, max(deadline, self._clock() + self.config.session_timeout_s))
        self._write_end(stop, sessions.absent_servers + sessions.unfinished)
        if is_good:
            self.journal.write("stopped", reason=stop.reason)
        if not self.finished.done():
            self.finished.set_result(stop.exit_code)

    async def _save_last(self, deadline: float) -> None:
        """Waits for a ps that is away as long as while the job ran: without it, what the others hold is not saved."""
        while True:
            await self._until(lambda: not self.sessions.absent_servers, deadline)
            try:
                return await self._maintenance.save_last()
            except StratagemError as error:
                if not self.sessions.absent_servers or self._clock() >= deadline:
                    newest = self.journal.history.checkpoint or "none"
                    return logger.error("No last checkpoint: %s; the newest is %s", error, newest)

    async def _until(self, condition: Callable[[], bool], deadline: float) -> None:
        """Waits for it, on the clock of the job."""
        while not condition() and (left_s := deadline - self._clock()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), left_s)

    def _write_end(self, stop: StopJob, missing: Sequence[str]) -> None:
        """For the tasks that have not said goodbye: those that start again find no chief any more."""
        if stop.exit_code == 0 and self.config.checkpoint_dir:
            try:
                write_end(self.config.checkpoint_dir, stop.reason, missing)
            except OSError as error:
                logger.warning("The end of the job is not in %s: %s", self.config.checkpoint_dir, error)

    def _resume(self, incarnation: Incarnation, held: Sequence[Lease]) -> None:
        self.lease_book.resume(incarnation, held)

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

    async def _first_checkpoint(self, incarnation: Incarnation) -> None:
        """Waits for the initial checkpoint, if there is to be one."""
        await self._maintenance.before_leasing()
        await self._admit(incarnation)
        while not self._maintenance.may_lease:
            await asyncio.sleep(RETRY_S)
            await self._maintenance.before_leasing()
            await self._admit(incarnation)
