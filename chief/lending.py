"""Which worker gets which unit: plans, epochs, steps and clocks together. Pure, no I/O.

At staleness > 0 a unit is a whole batch and any worker may get it. At staleness 0 units are slices and are lent as
parts of steps (:mod:`stratagem.chief.steps`). A unit changes hands only through :meth:`Lending.give_back`, which its
owner calls after every live ps has refused the former borrower (fence) and heard of the closed steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from stratagem.chief.clocks import Clocks
from stratagem.chief.leases import EpochLeases
from stratagem.chief.lives import Life
from stratagem.chief.steps import JobSteps, Removal, SliceState
from stratagem.cluster.units import Plan, Unit, UnitBitmap
from stratagem.errors import ConfigurationError, ProtocolError

Positions = dict[tuple[int, int], UnitBitmap]
"""Accepted units of each (dataset, epoch)."""


@dataclasses.dataclass(frozen=True)
class Loan:
    """A unit on loan."""

    unit: Unit
    num_examples: int
    step: int = 0
    """Staleness 0: number of the step it is a slice of; 0 otherwise."""
    step_units: tuple[int, ...] = ()
    """Staleness 0: indices of the units of all slices of the step, in slice order."""
    refresh: bool = False
    """The borrower must pull weights before it computes."""


@dataclasses.dataclass(frozen=True)
class Loans:
    """Answer to a worker that asks for units."""

    loans: tuple[Loan, ...] = ()
    end: bool = False
    """The epoch is closed."""
    waits_for: tuple[Life, ...] = ()
    """Why there is nothing: who holds what the caller waits for."""


@dataclasses.dataclass(frozen=True)
class RollBack:
    """What follows when all ps go back to a checkpoint."""

    revoked: int
    """Units that will be computed again."""
    lost: Positions
    """Accepted units of closed epochs that the checkpoint lacks: nobody will ask for them again."""


class Lending:
    """The units of the job.

    Args:
        next_step: number of the synchronous step composed next.
    """

    def __init__(self, next_step: int = 1) -> None:
        self.plans: dict[int, Plan] = {}
        self.epochs: dict[tuple[int, int], EpochLeases] = {}
        self.steps = JobSteps(next_step)
        self.clocks = Clocks()
        self.restores = 0
        self.founders: frozenset[Life] = frozenset()
        """Workers that were there when the cluster became ready: they take part from the first step on."""
        self.examples_accepted = 0
        self._prior: Positions = {}
        self._asked: dict[Life, set[int]] = {}
        self._left: set[tuple[Life, int, int]] = set()

    @property
    def synchronous(self) -> bool:
        """Whether some dataset is trained on at staleness 0."""
        return any(plan.staleness == 0 for plan in self.plans.values())

    def open_dataset(self, dataset: int, plan: Plan) -> Plan:
        """Registers a plan, or checks that it is the one registered; returns the one registered.

        Raises:
            ConfigurationError: another plan stands; names each difference.
        """
        known = self.plans.setdefault(dataset, plan)
        differences = [
            f"{field.name} is {getattr(known, field.name)!r} in the job and {getattr(plan, field.name)!r} here"
            for field in dataclasses.fields(Plan)
            if field.name != "seed" and getattr(known, field.name) != getattr(plan, field.name)
        ]
        if differences:
            raise ConfigurationError(
                f"dataset {dataset} differs from what the job opened before: {'; '.join(differences)}. Every "
                "worker must run the same script on the same data; to go on from a checkpoint, keep the dataset, the "
                "batch size and, at staleness 0, the number of workers, or start with another --checkpoint-dir."
            )
        return known

    def know_accepted(self, positions: Mapping[tuple[int, int], UnitBitmap]) -> None:
        """Counts units as accepted that journal, checkpoint or ps say are."""
        for key, bitmap in positions.items():
            if key[0] in self.plans:
                epoch = self.epoch(*key)
                for index in bitmap:
                    if index < epoch.plan.num_units and epoch.settle(index):
                        self.examples_accepted += epoch.plan.unit_examples(index)
            else:
                self._prior[key] = self._prior.get(key, UnitBitmap()) | bitmap

    def epoch(self, dataset: int, epoch: int) -> EpochLeases:
        """The units of one epoch.

        Raises:
            ProtocolError: the dataset was never opened.
        """
        plan = self.plans.get(dataset)
        if plan is None:
            raise ProtocolError(f"dataset {dataset} is not open; expected OpenDataset before units are asked for")
        key = (dataset, epoch)
        if key not in self.epochs:
            self.epochs[key] = EpochLeases(plan)
            self.know_accepted({key: self._prior.pop(key, UnitBitmap())})
        return self.epochs[key]

    def accept(self, life: Life, dataset: int, epoch: int, indices: Iterable[int]) -> list[Unit]:
        """Counts units as accepted; returns the new ones, those of absorbed slices included.

        Raises:
            ProtocolError: no such unit, or it is on loan to somebody else.
        """
        leases = self.epoch(dataset, epoch)
        units = [Unit(dataset, epoch, index) for index in leases.accept(life, indices)]
        absorbed = [other for unit in units for other in self.steps.accept(unit)]
        units += self.settle(absorbed)
        self.examples_accepted += sum(leases.plan.unit_examples(u.index) for u in units if u not in absorbed)
        return units

    def settle(self, units: Iterable[Unit]) -> list[Unit]:
        """Counts units as accepted whose borrower is gone; returns those that were not."""
        new = [unit for unit in units if self.epoch(unit.dataset, unit.epoch).settle(unit.index)]
        self.examples_accepted += sum(self.plans[unit.dataset].unit_examples(unit.index) for unit in new)
        return new

    def doubtful(self, life: Life, dataset: int, epoch: int, indices: Iterable[int]) -> list[Unit]:
        """Those of the units that were lent before a ps went back to a checkpoint: their updates may be lost."""
        leases = self.epoch(dataset, epoch)
        new = [index for index in indices if index not in leases.accepted] if self.restores else []
        loans = [(index, leases.lease(index)) for index in new]
        return [
            Unit(dataset, epoch, index)
            for index, lease in loans
            if lease is None or lease.life != life or lease.restores < self.restores
        ]

    def ask(
        self,
        life: Life,
        dataset: int,
        epoch: int,
        held: Collection[int],
        want: int,
        workers: Sequence[Life],
        stop: int | None = None,
        group: str = "",
    ) -> Loans:
        """Lends up to ``want`` units.

        Args:
            life: the borrower.
            dataset: ordinal of the dataset.
            epoch: pass over it.
            held: loans the borrower knows of; others were in a reply that got lost and are handed out again.
            want: units wanted, at least 1.
            workers: live workers that the borrower trains with, in worker order.
            stop: the borrower is about the units before this one, which begins a global batch; None: about all.
            group: of agreements, that the borrower and the workers are in.
        """
        leases = self.epoch(dataset, epoch)
        stop = leases.plan.num_units if stop is None else stop
        self._asked.setdefault(life, set()).add(dataset)
        self._left.discard((life, dataset, epoch))
        units = [Unit(dataset, epoch, index) for index in leases.held_by(life) if index not in held]
        loans = [loan for unit in units if (loan := self._loan(unit)) is not None][:want]
        waits_for: list[Life] = []
        while len(loans) < want and not waits_for:
            if leases.plan.staleness == 0:
                unit, waits_for = self._lend_slice(life, leases, dataset, epoch, workers, stop, group)
            else:
                unit = self._lend_batch(life, leases, dataset, epoch, stop)
            if unit is None:
                break
            loan = self._loan(unit)
            assert loan is not None
            loans.append(loan)
        if loans or waits_for:
            return Loans(tuple(loans), waits_for=tuple(waits_for))
        return Loans((), leases.is_closed_before(stop), tuple(sorted(leases.borrowers(stop) - {life})))

    def _lend_batch(self, life: Life, leases: EpochLeases, dataset: int, epoch: int, stop: int) -> Unit | None:
        index = leases.first_pending
        if index is None or index >= stop:
            return None
        leases.lend(index, life, self.restores)
        return Unit(dataset, epoch, index)

    def _lend_slice(
        self,
        life: Life,
        leases: EpochLeases,
        dataset: int,
        epoch: int,
        workers: Sequence[Life],
        stop: int,
        group: str,
    ) -> tuple[Unit | None, list[Life]]:
        while (step := self.steps.reserved_for(life, dataset, epoch, stop)) is None:
            first = leases.first_pending
            if first is None or first >= stop:
                return None, []
            members = [worker for worker in workers if self._takes_part(worker, dataset, epoch)]
            indices = leases.pending_of_batch(leases.plan.batch_of(first))
            places = [leases.plan.slice_of(index) for index in indices]
            composed = self.steps.compose([Unit(dataset, epoch, index) for index in indices], members, places, group)
            for each in composed.slices:
                assert each.life is not None
                leases.lend(each.unit.index, each.life, self.restores)
        waits_for = self.steps.waits_for(life, step)
        if waits_for:
            return None, waits_for
        return self.steps.grant(life, step).unit, []

    def _takes_part(self, worker: Life, dataset: int, epoch: int) -> bool:
        """A worker that was restarted takes part once it asks for the dataset: until then nobody waits for it."""
        if (worker, dataset, epoch) in self._left:
            return False
        return worker in self.founders or dataset in self._asked.get(worker, ())

    def _loan(self, unit: Unit) -> Loan | None:
        """What the borrower is told about a unit; None while it is only reserved."""
        plan = self.plans[unit.dataset]
        found = self.steps.find(unit)
        if found is None:
            return Loan(unit, plan.unit_examples(unit.index))
        step, each = found
        if each.state is SliceState.RESERVED:
            return None
        indices = tuple(other.index for other in step.units)
        return Loan(unit, plan.unit_examples(unit.index), step.number, indices, each.refresh)

    def start_step(self, life: Life, dataset: int, clock: int, workers: Collection[Life]) -> tuple[int, list[Life]]:
        """The caller's clock, and the workers it must wait for before it starts its step."""
        plan = self.plans.get(dataset)
        if plan is None:
            raise ProtocolError(f"dataset {dataset} is not open; expected OpenDataset before StartStep")
        holders = [worker for worker in workers if self.num_held(worker)]
        now = self.clocks.report(life, clock, holders)
        return now, self.clocks.waits_for(life, plan.staleness, holders)

    def num_held(self, life: Life) -> int:
        """Units on loan to (or reserved for) ``life``."""
        return sum(leases.num_held_by(life) for leases in self.epochs.values())

    def held(self, life: Life) -> list[Unit]:
        """Units on loan to (or reserved for) ``life``."""
        return [Unit(*key, index) for key, leases in self.epochs.items() for index in leases.held_by(life)]

    def leave(self, life: Life, dataset: int, epoch: int) -> Removal:
        """``life`` left its loop. Its units stay lent until :meth:`give_back`."""
        self._left.add((life, dataset, epoch))
        leases = self.epoch(dataset, epoch)
        return self.remove([Unit(dataset, epoch, index) for index in leases.held_by(life)], {})

    def remove(self, units: Sequence[Unit], committed: Mapping[Unit, Sequence[int]]) -> Removal:
        """Nobody will deliver these units: takes them out of their steps. They stay lent until :meth:`give_back`.

        Args:
            units: units on loan.
            committed: staleness 0: ordinals of their updates that some ps has committed or applied.
        """
        removal = self.steps.remove(units, committed)
        removal.returned += [u for u in units if self.steps.find(u) is None and u not in removal.returned]
        removal.returned = [u for u in removal.returned if u not in removal.accepted]
        removal.accepted = self.settle(removal.accepted)
        return removal

    def give_back(self, life: Life | None, units: Iterable[Unit]) -> list[Unit]:
        """Makes units pending that are (still) on loan to ``life``; returns them."""
        back = []
        for unit in units:
            lease = self.epoch(unit.dataset, unit.epoch).lease(unit.index)
            if lease is not None and lease.life == life:
                self.epoch(unit.dataset, unit.epoch).give_back(unit.index)
                back.append(unit)
        return back

    def forget(self, life: Life) -> None:
        """``life`` is over: nobody waits for its clock."""
        self.clocks.forget(life)
        self.steps.forget(life)
        self._asked.pop(life, None)
        self._left = {left for left in self._left if left[0] != life}

    def resume(self, life: Life, held: Iterable[Loan]) -> None:
        """Takes back into the books what ``life`` holds since before the chief restarted."""
        for loan in held:
            unit = loan.unit
            if unit.dataset not in self.plans or not self.epoch(unit.dataset, unit.epoch).is_pending(unit.index):
                continue
            leases = self.epoch(unit.dataset, unit.epoch)
            leases.lend(unit.index, life, self.restores)
            self._asked.setdefault(life, set()).add(unit.dataset)
            if loan.step:
                units = [Unit(unit.dataset, unit.epoch, index) for index in loan.step_units]
                self.steps.readmit(loan.step, units, {u for u in units if u.index in leases.accepted})
                self.steps.claim(unit, life)
        if self.plans:
            self.clocks.expect(life)

    def positions(self) -> Positions:
        """Accepted units of every epoch, as a copy."""
        known = {key: leases.accepted | UnitBitmap() for key, leases in self.epochs.items() if leases.num_accepted}
        return {**self._prior, **known}

    def roll_back(self, saved: Mapping[tuple[int, int], UnitBitmap], reopen: bool = False) -> RollBack:
        """All ps are back at a checkpoint: units on loan, and accepted units that it lacks, become pending again.

        A worker cannot go on with a loan from before: the ps refuse it until it has said Hello, and then it forgets its
        loans and asks anew. So the units come in the order of the plan again. Units of closed epochs are lost instead,
        because no worker asks for a closed epoch again.

        Args:
            saved: accepted units in the checkpoint.
            reopen: the workers start anew as well and walk through the epochs from the first: nothing is lost.
        """
        lost: Positions = {}
        revoked: set[Unit] = set()
        for key, leases in self.epochs.items():
            missing = leases.accepted - saved.get(key, UnitBitmap())
            if leases.closed and len(missing) and not reopen:
                lost[key] = missing
                continue
            leases.revoke(missing)
            revoked.update(Unit(*key, index) for index in missing)
        self._prior = {key: bitmap & saved.get(key, UnitBitmap()) for key, bitmap in self._prior.items()}
        self.examples_accepted -= sum(self.plans[unit.dataset].unit_examples(unit.index) for unit in revoked)
        num_returned = sum(leases.give_all_back() for leases in self.epochs.values())
        self.steps.clear()
        return RollBack(len(revoked) + num_returned, lost)
