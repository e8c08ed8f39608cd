"""A ps that joins or comes back: what it must learn and load before any worker uses it.

At staleness > 0 accepted units are never leased again, so no worker sends their updates any more: ``MarkLost`` only
counts them and keeps a late resend out, and it may come before or after the commits of others. At staleness 0 all ps
roll back together: the restore undoes commits that a surviving ps took meanwhile, and a worker that reports such a unit
later is not believed (``Recovery.believe``).

A ps never chooses a checkpoint: when the job starts, all of them load the same one before any worker hears of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

from stratagem.chief.checkpointing.restoring import RestoredServers, Restoring
from stratagem.chief.checkpointing.saving import Saving, untaken
from stratagem.chief.chief_state import ChiefPart, ChiefState
from stratagem.chief.journal.history import encode_positions
from stratagem.chief.leasing.positions import Positions, common, minus, plus
from stratagem.chief.membership.session import SessionState
from stratagem.chief.servers.servers import Server, ServerDescription
from stratagem.cluster.membership import backup_of
from stratagem.cluster.task import Incarnation
from stratagem.errors import JournalLostError, PeerUnavailableError, StratagemError

logger = logging.getLogger(__name__)

_LOSE_LESS = (
    "; --checkpoint-every-s 60 makes the chief take checkpoints on the way (those that the script saves elsewhere, as "
    "an Estimator does, are for its next start), and --ps-replicas 2 keeps copies"
)


class PsReturn(ChiefPart):
    """Restores the memory of a ps: from a checkpoint, or from another ps's copy. ``saving``: its lock keeps a restore
    and a checkpoint apart; ``all_went_back``: called when all ps rolled back to a checkpoint together."""

    def __init__(self, state: ChiefState, saving: Saving, *, all_went_back: Callable[[], None]) -> None:
        super().__init__(state)
        self.lock = asyncio.Lock()
        """Held while units change hands or a ps goes back; by who closes steps, in :meth:`closing_steps`."""
        self.is_awaited = False
        """At staleness 0 commits are held, until a ps is back perhaps."""
        self.origin: RestoredServers | None = None
        """The checkpoint that the job starts from."""
        self.put_back: dict[Incarnation, RestoredServers | None] = {}
        """To which checkpoint each ps was put back while it joined."""
        self._saving = saving
        self._restoring = Restoring(self._ps_pool, self._config.checkpoint_dir)
        self._num_copied = self._config.num_ps if self._config.ps_replicas > 1 else 0
        """ps whose memory is kept by another ps too; 0: none's is."""
        self._all_went_back = all_went_back
        self.restarted = {Incarnation(task, number) for task, number in self._journal.history.put_back.items()}
        """Those that went back to a checkpoint alone, perhaps by a chief that has not counted what they lack."""
        self._in_doubt: dict[Incarnation, Positions] = {}
        """Units begun when each ps (or one that it was joined from) was put back: of these it may have some updates,
        and lack others."""
        self._begun: set[Incarnation] = set()
        """Those that came for another number of ps, and have begun."""
        self._fresh: dict[Incarnation, str] = {}
        """Those that serve, with the checkpoint that they begin from once there is another number of them."""

    @contextlib.asynccontextmanager
    async def closing_steps(self) -> AsyncIterator[None]:
        """Inside, the lock is held and steps may be closed: a ps may have to apply one then, for which it waits while
        commits are held, and the ps that these wait for would wait for the lock."""
        while True:
            async with self.lock:
                if not self.is_awaited:
                    yield
                    return
            await self._changed.wait()

    def await_back(self) -> None:
        """Commits are held, and stay so until a ps is back that is to end now. PeerUnavailableError: a step is being
        closed."""
        if self._lease_book.synchronous and not self.is_awaited:
            if self.lock.locked():
                raise PeerUnavailableError("what a worker or ps left behind is being cleaned up")
            self.is_awaited = True

    async def bring_up_to_date(self, server: Server) -> None:
        """Has it go on from a checkpoint or a copy, or ends the job where that cannot be; not when the end was told."""
        incarnation = server.incarnation
        if self._journal.history.ending:
            return
        with self.lost_where_refused(server):
            if incarnation in self._begun:
                return
            if (fresh := self._fresh.pop(incarnation, None)) is not None:
                self.put_back.pop(incarnation, None)
                if await self._has_begun(server, fresh):
                    return
            if not self._state.is_open and await self._has_taken_over(server):
                return
            if not self._state.is_open and await self._restoring.has_checkpoints():
                await self._begin_from_checkpoint(server)
            if (
                self._state.is_open
                and incarnation not in self.put_back
                and incarnation.task in self._journal.history.initialized
            ):
                async with self.lock:
                    await self.take_back(server)

    @contextlib.contextmanager
    def lost_where_refused(self, server: Server) -> Iterator[None]:
        """Nothing may be there that a ps can be put back to."""
        try:
            yield
        except JournalLostError:
            raise  # which says nothing of the checkpoints: the next chief puts it back
        except StratagemError as error:
            self._is_lost(server, 2, str(error))

    async def _begin_from_checkpoint(self, server: Server) -> None:
        """A ps without memory, before the books are open: all go on from one checkpoint, which is chosen once."""
        while not self._state.is_open and server in self._ps_pool.servers:
            async with self.lock:
                if await self._is_put_back(server):
                    return
            await self._changed.wait()

    async def _is_put_back(self, server: Server) -> bool:
        """Puts the ps back if it can be said already to what; whether it could."""
        if self._sessions.stopping is not None:
            return True  # no checkpoint was whole, say; another search, of fewer ps by now, would move folders aside
        sessions = self._sessions.ps
        if any(each.resumed and each.open for each in sessions):
            # Others have their memory. What this one lacks of it, open_books() counts.
            if server.incarnation.task in self._journal.history.initialized:
                self.put_back[server.incarnation] = await self._restoring.newest([server])
                self._note_put_back(server)  # for the next chief, if this one does not live to open its books
            return True
        if self.origin is not None:
            if server.incarnation not in self.put_back:  # it died after all had been put back
                path, num_ps = str(self.origin.path), self._ps_pool.num_ps
                await self._ps_pool.insist(server, lambda each: each.restore_shards(path, num_ps))
                self._has_gone_back([server])
            return True
        servers = self._ps_pool.servers
        if len(servers) < len(sessions) or any(each.state is SessionState.AWAITED for each in sessions):
            told = self._config.num_ps
            everybody = self._sessions.tasks.values()
            if told != len(servers) or any(each.resumed or each.state is SessionState.AWAITED for each in everybody):
                return False
            if not all(each.open for each in sessions[:told]):
                return False
            # Nobody has a memory, and those that the job had beyond these need not come: whoever does is taken in.
            self._journal.write("routed", num_ps=told)
            self._sessions.route(told)  # what follows for each is under way: it is being prepared
        origin = await self._restoring.newest(servers, is_new=not self._journal.history.initialized)
        if self._ps_pool.servers != servers:
            return False  # one of them died: it has not said whether its part is whole
        self.origin = origin
        self._has_gone_back(servers)
        return True

    def _has_gone_back(self, servers: Sequence[Server]) -> None:
        """With the others. To the next chief, if this one does not live to open its books, they are survivors."""
        for server in servers:
            self.put_back[server.incarnation] = self.origin
            if self.origin is not None and server.incarnation.task in self._journal.history.initialized:
                self._note_put_back(server)

    async def begin_on(self, checkpoint: str, num_ps: int, newcomers: Sequence[Server]) -> None:
        """Newcomers begin from a checkpoint that was just made, as some of ``num_ps``; those that serve will, when they
        are prepared next."""
        await asyncio.gather(*(server.restore_shards(checkpoint, num_ps, is_fresh=True) for server in newcomers))
        self._begun = {server.incarnation for server in newcomers}
        servers = [*newcomers, *self._ps_pool.servers]
        # Each has the updates that any had, and what one lacks that was put back alone all will.
        in_doubt = plus(*(self._in_doubt.get(server.incarnation, {}) for server in self._put_back_alone()))
        for server in servers:
            self._note_in_doubt(server, in_doubt)
        if self.restarted:
            for server in servers:
                self._note_put_back(server)
        self._fresh = {server.incarnation: checkpoint for server in self._ps_pool.servers}

    async def _has_begun(self, server: Server, checkpoint: str) -> bool:
        """Whether a ps begins from the checkpoint that was just made; else it goes back to one that is whole."""
        if refusal := await self._restoring.refusal(server, checkpoint, is_fresh=True):
            logger.warning("%s cannot start from what was just written: %s", server.incarnation.task, refusal)
        return not refusal

    async def take_back(self, server: Server) -> None:
        """A ps lost its memory in the middle of the job."""
        if self._num_copied and await self._take_over(server):
            return
        if self._lease_book.synchronous and await self._restore_all(cause=server.incarnation.task):
            return
        async with self._saving.writing:
            restored = self.put_back.get(server.incarnation) or await self._restoring.newest([server])
        if restored is None and self._restoring.directory and not self._lease_book.has_leased:
            # The first checkpoint was not there yet, nor any unit leased: a worker gives it the initial values again.
            logger.warning(
                "%s restarted without its initial values; a worker provides them again", server.incarnation.task
            )
            return
        if restored is None:
            self._is_lost(
                server,
                1,
                f"{server.incarnation.task} restarted without its variables, and there is no checkpoint to restore "
                "them from. Start the job with --checkpoint-dir (`python train.py`: every task "
                "with STRATAGEM_CHECKPOINT_DIR) to survive the loss of a ps.",
            )
            return
        if server not in self._ps_pool.servers:
            return  # it was left out and taken in again meanwhile, say, with what the others began from
        # Staleness > 0: what the ps lacks is lost; the others go on.
        self._lease_book.restores += 1
        # Among another number of ps it may have served as one of the last number until now: then what came meanwhile is
        # in no part of what all of them began from.
        for each in self._ps_pool.servers if self._journal.history.is_rerouted else [server]:
            self._note_put_back(each)
        num_lost, step = await self._mark_lost(server, self._lease_book.positions())
        logger.warning(
            "%s restored step %d from %s: %d updates lost%s",
            *(server.incarnation.task, step, restored.path.name, num_lost),
            _LOSE_LESS if num_lost and not self._config.checkpoint_every_s else "",
        )

    def _note_put_back(self, server: Server) -> None:
        self.restarted.add(server.incarnation)
        self._journal.write("put_back", task=server.incarnation.task, incarnation=server.incarnation.number)

    def _is_lost(self, server: Server, exit_code: int, reason: str) -> None:
        """Nothing can be given back to a ps. The job ends; one that has come to its end already takes no checkpoint."""
        logger.error("%s", reason)
        self._ps_pool.without_memory.add(server.incarnation)
        self._stop(exit_code, reason)

    async def _has_taken_over(self, server: Server) -> bool:
        """Before the books are open: whether the ps, which died while no chief was there, took a copy over."""
        task = server.incarnation.task
        if not self._num_copied or task not in self._journal.history.initialized:
            return False
        holder = self._sessions.tasks[backup_of(task, self._num_copied)]
        while holder.state is SessionState.AWAITED and server in self._ps_pool.servers:
            await self._changed.wait()
        async with self.lock:
            taken = await self._take_over(server)
            if self._sessions.tasks[task].incarnation == server.incarnation:  # else this one is lost, another is there
                self._sessions.tasks[task].resumed = taken
        return taken

    async def _take_over(self, server: Server) -> bool:
        """Another ps may have all that the last process of this one acknowledged; then nobody goes back to anything."""
        task = server.incarnation.task
        last = Incarnation(task, self._sessions.tasks[task].served)
        if last == server.incarnation:
            return False  # there was no copy, and it serves what a checkpoint had: the copy of that is no better
        holder = self._sessions.tasks[backup_of(task, self._num_copied)]
        asked = holder.incarnation

        async def take_over(each: Server) -> str:
            if asked not in self._sessions.servers:
                return f"{asked} is away"
            return await each.take_over(asked, holder.address, last)

        refusal = await self._ps_pool.insist(server, take_over)
        if refusal:
            logger.warning("%s cannot resume from a copy: %s", task, refusal)
        if refusal != "":
            return refusal is None  # it is lost: there is nobody to put back
        self._note_in_doubt(server, self._in_doubt.get(last, {}))
        # What the last one lacks of what is reported later, this one lacks too; and what it lacks when the books are
        # opened counts then, unless the job starts anew.
        if last in self.restarted or not self._state.is_open:
            self._note_put_back(server)
        if not self._state.is_open:
            logger.warning("%s resumes from what %s had a copy of", task, holder.task)
            return True
        num_lost, step = await self._mark_lost(server, self._lease_book.positions())
        logger.warning(
            "%s resumes from step %d, of which %s had a copy: %d updates lost", task, step, holder.task, num_lost
        )
        return True

    async def _mark_lost(self, server: Server, accepted: Positions) -> tuple[int, int]:
        """Counts and closes accepted units of which a ps lacks an update; their number, and the step of the ps.

        Of one that no worker has told yet whether it is to hold rows, among another number of ps, this comes later.
        """
        described = await self._ps_pool.insist(server, lambda each: each.describe_units())
        if described is None:
            return 0, 0
        if server.incarnation not in self._in_doubt:
            self._note_in_doubt(server, self._lease_book.begun())
        if self._is_untold(described) or (described.complete and not described.has_part):
            if not described.complete and not self._journal.history.is_rerouted:
                self._journal.write("untold")  # it came back, and is looked at again once a worker has told it
            return 0, described.step  # of no update, and what it has closed says nothing
        # What another ps has closed and no worker has reported is being computed again.
        in_doubt = plus(self._in_doubt[server.incarnation], minus(accepted, self._lease_book.positions()))
        may_be_half = self._lease_book.steps.per_unit != 1  # else an optimizer without updates is another model's
        halves = common([in_doubt, described.halves]) if may_be_half else {}
        absent = minus(accepted, minus(described.applied(), halves))
        await self.lose(server.incarnation, absent)
        return sum(map(len, absent.values())), described.step

    def _note_in_doubt(self, server: Server, units: Positions) -> None:
        """Each is all epochs: of processes before the last one that served, whose copy may still be taken over, none
        is kept."""
        task, last = server.incarnation.task, self._sessions.tasks[server.incarnation.task].served
        self._in_doubt = {who: kept for who, kept in self._in_doubt.items() if who.task != task or who.number >= last}
        self._in_doubt[server.incarnation] = units

    def _is_untold(self, described: ServerDescription) -> bool:
        """Whether a worker has yet to say what a ps is to hold, among another number of them."""
        is_anew = self._journal.history.is_rerouted or (described.origin_elements and not described.complete)
        is_known = described.complete or described.has_part or self._sessions.work_is_done
        return bool(is_anew) and not is_known

    async def close(self, units: Positions, described: Mapping[Incarnation, ServerDescription]) -> None:
        """Closes units that some ps has an update of. What one lacks that was put back is counted first, and what one
        lacks that no worker has told what it is to hold once one has."""
        may_take = bool(untaken([*described.values()]))  # of models that workers are yet to prepare again
        untold = {who for who, each in described.items() if self._is_untold(each) or (may_take and not each.has_part)}
        for server in self._ps_pool.servers:
            if server.incarnation in untold:
                self._note_put_back(server)
        await self.lost_after_restarts(units)  # of what others have closed nothing is torn

        async def close_on(server: Server) -> None:
            if server.incarnation not in untold:
                await server.mark_lost(units)

        await self._ps_pool.insist_all(close_on)

    async def lose(self, incarnation: Incarnation, units: Positions) -> None:
        """Counts and closes units of which a ps lacks an update."""
        server, units = self._ps_pool.get(incarnation), minus(units, {})
        if units and server is not None:
            # First: a chief that follows takes what the ps has closed for applied.
            self._journal.write("lost", task=incarnation.task, units=encode_positions(units))
            await self._ps_pool.insist(server, lambda each: each.mark_lost(units))

    async def _restore_all(self, cause: str) -> bool:
        """Staleness 0: all ps go back together; False when there is no checkpoint."""
        async with self._saving.lock:
            described = (await self._ps_pool.describe()).values()
            restored = await self._restoring.newest(self._ps_pool.servers)
            if restored is None:
                return False
            manifest = restored.manifest
            self._lease_book.restores += 1
            self._all_went_back()
            self.restarted.clear()
            saved = manifest.done
            accumulates = any(each.accumulates for each in described)
            ended, is_done = self._journal.history.ended, self._sessions.work_is_done
            if is_done:  # no worker asks for anything
                ended = {key: leases.plan.num_units for key, leases in self._lease_book.epochs.items()}
            back = self._lease_book.roll_back(saved, ended, accumulates=accumulates)
            num_lost, undone = sum(map(len, back.lost.values())), ""
            if num_lost and is_done:
                undone = (
                    f"{cause} lost its memory when every worker had finished, and all ps went back to step "
                    f"{manifest.step}; updates lost: {num_lost}"
                )
            if num_lost:
                self._journal.write("lost", task="", units=encode_positions(back.lost))
            accepted = encode_positions(self._lease_book.positions())
            self._journal.write("roll_back", accepted=accepted, undone=undone)
        await self.close_lost()
        logger.warning(
            "%s lost its memory: all ps rolled back to step %d (%s); %d units are recomputed, %d updates lost",
            cause,
            manifest.step,
            restored.path.name,
            back.revoked,
            num_lost,
        )
        self._changed.notify()
        return True

    async def close_lost(self) -> None:
        """Staleness 0: closes on all ps what was lost when they went back: the chief may have died before it had."""
        if lost := self._journal.history.lost.get(""):
            await self._ps_pool.insist_all(lambda each: each.mark_lost(lost))

    def _put_back_alone(self) -> list[Server]:
        return [server for server in self._ps_pool.servers if server.incarnation in self.restarted]

    async def lost_after_restarts(self, units: Positions) -> None:
        """Counts and closes those of the reported units that a ps lacks which was put back alone."""
        for server in self._put_back_alone():
            num_lost, _ = await self._mark_lost(server, units)
            if num_lost:
                logger.warning("%s lacks %d more updates reported after its restore", server.incarnation.task, num_lost)
