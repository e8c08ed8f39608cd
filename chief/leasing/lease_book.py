"""Which worker gets which unit: plans, epochs, steps and clocks together. Pure, no I/O.

At staleness > 0 a unit is a whole batch and any worker may get it. At staleness 0 units are slices and are leased as
parts of steps (:mod:`stratagem.chief.leasing.steps`). A unit changes hands only through :meth:`LeaseBook.give_back`,
which its owner calls after every live ps has refused the former holder (fence) and learned of the closed steps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from stratagem.chief.leasing.clocks import Clocks
from stratagem.chief.leasing.leases import EpochLeases, Leases
from stratagem.chief.leasing.loops import Key, WorkerLoops
from stratagem.chief.leasing.positions import Positions, RollBack, plus
from stratagem.chief.leasing.steps import JobStep, JobSteps, Removal, SliceState
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Lease, Plan, Unit, UnitBitmap, positions_of
from stratagem.errors import ConfigurationError, LimitError, ProtocolError

MAX_DATASETS, MAX_EPOCHS = 1 << 16, 1 << 20
"""Of a job; a pass over a dataset takes 800 bytes."""
NUM_ASKING = 20
"""Staleness 0: so many workers each get what they ask for (``at_most``), a second of work; of n each gets n / 20 of it,
so all together ask 20 times a second. A worker that dies has a slice in each step that was leased ahead, which
goes on without it."""
MAX_AHEAD = 64
"""Steps that a worker is ahead with its leases; ps remember more that were closed (``NUM_REMEMBERED``)."""


class LeaseBook:
    """The units of the job. Synchronous steps from ``next_step`` on are in no journal; an earlier chief may have
    composed ``num_unsynced`` of them that its journal lost."""

    def __init__(self, next_step: int = 1, num_unsynced: int = 0) -> None:
        self.plans: dict[int, Plan] = {}
        self.epochs: dict[tuple[int, int], EpochLeases] = {}
        self.steps = JobSteps(next_step + num_unsynced, is_new=not num_unsynced)
        self.clocks = Clocks()
        self.restores = 0
        self.founders: frozenset[Incarnation] = frozenset()
        """Workers that were there when the cluster became ready: they take part from the first step on."""
        self.examples_accepted = 0
        self._first_unknown_step = next_step
        self._prior: Positions = {}
        self.current = (0, 0)
        """The newest epoch that a worker has asked about and that was not closed then, with its dataset before it."""
        self._leasing: dict[tuple[int, int], EpochLeases] = {}
        """Of the epochs, those that may have units leased: of many thousands these are few."""
        self.loops = WorkerLoops(self._is_open)
        self._counting: set[Incarnation] = set()

    @property
    def synchronous(self) -> bool:
        """Whether some dataset is trained on at staleness 0."""
        return any(plan.staleness == 0 for plan in self.plans.values())

    @property
    def has_leased(self) -> bool:
        """Whether a unit is leased or accepted: some update may be on a ps."""
        return bool(self._prior) or any(leases.has_begun for leases in self.epochs.values())

    def open_dataset(self, dataset: int, plan: Plan) -> Plan:
        """Registers a plan, or checks that it is the one registered; returns the one registered. ConfigurationError:
        another plan stands; names each difference. LimitError: there are too many."""
        if dataset not in self.plans and len(self.plans) >= MAX_DATASETS:
            what = f"dataset {dataset}: expected at most {MAX_DATASETS:,} distributed datasets in a job"
            raise LimitError(f"{what}; distribute each once, and iterate over it again for the next epoch")
        known = self.plans.setdefault(dataset, plan)
        if differences := known.differences(plan):
            raise ConfigurationError(
                f"dataset {dataset} differs from what the job opened before: {'; '.join(differences)}. Every "
                "worker must run the same script on the same data; to resume from a checkpoint, keep the dataset, the "
                "batch size, --staleness and, if that is 0, the number of workers, or use another --checkpoint-dir."
            )
        return known

    def know_accepted(self, positions: Mapping[tuple[int, int], UnitBitmap]) -> Positions:
        """Counts units as accepted that journal, checkpoint or ps say are; returns those that were not."""
        new: Positions = {}
        for key, bitmap in positions.items():
            if key[0] not in self.plans:
                self._prior[key] = self._prior.get(key, UnitBitmap()) | bitmap
            elif len(found := self.epoch(*key).know_accepted(bitmap)):
                new[key] = found
                self.examples_accepted += self.plans[key[0]].examples_in(found)
        return new

    def _plan(self, dataset: int) -> Plan:
        if dataset not in self.plans:
            raise ProtocolError(f"dataset {dataset} is not open; expected OpenDataset first")
        return self.plans[dataset]

    def epoch(self, dataset: int, epoch: int) -> EpochLeases:
        """The units of one epoch. ProtocolError: the dataset was never opened. LimitError: there are too many."""
        key = (dataset, epoch)
        if key not in self.epochs:
            if len(self.epochs) >= MAX_EPOCHS:
                raise LimitError(
                    f"epoch {epoch} of dataset {dataset}: expected at most {MAX_EPOCHS:,} epochs in a job; make them "
                    "longer (torch.utils.data.ConcatDataset of the same data)"
                )
            self.epochs[key] = EpochLeases(self._plan(dataset))
            self.know_accepted({key: self._prior.pop(key, UnitBitmap())})
        return self.epochs[key]

    def accept(self, incarnation: Incarnation, dataset: int, epoch: int, indices: Iterable[int]) -> list[Unit]:
        """Counts units as accepted; returns the new ones, those of absorbed slices included. Errors as
        :meth:`EpochLeases.accept`."""
        leases, indices = self.epoch(dataset, epoch), [*indices]
        units = [Unit(dataset, epoch, index) for index in leases.accept(incarnation, indices)]
        self.examples_accepted += sum(leases.plan.unit_examples(unit.index) for unit in units)
        new, reported = {*units}, (Unit(dataset, epoch, index) for index in indices)
        # Accepted before, perhaps, by what all ps have; but its step waits for this word.
        for unit in [unit for unit in reported if unit in new or self.steps.holder(unit) == incarnation]:
            done = self.steps.accept(unit)
            units += self.mark_accepted(done.accepted)
            for other in done.returned:
                self.epoch(other.dataset, other.epoch).give_back(other.index)
        return units

    def mark_accepted(self, units: Iterable[Unit]) -> list[Unit]:
        """Counts units as accepted whose holder is gone; returns those that were not."""
        new = [unit for unit in units if self.epoch(unit.dataset, unit.epoch).mark_accepted(unit.index)]
        self.examples_accepted += sum(self.plans[unit.dataset].unit_examples(unit.index) for unit in new)
        return new

    def doubtful(self, incarnation: Incarnation, dataset: int, epoch: int, indices: Iterable[int]) -> list[Unit]:
        """Those of the units that were perhaps computed before a ps went back to a checkpoint: updates may be lost.

        A newer lease does not tell: a report that is repeated, since its reply was lost with that lease, is older; so
        is one of a slice that was not leased to it yet.
        """
        leases = self.epoch(dataset, epoch)
        new = [index for index in indices if index not in leases.accepted] if self.restores else []
        granted = [(index, leases.lease(index)) for index in new]
        return [
            Unit(dataset, epoch, index)
            for index, lease in granted
            if lease is None
            or lease.incarnation != incarnation
            or lease.restores < self.restores
            or index in leases.undone
            or self.is_reserved(Unit(dataset, epoch, index), incarnation)
        ]

    def ask(
        self,
        incarnation: Incarnation,
        dataset: int,
        epoch: int,
        held: Collection[int],
        want: int,
        workers: Sequence[Incarnation] | Callable[[], Sequence[Incarnation]],
        stop: int | None = None,
        group: str = "",
        at_most: int = 0,
    ) -> Leases:
        """Leases ``want`` units or fewer, and beyond them up to ``at_most``.

        Args:
            held: leases the holder knows of; others were in a reply that got lost and are handed out again.
            want: units wanted, at least 1.
            workers: live workers that the holder trains with, in worker order; asked for where slices are dealt.
            stop: the holder is about the units before this one, which begins a global batch; None: about all.
            group: of agreements, that the holder and the workers are in.
            at_most: see :meth:`EpochLeases.ask`; of the slices of steps those that nobody has to wait for.
        """
        leases = self.to_lease(dataset, epoch)
        if not leases.closed and (epoch >= self.current[1] or self.epochs[self.current].closed):
            self.current = dataset, epoch
        stop = leases.plan.num_units if stop is None else stop
        self.loops.asked(incarnation, dataset, epoch)
        waits_for: list[Incarnation] = []
        if leases.plan.staleness == 0:
            unheard = (Unit(dataset, epoch, index) for index in leases.held_by(incarnation) if index not in held)
            granted = sorted(filter(None, map(self._lease_of, unheard)), key=operator.attrgetter("step"))
            members = workers() if callable(workers) else workers
            ahead = min(at_most * len(members) // NUM_ASKING, MAX_AHEAD) - len(held)
            most = want if incarnation in self.steps.accumulating else max(want, ahead)
            while len(granted) < most:
                step, waits_for = self._find_step(incarnation, leases, dataset, epoch, members, stop, group)
                if step is None or waits_for or (len(granted) >= want and not self.steps.is_free(step)):
                    break
                lease = self._lease_of(self.steps.grant(incarnation, step).unit)
                assert lease is not None
                granted.append(lease)
        else:
            num_workers = self.loops.num_workers(dataset)
            indices = leases.ask(incarnation, held, want, at_most, stop, self.restores, num_workers)
            granted = [Lease(Unit(dataset, epoch, i), leases.plan.unit_examples(i)) for i in indices]
        if granted or waits_for:
            return Leases(tuple(granted), waits_for=tuple(waits_for))
        end, waits_for = leases.is_closed_before(stop), sorted(leases.holders(stop) - {incarnation})
        return Leases((), end, tuple(waits_for), first_open=self._first_open(dataset, epoch) if end else 0)

    def _first_open(self, dataset: int, epoch: int) -> int:
        """The first epoch from this one on that is not closed; one that nobody has asked for makes no book."""
        while self.plans[dataset].num_units and not self._is_open((dataset, epoch)):
            epoch += 1
        return epoch

    def _is_open(self, key: tuple[int, int]) -> bool:
        """Whether an epoch has units that are not accepted."""
        leases = self.epochs.get(key)
        num_accepted = leases.num_accepted if leases is not None else len(self._prior.get(key, ()))
        return num_accepted < self.plans[key[0]].num_units

    def _find_step(
        self,
        incarnation: Incarnation,
        leases: EpochLeases,
        dataset: int,
        epoch: int,
        workers: Sequence[Incarnation],
        stop: int,
        group: str,
    ) -> tuple[JobStep | None, list[Incarnation]]:
        """The next step of ``incarnation``, and whose slices it has to wait for."""
        while (step := self.steps.reserved_for(incarnation, dataset, epoch, stop)) is None:
            first = leases.first_pending
            if first is None or first >= stop:
                return None, []
            members = [one for one in workers if self.loops.takes_part(one, dataset, epoch, self.founders)]
            # What one has yet to do elsewhere would be in later steps than this one, which waits for its slice.
            if behind := [one for one in members if one != incarnation and self.loops.is_before(one, dataset, epoch)]:
                return None, behind
            batch = leases.plan.units_of(leases.plan.batch_of(first))
            indices = [index for index in batch if leases.is_pending(index)]
            places = [leases.plan.slice_of(index) for index in indices]
            composed = self.steps.compose([Unit(dataset, epoch, index) for index in indices], members, places, group)
            for each in composed.slices:
                assert each.incarnation is not None
                leases.acquire(each.unit.index, each.incarnation, self.restores)
        return step, self.steps.waits_for(incarnation, step)

    def _lease_of(self, unit: Unit) -> Lease | None:
        """What the holder is told about a unit; None while it is only reserved."""
        plan = self.plans[unit.dataset]
        found = self.steps.find(unit)
        if found is None:
            return Lease(unit, plan.unit_examples(unit.index))
        step, each = found
        if each.state is SliceState.RESERVED:
            return None
        indices = tuple(other.index for other in step.units)
        return Lease(unit, plan.unit_examples(unit.index), step.number, indices, each.refresh)

    def start_step(
        self, incarnation: Incarnation, dataset: int, clock: int, workers: Collection[Incarnation]
    ) -> tuple[int, int, list[Incarnation]]:
        """The caller's clock, the first step it may not start without asking again, and the workers it must wait for
        before it starts its step."""
        plan = self._plan(dataset)
        holding = {holder for leases in self._leasing.values() for holder in leases.holders()}
        holders = [worker for worker in workers if worker in holding]
        now = self.clocks.report(incarnation, clock, holders)
        late = self.clocks.waits_for(incarnation, plan.staleness, holders)
        return now, self.clocks.limit(incarnation, plan.staleness, holders), late

    def to_lease(self, dataset: int, epoch: int) -> EpochLeases:
        """As :meth:`epoch`, for whoever is about to lease units of it."""
        key, leases = (dataset, epoch), self.epoch(dataset, epoch)
        if key not in self._leasing:
            self._leasing = {each: known for each, known in self._leasing.items() if known.is_leased}
            self._leasing[key] = leases
        return leases

    def held(self, incarnation: Incarnation) -> list[Unit]:
        """Units leased to (or reserved for) ``incarnation``, or accepted before it has said so of their slices."""
        leased = [Unit(*key, index) for key, leases in self._leasing.items() for index in leases.held_by(incarnation)]
        return sorted({*leased, *self.steps.to_deliver(incarnation)}) if self.steps.open else leased

    def leave(self, incarnation: Incarnation, dataset: int, epoch: int) -> Removal:
        """``incarnation`` left its loop. Its units stay leased until :meth:`give_back`."""
        self.loops.left(incarnation, dataset, epoch)
        return self.remove([unit for unit in self.held(incarnation) if unit[:2] == (dataset, epoch)], {})

    def remove(self, units: Sequence[Unit], committed: Mapping[Unit, Mapping[int, int]]) -> Removal:
        """Nobody will deliver these units: takes them out of their steps. They stay leased until :meth:`give_back`, or
        :meth:`mark_accepted`.
        ``committed``: at staleness 0, ordinals of their updates that some ps has committed, each with the number of its
        step, or applied (0)."""
        removal = self.steps.remove(units, committed)
        gone = (unit for unit in units if self.steps.find(unit) is None)
        returned = {*removal.returned, *gone}.difference(removal.accepted)
        removal.returned = {unit: self.holder(unit) for unit in sorted(returned)}
        return removal

    def is_reserved(self, unit: Unit, incarnation: Incarnation) -> bool:
        """Whether it is a slice of a step that is ``incarnation``'s and was not leased to it yet."""
        found = self.steps.find(unit)
        return found is not None and (found[1].incarnation, found[1].state) == (incarnation, SliceState.RESERVED)

    def note_counts(self, incarnation: Incarnation, counts: bool) -> None:
        """Whether what ``incarnation`` counts on a unit is wanted: then a unit that it did not report is not done."""
        (self._counting.add if counts else self._counting.discard)(incarnation)

    def counts(self, incarnation: Incarnation) -> bool:
        """Whether a unit that ``incarnation`` did not report is not done, though its updates are."""
        return incarnation in self._counting

    def give_back(self, holders: Mapping[Unit, Incarnation | None]) -> list[Unit]:
        """Makes units pending that are (still) leased to those who had them; returns them."""
        back = [unit for unit, holder in holders.items() if holder is not None and holder == self.holder(unit)]
        for unit in back:
            self.epoch(unit.dataset, unit.epoch).give_back(unit.index)
        return back

    def is_pending(self, unit: Unit) -> bool:
        """Whether it is of a dataset that is known, and with nobody."""
        return unit.dataset in self.plans and self.epoch(unit.dataset, unit.epoch).is_pending(unit.index)

    def holder(self, unit: Unit) -> Incarnation | None:
        lease = self.epoch(unit.dataset, unit.epoch).lease(unit.index)
        return None if lease is None else lease.incarnation

    def forget(self, incarnation: Incarnation) -> None:
        """``incarnation`` is over: nobody waits for its clock."""
        self.clocks.forget(incarnation)
        self.steps.forget(incarnation)
        self.loops.forget(incarnation)
        self._counting.discard(incarnation)

    def readmit(self, steps: Mapping[int, Sequence[Unit]]) -> None:
        """Puts back the steps that were open when the chief died, before workers say what they hold: a slice that was
        closed out of one is in none of these, and still in what its other workers were told."""
        for number, units in steps.items():
            known = [unit for unit in units if unit.dataset in self.plans]
            accepted = {unit for unit in known if unit.index in self.epoch(unit.dataset, unit.epoch).accepted}
            self.steps.readmit(number, known, accepted)

    def resume(self, incarnation: Incarnation, held: Iterable[Lease]) -> list[int]:
        """Takes back into the books what ``incarnation`` holds since before the chief restarted; returns the steps that
        it alone has told of."""
        told: list[int] = []
        for lease in held:
            unit = lease.unit
            if not self.is_pending(unit):
                continue
            leases = self.to_lease(unit.dataset, unit.epoch)
            if lease.step >= self._first_unknown_step and lease.step not in self.steps.open:
                units = [Unit(unit.dataset, unit.epoch, index) for index in lease.step_units]
                self.steps.readmit(lease.step, units, {u for u in units if u.index in leases.accepted})
                told.append(lease.step)
            found = self.steps.find(unit)
            if lease.step != (found[0].number if found is not None else 0):
                continue  # that step is over, or goes on without the unit; the worker may not have heard of it
            self.steps.claim(unit, incarnation)
            leases.acquire(unit.index, incarnation)  # it may have been computed before a ps went back
            self.loops.asked(incarnation, unit.dataset, unit.epoch)
            self._counting.add(incarnation)  # until it says otherwise
        if self.plans:
            self.clocks.expect(incarnation)
        return told

    def positions(self) -> Positions:
        """Accepted units of every epoch, as a copy."""
        known = {key: leases.accepted | UnitBitmap() for key, leases in self.epochs.items() if leases.num_accepted}
        return {**self._prior, **known}

    def begun(self) -> Positions:
        """Units of every epoch that are accepted or leased."""
        holders = {who for leases in self._leasing.values() for who in leases.holders()}
        return plus(self.positions(), positions_of(unit for who in holders for unit in self.held(who)))

    def roll_back(
        self, saved: Positions, ended: Mapping[Key, int], *, reopen: bool = False, accumulates: bool = False
    ) -> RollBack:
        """All ps are back at a checkpoint: units leased, and accepted units that it lacks, become pending again.

        A worker cannot go on with a lease from before: the ps refuse it until it has said Hello, and then it forgets
        its leases and asks anew. So the units come in the order of the plan again. Units of epochs that are over are
        lost instead, because no worker asks for these again. ``saved``: units that the checkpoint has all updates of,
        accepted unless something is counted on them, which is to be reported; ``ended``: of epochs that are not closed
        the first unit that somebody may ask for again; ``reopen``: the workers start anew as well and walk through the
        epochs from the first: nothing is lost; ``accumulates``: an update of several units had these, and none can be
        made of a part of them.
        """
        lost: Positions = {}
        revoked: set[Unit] = set()
        for key, leases in self.epochs.items():
            missing = leases.accepted - saved.get(key, UnitBitmap())
            over = leases.plan.num_units if leases.closed else ended.get(key, 0)
            if len(gone := UnitBitmap() if reopen else missing.below(over)):
                lost[key] = gone
            leases.revoke(missing - gone)
            revoked.update(Unit(*key, index) for index in missing - gone)
        self._prior = {key: bitmap & saved.get(key, UnitBitmap()) for key, bitmap in self._prior.items()}
        self.examples_accepted -= sum(self.plans[unit.dataset].unit_examples(unit.index) for unit in revoked)
        if not reopen and (accumulates or not self._counting):
            self.know_accepted(saved)
        num_returned = sum(leases.give_all_back() for leases in self._leasing.values())
        self.steps.clear()
        return RollBack(len(revoked) + num_returned, lost)
