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
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from stratagem.checkpoint.ended import write_end
from stratagem.chief import checkpoints, status
from stratagem.chief.attendance import Attendance
from stratagem.chief.bell import Bell
from stratagem.chief.counting import Counting
from stratagem.chief.events import Event, Request, Stop
from stratagem.chief.fleet import Connect, Fleet
from stratagem.chief.history import encode_units
from stratagem.chief.journal import Journal
from stratagem.chief.lending import Lending, Loan, Loans
from stratagem.chief.lives import Life
from stratagem.chief.quiet import Quiet
from stratagem.chief.recovery import Recovery
from stratagem.chief.restoring import Restoring
from stratagem.chief.rounds import Rounds
from stratagem.chief.saving import CommittedCheckpoint, Saving
from stratagem.chief.servers import Server
from stratagem.chief.sessions import Fence, Prepare, Release, Sessions, StopJob
from stratagem.chief.tallies import Delta
from stratagem.chief.waits import Waits
from stratagem.cluster.config import ChiefConfig
from stratagem.cluster.units import Plan
from stratagem.errors import ConfigurationError, JobStoppedError, StratagemError
from stratagem.rpc.confinement import AllowedFolders

logger = logging.getLogger(__name__)

LATE_S = 20.0  # for tasks that have not joined yet, or a ps that was lost, when the job is over already
RETRY_S = 0.25  # between two looks whether all ps are back for the first checkpoint


