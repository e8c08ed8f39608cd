"""Recovers from the death of workers, ps and the chief: what happens to units, and how a restarted chief rebuilds its
books.

Fences keep a dead worker's late commits out; a ps learns them before any worker learns its address. What else a
returning ps must learn, and when, is in ``ps_return.py``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from stratagem.chief.checkpointing.commit_hold import torn_updates
from stratagem.chief.checkpointing.saving import Saving, unfinished_units
from stratagem.chief.chief_state import ChiefPart, ChiefState
from stratagem.chief.journal.history import encode_positions
from stratagem.chief.leasing.positions import Positions, common, has, minus, plus, units_of
from stratagem.chief.leasing.steps import NUM_UNSYNCED, Removal
from stratagem.chief.ps_return import PsReturn
from stratagem.chief.servers.servers import CommittedSlice, Server, ServerDescription
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Lease, Unit, positions_of
from stratagem.errors import PeerUnavailableError

logger = logging.getLogger(__name__)

MAX_LISTED = 5
NOBODY = Incarnation("chief:0", 0)
"""Holder of units that were leased when the chief died, until it is known who has them."""


class Recovery(ChiefPart):
    """What happens to units when a worker, a ps or the chief died. ``saving``: its lock keeps a restore and a
    checkpoint apart; ``begin_anew``: called when the workers restart their script from the beginning."""

    def __init__(self, state: ChiefState, saving: Saving, *, begin_anew: Callable[[], None]) -> None:
        super().__init__(state)
        self._begin_anew = begin_anew
        self._committed: dict[Incarnation, set[CommittedSlice]] = {}
        self._opening = asyncio.Lock()
        self.ps_return = PsReturn(state, saving, all_went_back=self._committed.clear)

    # A worker is over

    def fenced(self, incarnation: Incarnation, committed: Sequence[CommittedSlice]) -> None:
        """A ps refuses ``incarnation`` and says what it had committed of incomplete steps."""
        self._committed.setdefault(incarnation, set()).update(committed)

    async def release(self, incarnation: Incarnation) -> None:
        """Every live ps refuses ``incarnation``: gives its units back."""
        while not await self._is_released(incarnation):
            await self._changed.wait()

    async def _is_released(self, incarnation: Incarnation) -> bool:
        """Gives its units back, unless it has to wait for a ps."""
        lease_book = self._lease_book
        async with self.ps_return.closing_steps():
            slices = self._committed.get(incarnation, set())
            if self._state.is_open:  # else it is not known yet which units these are of
                self._committed.pop(incarnation, None)
            units = lease_book.held(incarnation)
            if units and not lease_book.synchronous:
                known, everybody = self._journal.history.initialized, await self._ps_pool.describe()
                # Without one that has come back and is yet to be put back; what it is put back to may be nothing.
                described = {
                    who: each
                    for who, each in everybody.items()
                    if each.initialized or each.complete or who.task not in known
                }
                if len(described) < self._ps_pool.num_ps:
                    return False  # one that has an update of several of these could not take another one of some
                accumulates = any(each.accumulates for each in described.values())
                if accumulates and self._journal.history.is_rerouted and not self._sessions.work_is_done:
                    return False  # no worker has told these what they are to hold: nobody knows what they lack
                if accumulates or not lease_book.counts(incarnation):
                    units = await self._accept_done(units, described)
            committed = await self._committed_ordinals(units, slices) if lease_book.synchronous and units else {}
            back = await self.carry_out(lease_book.remove(units, committed))
            lease_book.forget(incarnation)
            if back:
                logger.warning("%d units of %s are returned: %s", len(back), incarnation, _listed(back))
            self._changed.notify()
            return True

    async def _accept_done(
        self, units: Sequence[Unit], described: Mapping[Incarnation, ServerDescription]
    ) -> list[Unit]:
        """Accepts units that their worker did not live to report, though every ps has closed them; returns the rest."""
        closed = plus(_closed([*described.values()]), await self._close_applied(units, described))
        done = [unit for unit in units if has(closed, unit)]
        self.accepted(self._lease_book.mark_accepted(done))
        return [unit for unit in units if unit not in done]

    async def _close_applied(
        self, units: Sequence[Unit], described: Mapping[Incarnation, ServerDescription]
    ) -> Positions:
        """Where an update is of several units, each of these is leased again beside another one, and no ps that has it
        can take an update of both: those that any ps has are closed, and lost where one lacks an update of them."""
        of_all = described.values()
        if len(of_all) < self._ps_pool.num_ps or not any(each.accumulates for each in of_all):
            return {}
        applied = common([positions_of(units), _applied(of_all)])
        unfinished = unfinished_units(of_all, self._lease_book.steps.per_unit)
        torn = torn_updates(described)
        for incarnation, each in described.items():
            absent = minus(unfinished, each.applied())
            # Also of units that others have closed: a chief may have died as it told them, before it came to this ps.
            halves = each.halves if self._lease_book.steps.per_unit != 1 else {}
            in_part = positions_of(unit for one in torn.get(incarnation, ()) for unit in one.units)
            lacked = plus(absent, each.dropped, halves, in_part)
            if each.has_part:
                await self.ps_return.lose(incarnation, common([applied, lacked]))
        if applied:
            await self.ps_return.close(applied, described)
        return applied

    async def _committed_ordinals(
        self, units: Sequence[Unit], slices: Collection[CommittedSlice]
    ) -> dict[Unit, dict[int, int]]:
        """Ordinals that some ps has committed (``slices``), each with its step, or applied (0)."""
        descriptions = (await self._ps_pool.describe()).values()
        committed: dict[Unit, dict[int, int]] = {}
        for unit in units:
            found = self._lease_book.steps.find(unit)
            number = found[0].number if found is not None else 0
            # In a later step than its own where it was accumulated; in an earlier one before it was leased again.
            applied = {ordinal: 0 for each in descriptions for ordinal in each.ordinals(unit)}
            waiting = {each.ordinal: each.step for each in slices if each.unit == unit and each.step >= number}
            committed[unit] = applied | waiting
        return committed

    async def take_out(self, incarnation: Incarnation, removed: Callable[[], Removal]) -> None:
        """Carries out a removal for a worker that lives. To its end, though a broken connection cancels the call: when
        it comes again the books do not say any more which steps the ps have yet to hear of."""

        async def locked() -> None:
            async with self.ps_return.closing_steps():
                await self._admit(incarnation)  # or it was lost meanwhile
                await self.carry_out(removed())

        await asyncio.shield(locked())

    async def carry_out(self, removal: Removal) -> list[Unit]:
        """Journals and tells every ps what a removal closed, then accepts what is accepted by it, and makes its other
        units pending; returns those. Not before: a chief that follows would not know that somebody was told."""
        for closing in removal.closings:
            self._journal.write("close_step", step=closing.step, included=closing.included)
        for closing in removal.closings:
            await self._ps_pool.insist_all(operator.methodcaller("close_step", closing))
        self.accepted(self._lease_book.mark_accepted(removal.accepted))
        back = self._lease_book.give_back(removal.returned)
        self._changed.notify()
        return back

    def accepted(self, units: Sequence[Unit], *, is_end: bool = False) -> None:
        """Journals accepted units. Some are on disk at once: those that end an epoch, or (``is_end``) a part of one,
        for nobody asks for it again, and those that are counted as lost, which would come again and be counted all the
        same."""
        if units:
            steps, lost = self._lease_book.steps, self._journal.history.lost.values()
            is_end |= any(self._lease_book.epoch(*key).closed for key in {(unit.dataset, unit.epoch) for unit in units})
            durable = is_end or any(has(each, unit) for each in lost for unit in units)
            oldest = min(steps.open, default=steps.next_number)
            self._journal.write("accepted", durable=durable, units=units, oldest_step=oldest)

    # A ps joins

    async def prepare(self, incarnation: Incarnation, address: str) -> None:
        """Brings a ps up to date and announces nothing itself."""
        server = self._ps_pool.add(incarnation, address)
        for task, number in list(self._sessions.fenced.items()):
            over = Incarnation(task, number)
            committed = await self._ps_pool.insist(server, operator.methodcaller("fence", over))
            self.fenced(over, committed or ())
        self._changed.notify()
        if not self._sessions.tasks[incarnation.task].resumed:
            await self.ps_return.bring_up_to_date(server)

    async def believe(self, incarnation: Incarnation, dataset: int, epoch: int, indices: Sequence[int]) -> list[int]:
        """Those of the reported units that are accepted indeed.

        A unit that was leased before a ps went back to a checkpoint may have been applied there only before it did. At
        staleness > 0 it counts as lost; at staleness 0 it is taken out of its step and leased again.
        """
        doubtful = self._lease_book.doubtful(incarnation, dataset, epoch, indices)
        if not doubtful:
            return list(indices)
        if not self._lease_book.synchronous:
            await self.ps_return.lost_after_restarts(positions_of(doubtful))
            return list(indices)
        gone = await asyncio.shield(self._take_back(incarnation, doubtful))  # to its end, as in take_out
        return [index for index in indices if index not in gone]

    async def _take_back(self, incarnation: Incarnation, doubtful: Sequence[Unit]) -> set[int]:
        """Takes out of their steps those of the units that are to be computed again; their indices."""
        async with self.ps_return.closing_steps():
            described = [each for each in (await self._ps_pool.describe()).values() if each.has_part]
            halves = unfinished_units(described, self._lease_book.steps.per_unit)
            missing = [
                unit
                for unit in doubtful
                if has(halves, unit)
                or not all(each.ordinals(unit) for each in described)
                or self._lease_book.holder(unit) not in (None, incarnation)  # whose updates these are
            ]
            for unit in missing:  # the report may come again, with its reply lost, once all went back
                self._lease_book.epoch(unit.dataset, unit.epoch).undone.add(unit.index)
            # In another step by now, which nobody has told its worker: to be computed there, or the checkpoint has it.
            reserved = {unit for unit in doubtful if self._lease_book.is_reserved(unit, incarnation)}
            granted = set(self._lease_book.held(incarnation)) - reserved
            own = [unit for unit in missing if unit in granted]
            early = sorted(reserved.difference(missing))
            removal = self._lease_book.remove([*own, *early], {})
            removal.returned = {unit: who for unit, who in removal.returned.items() if unit not in early}
            removal.accepted += early
            await self.carry_out(removal)
        if missing:
            logger.warning("%d units of %s are recomputed: a restore undid them", len(missing), incarnation)
        return {unit.index for unit in missing}

    async def count_lost(self) -> None:
        """What a ps has dropped; and of one that was put back alone, what it lacks of what is accepted, or what others
        have closed: in another checkpoint, or after ledgers are joined, nobody could tell.
        PeerUnavailableError: at staleness 0 the others are yet to go back with it, when the books are opened."""
        alone = {server.incarnation for server in self._ps_pool.servers} & self.ps_return.restarted
        if alone and self._lease_book.synchronous and not self._state.is_open:
            tasks = ", ".join(sorted(incarnation.task for incarnation in alone))
            raise PeerUnavailableError(f"{tasks} rolled back to a checkpoint, and the others have yet to follow")
        described = await self.count_dropped()
        closed = plus(self._lease_book.positions(), *(each.closed for each in described.values()))
        await self.ps_return.lost_after_restarts(closed)

    async def count_dropped(self) -> dict[Incarnation, ServerDescription]:
        """Counts and closes the units that lack an update which their ps has dropped; what each ps has."""
        described = await self._ps_pool.describe()
        for incarnation, each in described.items():
            await self.ps_return.lose(incarnation, dict(each.dropped))
        return described

    async def count_torn(self, incarnation: Incarnation) -> None:
        """A worker that asks for a checkpoint has no update under way: what a ps that was put back alone lacks of those
        of its units that another one has is lost, though the worker reports them only after the checkpoint."""
        held = {*self._lease_book.held(incarnation)}
        torn = torn_updates(await self._ps_pool.describe()).values()
        if lost := held.intersection(unit for updates in torn for update in updates for unit in update.units):
            await self.ps_return.lost_after_restarts(positions_of(lost))

    # The chief starts

    def resume(self, incarnation: Incarnation, held: Iterable[Lease]) -> None:
        """Takes back what a worker holds since before; a chief that follows knows the steps in question."""
        for number in self._lease_book.resume(incarnation, held):
            self.composed(number)

    def composed(self, number: int) -> None:
        """Journals a step; one of many is on the disk at once."""
        units = self._lease_book.steps.open[number].units
        self._journal.write("step", durable=number % NUM_UNSYNCED == 0, step=number, units=units)

    async def open_books(self) -> None:
        """Everybody who may come back has: finds out what the ps hold, and opens the books, unless they are open.

        For a new job this takes over the position of the checkpoint that the ps restored, if they did.
        """
        async with self._opening:
            if not self._state.is_open:
                await self._open_books()

    async def _open_books(self) -> None:
        history = self._journal.history
        survivors = [s for s in self._sessions.tasks.values() if s.resumed and s.task.type in ("worker", "ps")]
        is_start = not survivors and not self._sessions.work_is_done
        if is_start and not self._state.is_new and len(self._sessions.live("ps")) < self._sessions.num_ps:
            return  # where the job stands is in the checkpoint that all of them begin from
        descriptions = await self._ps_pool.describe()
        holding = [each for each in descriptions.values() if each.initialized]
        if is_start:
            await self._start_from_checkpoint(descriptions, holding)
        else:
            # On disk, too: workers leave an epoch that ends with these, and the next chief may find no ps that knows.
            synchronous = self._lease_book.synchronous

            def is_back(server: Server) -> bool:
                who = server.incarnation
                is_away = not self._sessions.tasks[who.task].resumed
                is_away |= synchronous and who in self.ps_return.restarted
                return is_away and who.task in history.initialized

            closed = _closed(holding)
            if not (synchronous and any(map(is_back, self._ps_pool.servers))):  # else all go back
                mine = [*filter(self._lease_book.is_pending, units_of(_applied(holding)))]
                is_away = len(descriptions) < self._ps_pool.num_ps and not self._sessions.work_is_done
                if mine and is_away and any(each.accumulates for each in holding):
                    return  # as where a worker is over: none of these may be leased before it is back
                closed = plus(closed, await self._close_applied(mine, descriptions))
            self.accepted(units_of(self._lease_book.know_accepted(closed)))
            if synchronous:
                await self._find_owners()
            for server in filter(is_back, self._ps_pool.servers):  # one may bring all others back
                with self.ps_return.lost_where_refused(server):
                    await self.ps_return.take_back(server)
            if synchronous:
                await self.ps_return.close_lost()
            else:  # a ps that the last chief put back may lack what that did not live to count
                await self.ps_return.lost_after_restarts(self._lease_book.positions())
        self._lease_book.founders = frozenset(self._sessions.live("worker"))
        self._state.is_open = True
        self._changed.notify()

    async def _start_from_checkpoint(
        self, descriptions: Mapping[Incarnation, ServerDescription], holding: Sequence[ServerDescription]
    ) -> None:
        """No process is older than this chief: the job starts, or starts again, from what the ps restored; ``holding``:
        of these those that have values."""
        saved: Positions = {}
        origin = self.ps_return.origin
        if origin is not None:
            manifest = origin.manifest
            in_step = any(plan.staleness == 0 for plan in manifest.plans.values())
            saved = manifest.done if in_step else dict(manifest.accepted)
            for dataset, plan in manifest.plans.items():
                if dataset not in self._lease_book.plans:
                    self._lease_book.open_dataset(dataset, plan)
                    self._journal.write("plan", dataset=dataset, plan=dataclasses.asdict(plan))
            self._lease_book.steps.next_number = max(self._lease_book.steps.next_number, manifest.next_step)
            self._journal.write("initialized", tasks=sorted({each.task for each in self.ps_return.put_back}))
            self._journal.write("restored", path=str(origin.path), undone=origin.num_undone)
            logger.info("The job resumes from step %d (%s)", manifest.step, origin.path)
        self.ps_return.restarted.clear()
        saved = plus(saved, _closed(holding))
        if not self._lease_book.synchronous:  # whose workers are dead
            begun = units_of(minus(_applied(holding), saved))
            saved = plus(saved, await self._close_applied(begun, descriptions))
        self._lease_book.roll_back(saved, {}, reopen=True)
        self._begin_anew()
        for name, logs in {} if origin is None else origin.manifest.logs.items():
            self._journal.write("logs", topic=[name.group, name.ordinal], logs=logs)
        self._lease_book.know_accepted(saved)
        accepted = encode_positions(self._lease_book.positions())
        # What was closed above counts as accepted, and these may lack a part of it: no worker has told them yet.
        untold = {who.task: who.number for who in self.ps_return.restarted}
        self._journal.write("roll_back", accepted=accepted, reopen=True, put_back=untold)

    async def _find_owners(self) -> None:
        """Staleness 0: finds an owner, or an end, for the slices that nobody has reported."""
        steps, lease_book = self._lease_book.steps, self._lease_book
        for unit in steps.orphans():  # accepted by what every ps has closed: the journal had not got so far
            if unit.index in lease_book.epoch(unit.dataset, unit.epoch).accepted:
                self.accepted(lease_book.mark_accepted(steps.accept(unit).accepted))
        orphans = steps.orphans()
        for unit in orphans:
            lease_book.to_lease(unit.dataset, unit.epoch).acquire(unit.index, NOBODY, lease_book.restores)
        slices = {one for each in self._committed.values() for one in each}
        self._committed.clear()
        committed = await self._committed_ordinals(orphans, slices)
        lost = [unit for unit in orphans if committed[unit]]
        await self.carry_out(lease_book.remove(lost, committed))
        # What is left was granted in a reply that nobody got: workers without a slice in the step may have it.
        # None that has left a group of agreements: the journal does not say in which one a step was asked for.
        left = {task for task, _ in self._journal.history.left_groups}
        workers = [each for each in self._sessions.live("worker") if each.task not in left]
        for unit, incarnation in steps.reserve_orphans(workers, lease_book.loops.is_elsewhere):
            lease_book.give_back({unit: NOBODY})
            lease_book.to_lease(unit.dataset, unit.epoch).acquire(unit.index, incarnation, lease_book.restores)
        await self.carry_out(lease_book.remove(steps.orphans(), {}))
        closings = [step.closing for step in steps.open.values()]
        for closing in closings:  # the last chief may have died before every ps had heard it
            await self._ps_pool.insist_all(operator.methodcaller("close_step", closing))


def _applied(descriptions: Iterable[ServerDescription]) -> Positions:
    """Units with an update on some ps."""
    return plus(*(each.applied() for each in descriptions))


def _closed(descriptions: Sequence[ServerDescription]) -> Positions:
    """Units that are closed on every ps."""
    return common([each.closed for each in descriptions])


def _listed(units: Sequence[Unit]) -> str:
    return ", ".join(map(str, units[:MAX_LISTED])) + (", …" if len(units) > MAX_LISTED else "")
