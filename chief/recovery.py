"""Bringing ps and chief back: what a ps must hear before it is used, and how a restarted chief rebuilds its books.

When must a ps that returns hear what? Units that are accepted are never leased again, so at staleness > 0 no worker
sends their updates any more: ``MarkLost`` only counts them and keeps a late resend out, and it may come before or after
the commits of others. Fences keep a dead worker's late commits out; they come before any worker learns the address. At
staleness 0 all ps go back together: commits that a surviving ps took meanwhile are undone by the restore, and a worker
that reports such a unit later is not believed (:meth:`Recovery.believe`).

A ps never chooses a checkpoint: where the job starts, all of them are put back to one before any worker hears of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from stratagem.chief.change_event import ChangeEvent
from stratagem.chief.checkpointing.checkpoints import ServersManifest
from stratagem.chief.checkpointing.restoring import RestoredServers, Restoring
from stratagem.chief.checkpointing.saving import Saving
from stratagem.chief.journal.history import encode_positions, encode_units
from stratagem.chief.journal.journal import Journal
from stratagem.chief.leasing.lease_book import LeaseBook, Positions
from stratagem.chief.leasing.steps import Removal
from stratagem.chief.membership.session import SessionState
from stratagem.chief.membership.sessions import Sessions
from stratagem.chief.servers.ps_pool import PsPool
from stratagem.chief.servers.servers import Server, ServerDescription
from stratagem.cluster.incarnation import Incarnation
from stratagem.cluster.units import Unit, UnitBitmap
from stratagem.errors import StratagemError

logger = logging.getLogger(__name__)

NOBODY = Incarnation("chief:0", 0)
"""Holder of units that were leased when the chief died, until it is known who has them."""


class Recovery:
    """What happens to units when a worker, a ps or the chief died.

    Args:
        sessions: membership.
        lease_book: the units.
        ps_pool: the ps.
        saving: its lock keeps a restore and a checkpoint apart.
        journal: the journal.
        changed: rung when units come back.
        restoring: puts ps back to checkpoints.
        give_up: ends the job with an exit code and a reason.
        begin_anew: told that the workers start from the beginning of their script.
    """

    def __init__(
        self,
        sessions: Sessions,
        lease_book: LeaseBook,
        ps_pool: PsPool,
        saving: Saving,
        journal: Journal,
        changed: ChangeEvent,
        *,
        restoring: Restoring,
        give_up: Callable[[int, str], None],
        begin_anew: Callable[[], None],
    ) -> None:
        self.is_open = False
        """Units may be leased: nothing is unknown any more about who holds what."""
        self._sessions = sessions
        self._lease_book = lease_book
        self._ps_pool = ps_pool
        self._saving = saving
        self._journal = journal
        self._changed = changed
        self._restoring = restoring
        self._give_up = give_up
        self._begin_anew = begin_anew
        self._lock = asyncio.Lock()
        self._origin: RestoredServers | None = None
        """The checkpoint that the job starts from."""
        self._put_back: dict[Incarnation, RestoredServers | None] = {}
        """To which checkpoint each ps was put back while it joined."""
        self._committed: dict[Incarnation, set[tuple[int, int]]] = {}
        self._restarted: set[Incarnation] = set()

    # A worker is over

    def fenced(self, incarnation: Incarnation, refs: Sequence[tuple[int, int]]) -> None:
        """A ps refuses ``incarnation`` and says what it had committed in incomplete steps, as (step, ordinal)."""
        self._committed.setdefault(incarnation, set()).update(refs)

    async def release(self, incarnation: Incarnation) -> None:
        """Every live ps refuses ``incarnation``: gives its units back."""
        async with self._lock:
            await self._release(incarnation)

    async def _release(self, incarnation: Incarnation) -> None:
        refs = self._committed.pop(incarnation, set())
        units = self._lease_book.held(incarnation)
        if units and self._lease_book.is_done_where_closed(incarnation):
            units = await self._accept_closed(units)
        committed = await self._committed_ordinals(units, refs) if self._lease_book.synchronous and units else {}
        removal = self._lease_book.remove(units, committed)
        back = await self.carry_out(incarnation, removal)
        self._lease_book.forget(incarnation)
        if back:
            logger.warning("%d units of %s go back: %s", len(back), incarnation, _listed(back))
        self._changed.notify()

    async def _accept_closed(self, units: Sequence[Unit]) -> list[Unit]:
        """Accepts units that their worker did not live to report, though every ps has closed them; returns the rest."""
        described = await self._ps_pool.describe()
        if len(described) < sum(session.task.type == "ps" for session in self._sessions.tasks.values()):
            return [*units]
        closed = _common([*described.values()])
        done = [unit for unit in units if unit.index in closed.get((unit.dataset, unit.epoch), UnitBitmap())]
        self.accepted(self._lease_book.mark_accepted(done))
        return [unit for unit in units if unit not in done]

    async def _committed_ordinals(self, units: Sequence[Unit], refs: set[tuple[int, int]]) -> dict[Unit, list[int]]:
        """Ordinals that some ps has committed (``refs``) or applied."""
        descriptions = (await self._ps_pool.describe()).values()
        committed: dict[Unit, list[int]] = {}
        for unit in units:
            found = self._lease_book.steps.find(unit)
            ordinals = {ordinal for step, ordinal in refs if found is not None and found[0].number == step}
            ordinals.update(ordinal for each in descriptions for ordinal in each.ordinals(unit))
            committed[unit] = sorted(ordinals)
        return committed

    async def carry_out(self, incarnation: Incarnation, removal: Removal) -> list[Unit]:
        """Journals and tells every ps what a removal closed, then makes its units pending; returns those."""
        for closing in removal.closings:
            self._journal.write("close_step", step=closing.step, included=encode_units(closing.included))
        await self._ps_pool.close_steps(removal.closings)
        self.accepted(removal.accepted)
        back = self._lease_book.give_back(incarnation, removal.returned)
        self._changed.notify()
        return back

    def accepted(self, units: Sequence[Unit]) -> None:
        """Journals accepted units."""
        if units:
            steps = self._lease_book.steps
            oldest = min(steps.open, default=steps.next_number)
            self._journal.write("accepted", durable=False, units=encode_units(units), oldest_step=oldest)

    # A ps joins

    async def prepare(self, incarnation: Incarnation, address: str) -> None:
        """Brings a ps up to date and announces nothing itself."""
        server = self._ps_pool.add(incarnation, address)
        for task, number in list(self._sessions.fenced.items()):
            refs = await self._ps_pool.insist(server, _fence(Incarnation(task, number)))
            self.fenced(Incarnation(task, number), refs or ())
        self._changed.notify()
        if self._sessions.tasks[incarnation.task].resumed:
            return
        try:
            if not self.is_open and await asyncio.to_thread(self._restoring.has_checkpoints):
                await self._begin_from_checkpoint(server)
            if (
                self.is_open
                and incarnation not in self._put_back
                and incarnation.task in self._journal.history.initialized
            ):
                async with self._lock:
                    await self._take_back(server)
        except StratagemError as error:
            self._give_up(2, str(error))

    async def _begin_from_checkpoint(self, server: Server) -> None:
        """A ps without memory, before the books are open: all go on from one checkpoint, which is chosen once."""
        while not self.is_open and server in self._ps_pool.servers:
            async with self._lock:
                if await self._is_put_back(server):
                    return
            await self._changed.wait()

    async def _is_put_back(self, server: Server) -> bool:
        """Puts the ps back if it can be said already to what; whether it could."""
        if self._sessions.stopping is not None:
            return True  # no checkpoint was whole, say; another search, of fewer ps by now, would move folders aside
        sessions = [each for each in self._sessions.tasks.values() if each.task.type == "ps"]
        if any(each.resumed and each.open for each in sessions):
            # Others have their memory. What this one lacks of it, open_books() counts.
            if server.incarnation.task in self._journal.history.initialized:
                self._put_back[server.incarnation] = await self._restoring.newest([server])
            return True
        if self._origin is not None:
            if server.incarnation not in self._put_back:  # it died after all had been put back
                await self._restoring.to(self._origin, server)
                self._put_back[server.incarnation] = self._origin
            return True
        servers = self._ps_pool.servers
        if len(servers) < len(sessions) or any(each.state is SessionState.AWAITED for each in sessions):
            return False
        origin = await self._restoring.newest(servers)
        if self._ps_pool.servers != servers:
            return False  # one of them died: it has not said whether its part is whole
        self._origin = origin
        self._put_back.update((each.incarnation, origin) for each in servers)
        return True

    async def _take_back(self, server: Server) -> None:
        """A ps lost its memory in the middle of the job."""
        if self._lease_book.synchronous and await self._restore_all(cause=server.incarnation.task):
            return
        restored = self._put_back.get(server.incarnation) or await self._restoring.newest([server])
        if restored is None:
            self._give_up(
                1,
                f"{server.incarnation.task} came back without its variables, and there is no checkpoint to take them "
                "from. Start the job with --checkpoint-dir to survive the loss of a ps.",
            )
            return
        # Staleness > 0: what the ps lacks is lost; the others go on.
        self._lease_book.restores += 1
        self._restarted.add(server.incarnation)
        num_lost, step = await self._mark_lost(server, self._lease_book.positions())
        self._journal.write("lost", updates=num_lost)
        logger.warning(
            "%s restored step %d from %s: %d updates lost", server.incarnation.task, step, restored.path.name, num_lost
        )

    async def _mark_lost(self, server: Server, accepted: Positions) -> tuple[int, int]:
        """Closes accepted units that a ps has no update of; their number, and the step of the ps."""
        described = await self._ps_pool.insist(server, lambda each: each.describe_units())
        if described is None:
            return 0, 0
        absent = _minus(accepted, described.applied())
        return await self._ps_pool.insist(server, lambda each: each.mark_lost(absent)) or 0, described.step

    async def _restore_all(self, cause: str) -> bool:
        """Staleness 0: all ps go back together; False when there is no checkpoint."""
        async with self._saving.lock:
            restored = await self._restoring.newest(self._ps_pool.servers)
            if restored is None:
                return False
            manifest = restored.manifest
            self._lease_book.restores += 1
            self._committed.clear()
            saved = _plus(manifest.accepted, manifest.applied)
            back = self._lease_book.roll_back(saved)
            self._journal.write("roll_back", accepted=encode_positions(_minus(self._lease_book.positions(), back.lost)))
        num_lost = sum(len(bitmap) for bitmap in back.lost.values())
        if num_lost:
            await self._ps_pool.insist_all(lambda each: each.mark_lost(back.lost))
            self._journal.write("lost", updates=num_lost)
        logger.warning(
            "%s lost its memory: all ps went back to step %d (%s); %d units are computed again, %d updates lost",
            cause,
            manifest.step,
            restored.path.name,
            back.revoked,
            num_lost,
        )
        self._changed.notify()
        return True

    async def believe(self, incarnation: Incarnation, dataset: int, epoch: int, indices: Sequence[int]) -> list[int]:
        """Those of the reported units that are accepted indeed.

        A unit that was leased before a ps went back to a checkpoint may have been applied there only before it did. At
        staleness > 0 it counts as lost; at staleness 0 it is taken out of its step and leased again.
        """
        doubtful = self._lease_book.doubtful(incarnation, dataset, epoch, indices)
        if not doubtful:
            return list(indices)
        if not self._lease_book.synchronous:
            units = {(dataset, epoch): UnitBitmap.of(unit.index for unit in doubtful)}
            for server in (each for each in self._ps_pool.servers if each.incarnation in self._restarted):
                num_lost, _ = await self._mark_lost(server, units)
                if num_lost:
                    self._journal.write("lost", updates=num_lost)
                    logger.warning(
                        "%s lacks %d more updates reported after its restore", server.incarnation.task, num_lost
                    )
            return list(indices)
        async with self._lock:
            missing = await self._ps_pool.missing(doubtful)
            own = [unit for unit in missing if unit in self._lease_book.held(incarnation)]
            await self.carry_out(incarnation, self._lease_book.remove(own, {}))
        if missing:
            logger.warning("%d units of %s are computed again: a restore undid them", len(missing), incarnation)
        gone = {unit.index for unit in missing}
        return [index for index in indices if index not in gone]

    # The chief starts

    async def open_books(self) -> None:
        """Everybody who may come back has: finds out what the ps hold, and opens the books.

        For a new job this takes over the position of the checkpoint that the ps restored, if they did.
        """
        history = self._journal.history
        descriptions = await self._ps_pool.describe()
        holding = [each for each in descriptions.values() if each.initialized]
        survivors = [s for s in self._sessions.tasks.values() if s.resumed and s.task.type in ("worker", "ps")]
        if not survivors:
            await self._start_from_checkpoint(holding)
        else:
            self._lease_book.know_accepted(_common(holding))
            if self._lease_book.synchronous:
                await self._find_owners()
            for server in self._ps_pool.servers:
                session = self._sessions.tasks[server.incarnation.task]
                if not session.resumed and server.incarnation.task in history.initialized:
                    await self._take_back(server)
        self._lease_book.founders = frozenset(s.incarnation for s in self._sessions.live("worker"))
        self.is_open = True
        self._changed.notify()

    async def _start_from_checkpoint(self, holding: list[ServerDescription]) -> None:
        """No process is older than this chief: the job starts, or starts again, from what the ps restored."""
        saved: Positions = {}
        if self._origin is not None:
            manifest = self._origin.manifest
            saved = _plus(manifest.accepted, manifest.applied if _is_synchronous(manifest) else {})
            for dataset, plan in manifest.plans.items():
                if dataset not in self._lease_book.plans:
                    self._lease_book.open_dataset(dataset, plan)
                    self._journal.write("plan", dataset=dataset, plan=dataclasses.asdict(plan))
            self._lease_book.steps.next_number = max(self._lease_book.steps.next_number, manifest.next_step)
            self._journal.write("initialized", tasks=sorted({incarnation.task for incarnation in self._put_back}))
            self._journal.write("restored", path=str(self._origin.path), undone=self._origin.num_undone)
            logger.info("The job goes on from step %d (%s)", manifest.step, self._origin.path)
        saved = _plus(saved, _common(holding))
        self._lease_book.roll_back(saved, reopen=True)
        self._begin_anew()
        self._lease_book.know_accepted(saved)
        self._journal.write("roll_back", accepted=encode_positions(self._lease_book.positions()))

    async def _find_owners(self) -> None:
        """Staleness 0: finds an owner, or an end, for the slices that nobody has reported."""
        steps, lease_book = self._lease_book.steps, self._lease_book
        for number, units in self._journal.history.steps.items():
            known = [unit for unit in units if unit.dataset in lease_book.plans]
            accepted = {u for u in known if u.index in lease_book.epoch(u.dataset, u.epoch).accepted}
            if len(accepted) < len(known):
                steps.readmit(number, known, accepted)
        orphans = steps.orphans()
        for unit in orphans:
            lease_book.epoch(unit.dataset, unit.epoch).acquire(unit.index, NOBODY, lease_book.restores)
        refs = {ref for each in self._committed.values() for ref in each}
        self._committed.clear()
        committed = await self._committed_ordinals(orphans, refs)
        lost = [unit for unit in orphans if committed[unit]]
        await self.carry_out(NOBODY, lease_book.remove(lost, committed))
        # What is left was granted in a reply that nobody got: workers without a slice in the step may have it.
        for unit, incarnation in steps.reserve_orphans([s.incarnation for s in self._sessions.live("worker")]):
            lease_book.give_back(NOBODY, [unit])
            lease_book.epoch(unit.dataset, unit.epoch).acquire(unit.index, incarnation, lease_book.restores)
        await self.carry_out(NOBODY, lease_book.remove(steps.orphans(), {}))


def _fence(incarnation: Incarnation) -> Callable[[Server], Awaitable[list[tuple[int, int]]]]:
    return lambda server: server.fence(incarnation)


def _common(descriptions: Sequence[ServerDescription]) -> Positions:
    """Units that are closed on every ps."""
    if not descriptions:
        return {}
    common = dict(descriptions[0].closed)
    for each in descriptions[1:]:
        common = {key: bitmap & each.closed.get(key, UnitBitmap()) for key, bitmap in common.items()}
    return common


def _is_synchronous(manifest: ServersManifest) -> bool:
    return any(plan.staleness == 0 for plan in manifest.plans.values())


_Units = Mapping[tuple[int, int], UnitBitmap]


def _plus(left: _Units, right: _Units) -> Positions:
    keys = {*left, *right}
    return {key: left.get(key, UnitBitmap()) | right.get(key, UnitBitmap()) for key in keys}


def _minus(left: _Units, right: _Units) -> Positions:
    rest = {key: bitmap - right.get(key, UnitBitmap()) for key, bitmap in left.items()}
    return {key: bitmap for key, bitmap in rest.items() if len(bitmap)}


def _listed(units: Sequence[Unit], limit: int = 5) -> str:
    shown = ", ".join(str(unit) for unit in units[:limit])
    return shown + (", …" if len(units) > limit else "")