class ChiefJob:
    """The chief's state and what it does with it.

    Args:
        config: of the chief.
        connect: given the chief's epoch, what makes the connection to a ps: (life, address).
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
        self.bell = Bell()
        self.sessions = Sessions(
            num_workers=config.num_workers,
            max_workers=config.max_workers,
            num_ps=config.num_ps,
            session_timeout_s=config.session_timeout_s,
            worker_timeout_s=config.worker_timeout_s,
            start_timeout_s=config.start_timeout_s,
            now=clock(),
            newest_incarnation=history.newest_incarnation,
            awaited=history.live,
            done=history.done,
            fenced=history.fenced,
            ready=history.ready,
        )
        self.lending = Lending(history.next_step)
        for dataset, plan in history.plans.items():
            self.lending.open_dataset(dataset, plan)
        self.lending.know_accepted(history.accepted)
        self.fleet = Fleet(connect(epoch), lambda life: life in self.sessions.servers, self.sessions.is_live)
        self.quiet = Quiet(self.fleet, chief_epoch=epoch, num_ps=config.num_ps)
        self.saving = Saving(
            self.lending,
            chief_epoch=epoch,
            quiet=self.quiet,
            keep=config.keep_checkpoints,
            committed=self._committed,
        )
        self.recovery = Recovery(
            self.sessions,
            self.lending,
            self.fleet,
            self.saving,
            self.journal,
            self.bell,
            restoring=Restoring(self.fleet, config.checkpoint_dir, config.num_ps),
            give_up=self.stop,
            begin_anew=lambda: self.counting.begin_anew(),
        )
        self.attendance = Attendance(
            self.sessions,
            self.journal,
            self.bell,
            clock=clock,
            heartbeat_interval_s=config.heartbeat_interval_s,
            session_timeout_s=config.session_timeout_s,
            job_started=lambda: bool(self.journal.history.initialized),
            carry=self._carry,
            resume=self._resume,
        )
        self._waits = Waits(clock)
        self.counting = Counting(
            self.sessions,
            self.lending,
            self.fleet,
            self.quiet,
            self.journal,
            self.bell,
            admit=self._admit,
            waits=self._waits,
            num_ps=config.num_ps,
            page_bytes=config.max_message_bytes // 4,
        )
        self._rounds = Rounds(self)
        self._tasks: set[asyncio.Task[None]] = set()
        self._finishing = False
        self.address = config.bind
        """Where the chief serves; set to the port really bound once it listens."""
        self.finished: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if not is_new:
            logger.info("chief epoch %d goes on from the journal in %s", epoch, config.state_dir)
        if config.checkpoint_dir:
            checkpoints.sweep(config.checkpoint_dir)
            if not history.ending:
                write_end(config.checkpoint_dir, "", ())

    # Verbs of the service

    def session(self, requests: AsyncIterator[Request]) -> AsyncIterator[Event]:
        """One session; see :class:`Attendance`."""
        return self.attendance.attend(requests)

    async def open_dataset(self, life: Life, dataset: int, plan: Plan) -> Plan:
        """Registers a plan, or checks it against the one that stands; returns that.

        Raises:
            ConfigurationError: another plan stands; names each difference. Or the worker was added to a job whose
                batches are cut for those it started with.
        """
        await self._admit(life)
        if dataset < 1:
            raise ConfigurationError(f"datasets are counted from 1, got {dataset}")
        if plan.staleness == 0 and self.sessions.was_added(life.task):
            raise ConfigurationError(
                f"{life.task} cannot be added at staleness 0: every batch is cut for the {self.config.num_workers} "
                "workers that the job started with (num_workers)"
            )
        is_new = dataset not in self.lending.plans
        known = self.lending.open_dataset(dataset, plan)
        if is_new:
            self.journal.write("plan", dataset=dataset, plan=dataclasses.asdict(known))
        return known

    async def next_units(
        self,
        life: Life,
        dataset: int,
        epoch: int,
        accepted: Sequence[int],
        deltas: Sequence[Delta],
        held: Sequence[int],
        want: int,
        wait: bool,
        stop: int | None = None,
        group: str = "",
    ) -> Loans:
        """Counts accepted units and lends up to ``want`` others before ``stop``; with ``wait`` not before there is one,
        or the end. Who has left the ``group`` gets no part of the same step."""
        await self._accept(life, dataset, epoch, accepted, deltas)
        if not want:
            return Loans()
        await self._first_checkpoint(life)
        with self._waits.of(life):
            while True:
                next_step = self.lending.steps.next_number
                live = [session.life for session in self.sessions.live("worker")]
                workers = [each for each in live if not self.counting.has_left(each, group)]
                loans = self.lending.ask(life, dataset, epoch, frozenset(held), want, workers, stop, group)
                self._journal_steps(next_step)
                if loans.loans or loans.end or not wait:
                    return loans
                self._waits.note(life, "to finish their units", loans.waits_for)
                await self.bell.heard()
                await self._admit(life)

    async def start_step(
        self, life: Life, dataset: int, epoch: int, accepted: Sequence[int], deltas: Sequence[Delta], clock: int
    ) -> int:
        """Waits until the staleness bound lets the caller start; returns its clock."""
        await self._accept(life, dataset, epoch, accepted, deltas)
        with self._waits.of(life):
            while True:
                workers = [session.life for session in self.sessions.live("worker")]
                known = self.lending.clocks.clock(life)
                now, late = self.lending.start_step(life, dataset, clock, workers)
                if now != known:
                    self.bell.ring()
                if not late:
                    return now
                self._waits.note(life, f"to finish steps before step {now} may start", late)
                await self.bell.heard()
                await self._admit(life)

    async def leave_epoch(
        self, life: Life, dataset: int, epoch: int, accepted: Sequence[int], deltas: Sequence[Delta]
    ) -> None:
        """Gives back what is on loan to the caller in an epoch."""
        await self._accept(life, dataset, epoch, accepted, deltas)
        await self.recovery.carry_out(life, self.lending.leave(life, dataset, epoch))

    async def leave_group(self, life: Life, group: str) -> None:
        """Nobody need wait for the caller in a group of agreements, nor in the steps that are asked for in it."""
        await self._admit(life)
        self.counting.leave(life, group)
        await self.recovery.carry_out(life, self.lending.remove(self.lending.steps.reserved_in(life, group), {}))

    async def save_checkpoint(self, life: Life, directory: str) -> CommittedCheckpoint:
        """Takes a checkpoint.

        Raises:
            ConfigurationError: no directory is given and the chief has none.
            ForbiddenError: the directory is none of those that the chief was started for.
            CheckpointError: it cannot be written.
            PeerUnavailableError: a ps is away.
        """
        await self._admit(life)
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
            self.lending,
            self.journal.history,
            self.attendance.progress,
            self.attendance.waiting_steps,
            self._waits.noted,
            status.chief_report(self.address, self.journal.history.chief_epoch, os.getpid()),
            self._clock(),
        )

    # Life of the job

    async def run(self) -> int:
        """Keeps time until the job is over; returns the exit code."""
        try:
            while not self.finished.done():
                self.attendance.tick()
                await self.fleet.drop_lost()
                self._rounds.tick()
                await asyncio.wait([self.finished], timeout=min(self.config.heartbeat_interval_s, 0.25))
            return self.finished.result()
        finally:
            self.attendance.close()
            self.quiet.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.fleet.close()
            self.journal.close()

    def stop(self, exit_code: int, reason: str) -> None:
        """Ends the job."""
        self.attendance.perform(self.sessions.stop(exit_code, reason))

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
            self.spawn(self._prepare, action.life)
        elif isinstance(action, Fence):
            for server in action.servers:
                self.spawn(self._fence, action.life, server)
        elif isinstance(action, Release):
            self.spawn(self._release, action.life)
        elif not self._finishing:
            self._finishing = True
            self.spawn(self._finish, action)

    async def _prepare(self, life: Life) -> None:
        await self.recovery.prepare(life, self.sessions.tasks[life.task].address)
        server = self.fleet.get(life)
        if server is not None:
            await self.quiet.include(server)
            await self.counting.pin_again()
        self.attendance.perform(self.sessions.prepared(life))

    async def _release(self, life: Life) -> None:
        await self.recovery.release(life)
        await self.counting.release(life)

    async def _fence(self, life: Life, server_life: Life) -> None:
        server: Server | None = self.fleet.get(server_life)
        refs = await self.fleet.insist(server, lambda each: each.fence(life)) if server is not None else None
        if refs is not None:
            self.recovery.fenced(life, refs)
            self.attendance.perform(self.sessions.fence_acknowledged(life, server_life))

    async def _finish(self, stop: StopJob) -> None:
        log = logger.info if stop.exit_code == 0 else logger.error
        log("The job ends with exit code %d: %s", stop.exit_code, stop.reason)
        # Scripts may end before every task of their cluster has started, and a ps may have died a moment ago: who comes
        # late is to hear of the end, and a ps that is back in time is part of the last checkpoint.
        sessions, is_good = self.sessions, stop.exit_code == 0
        deadline = self._clock() + (LATE_S if is_good else 0.0)
        if not self.journal.history.ending:  # else an earlier life of the chief has come that far
            await self._until(lambda: not sessions.absent_servers, deadline)
            if stop.exit_code in (0, 143):
                try:
                    await self._rounds.save_last()
                except StratagemError as error:
                    logger.error("No last checkpoint: %s", error)
            self._write_end(stop, [task for task in sessions.required if task.startswith("ps:")])
        # A chief that dies before it has told all goes on with that; only then the next one begins another job.
        self.journal.write("ending" if is_good else "stopped", reason=stop.reason)
        self.attendance.broadcast(Stop(stop.exit_code, stop.reason))

        def all_gone() -> bool:
            is_late = sessions.absent_servers or sessions.never_came
            return sessions.deserted and not (is_good and is_late)

        await self._until(all_gone, max(deadline, self._clock() + self.config.session_timeout_s))
        self._write_end(stop, sessions.absent_servers)
        if is_good:
            self.journal.write("stopped", reason=stop.reason)
        if not self.finished.done():
            self.finished.set_result(stop.exit_code)

    async def _until(self, condition: Callable[[], bool], deadline: float) -> None:
        """Waits for it, on the clock of the job."""
        while not condition() and (left_s := deadline - self._clock()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.bell.heard(), left_s)

    def _write_end(self, stop: StopJob, missing: Sequence[str]) -> None:
        """For the ps that have not said goodbye: those that start again find no chief any more."""
        if stop.exit_code == 0 and self.config.checkpoint_dir:
            try:
                write_end(self.config.checkpoint_dir, stop.reason, missing)
            except OSError as error:
                logger.warning("The end of the job is not in %s: %s", self.config.checkpoint_dir, error)

    def _resume(self, life: Life, held: Sequence[Loan]) -> None:
        self.lending.resume(life, held)

    def _committed(self, committed: CommittedCheckpoint) -> None:
        self.journal.write("checkpoint", path=committed.path)
        logger.info("Checkpoint of step %d: %s", committed.step, committed.path)

    # Callers

    async def _admit(self, life: Life) -> None:
        """Waits until the cluster is complete and the books are open; everybody else may go on at once.

        Raises:
            JobStoppedError: the job is over.
            FencedError: the caller is.
        """
        while True:
            stopping = self.sessions.stopping
            if stopping is not None:
                raise JobStoppedError(f"the job is over: {stopping.reason}", stopping.exit_code)
            self.sessions.check(life)
            if self.sessions.ready and self.recovery.settled:
                return
            await self.bell.heard()

    async def _first_checkpoint(self, life: Life) -> None:
        """Waits for the initial checkpoint, if there is to be one."""
        await self._rounds.before_lending()
        await self._admit(life)
        while not self._rounds.may_lend:
            await asyncio.sleep(RETRY_S)
            await self._rounds.before_lending()
            await self._admit(life)

    async def _accept(
        self, life: Life, dataset: int, epoch: int, indices: Sequence[int], deltas: Sequence[Delta]
    ) -> None:
        await self._admit(life)
        believed = await self.recovery.believe(life, dataset, epoch, indices)
        await self._admit(life)
        accepted = self.lending.accept(life, dataset, epoch, believed)
        self.recovery.accepted(accepted)
        self.counting.keep(deltas)
        if accepted:
            self.bell.ring()

    def _journal_steps(self, first: int) -> None:
        for number in range(first, self.lending.steps.next_number):
            units = self.lending.steps.open[number].units
            self.journal.write("step", durable=False, step=number, units=encode_units(units))
