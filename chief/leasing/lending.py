"""Leasing units to workers: one path for all kinds of units. Their source decides what an acceptance carries."""

from __future__ import annotations

import abc
import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Generic, TypeVar

from stratagem.chief.chief_state import ChiefPart, ChiefState, Note
from stratagem.chief.counting.metric_states import MetricState
from stratagem.chief.counting.metric_store import MetricStore
from stratagem.chief.leasing.leases import Leases
from stratagem.chief.leasing.steps import Removal, is_late
from stratagem.chief.maintenance import Maintenance
from stratagem.chief.recovery import Recovery
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Plan, Topic
from stratagem.errors import ConfigurationError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TrainingPass:
    """A pass over training data, or a part of one."""

    dataset: int
    epoch: int
    stop: int | None = None
    """Units before this one are meant; None: all."""
    group: str = ""
    """Of agreements: whoever has left it gets no part of the same step."""


@dataclasses.dataclass(frozen=True)
class EvaluationPass:
    """A pass over evaluation data."""

    name: Topic
    plan: Plan
    attempt: int
    """That the units reported and held are of."""


Pass = TypeVar("Pass", TrainingPass, EvaluationPass)


@dataclasses.dataclass(frozen=True)
class LeaseRequest(Generic[Pass]):
    incarnation: Incarnation
    units_of: Pass
    accepted: Sequence[int] = ()
    states: Sequence[MetricState] = ()
    """What was counted on accepted units."""
    held: Sequence[int] = ()
    """Leases it knows of."""
    want: int = 0
    at_most: int = 0
    wait: bool = False
    """Until there is a unit, or the end."""
    leave: bool = False
    """It gives back what it holds of the pass."""
    counts: bool = False
    """A unit that it does not report has to be computed again, for what is counted on it."""
    num_groups: int = 0
    """Shard groups that it has prepared, counted on each ps."""
    steps_per_unit: int = 0
    """Updates that a unit of its has had, at most."""
    accumulates: bool = False
    """It has gradients of earlier batches for its next update."""


class UnitLender(ChiefPart, abc.ABC, Generic[Pass]):
    """Leases units of one kind by the verb NextUnits; the kind decides what an acceptance carries."""

    async def next_units(self, request: LeaseRequest[Pass]) -> Leases:
        """Takes in what is reported and leases what is wanted; with ``wait`` not before there is some, or the end."""
        await self._admit(request.incarnation)
        await self.accept(request)
        if request.leave:
            await self.leave(request)
        if not request.want:
            return Leases()
        with self._waits.of(request.incarnation) as note:
            while True:
                leases = await self.ask(request, note)
                if leases.granted or leases.end or not request.wait:
                    return leases
                note(self.what_for(request) if leases.waits_for else "units that are pending", leases.waits_for)
                await self._changed.wait()
                await self._admit(request.incarnation)

    @abc.abstractmethod
    async def accept(self, request: LeaseRequest[Pass]) -> None:
        """Takes in what is reported."""

    @abc.abstractmethod
    async def leave(self, request: LeaseRequest[Pass]) -> None:
        """Takes back what the caller holds of the pass."""

    @abc.abstractmethod
    async def ask(self, request: LeaseRequest[Pass], note: Note) -> Leases:
        """What can be leased now."""

    @abc.abstractmethod
    def what_for(self, request: LeaseRequest[Pass]) -> str:
        """What those who hold the rest are waited for to do, for the status page."""


class TrainingUnits(UnitLender[TrainingPass]):
    """Units of training data, and the staleness bound. Their updates are on the ps when they are accepted."""

    def __init__(
        self, state: ChiefState, recovery: Recovery, maintenance: Maintenance, metric_store: MetricStore
    ) -> None:
        super().__init__(state)
        self._recovery = recovery
        self._maintenance = maintenance
        self._metric_store = metric_store
        self._has_rest = False
        """A step lacked parts of its batch."""

    async def open_dataset(self, incarnation: Incarnation, dataset: int, plan: Plan) -> Plan:
        """Registers a plan, or checks it against the one that stands; returns that. ConfigurationError: another plan
        stands; names each difference. Or the worker was added to a job whose batches are cut for those it started
        with."""
        await self._admit(incarnation)
        if dataset < 1:
            raise ConfigurationError(f"datasets are counted from 1, got {dataset}")
        is_added = self._sessions.wanted_workers or self._sessions.was_added(incarnation.task)
        if plan.staleness == 0 and is_added and not self._sessions.min_workers:  # such a ring cuts for who is there
            raise ConfigurationError(
                f"{incarnation.task} cannot be added at staleness 0, nor another leave: every batch is cut for the "
                f"{self._config.num_workers} workers that the job started with (num_workers)"
            )
        if plan.staleness == 0 and self._config.ps_replicas > 1:
            raise ConfigurationError(
                "copies of what a ps holds (ps_replicas 2) need a staleness above 0: at 0 all ps go back to a "
                "checkpoint together when one dies. Start the job without --ps-replicas, or with --staleness 1"
            )
        if plan.staleness == 0 and incarnation not in self._lease_book.founders:
            described = (await self._ps_pool.describe()).values()
            if any(each.accumulates for each in described):
                raise is_late(incarnation)
        is_new = dataset not in self._lease_book.plans
        known = self._lease_book.open_dataset(dataset, plan)
        if is_new:
            self._journal.write("plan", dataset=dataset, plan=dataclasses.asdict(known))
        return known

    async def accept(self, request: LeaseRequest[TrainingPass]) -> None:
        incarnation, data, steps = request.incarnation, request.units_of, self._lease_book.steps
        if request.steps_per_unit not in (0, steps.per_unit):  # which says whether a unit is whole
            steps.per_unit = request.steps_per_unit
            self._journal.write("steps_per_unit", number=steps.per_unit)
        (steps.accumulating.add if request.accumulates else steps.accumulating.discard)(incarnation)
        believed = await self._recovery.believe(incarnation, data.dataset, data.epoch, request.accepted)
        await self._admit(incarnation)
        accepted = self._lease_book.accept(incarnation, data.dataset, data.epoch, believed)
        leases = self._lease_book.epoch(data.dataset, data.epoch)
        is_end = leases.is_closed_before(leases.plan.num_units if data.stop is None else data.stop)
        self._metric_store.keep(request.states)  # first: what ends a part is on disk at once, and these with it
        self._recovery.accepted(accepted, is_end=is_end)
        # Others wait for the end of what they are about, or for a step: not for each unit on the way there.
        if accepted and (is_end or request.leave or not math.isinf(leases.plan.staleness)):
            self._changed.notify()

    async def leave(self, request: LeaseRequest[TrainingPass]) -> None:
        who, data = request.incarnation, request.units_of

        def left() -> Removal:
            if self._lease_book.plans[data.dataset].staleness == 0:  # a chief that follows gives it no slice there
                self._journal.write("left", task=who.task, dataset=data.dataset, epoch=data.epoch)
            return self._lease_book.leave(who, data.dataset, data.epoch)

        await self._recovery.take_out(who, left)

    async def ask(self, request: LeaseRequest[TrainingPass], note: Note) -> Leases:
        """Leases units, the first ones once there is a checkpoint."""
        incarnation, data = request.incarnation, request.units_of
        await self._maintenance.first_checkpoint(incarnation, request.num_groups, note)

        def workers() -> list[Incarnation]:
            agreements = self._metric_store.agreements
            return [each for each in self._sessions.live("worker") if not agreements.has_left(each, data.group)]

        self._lease_book.note_counts(incarnation, request.counts)
        held, steps = frozenset(request.held), self._lease_book.steps
        first, before = steps.next_number, self._lease_book.loops.where(incarnation)
        leases = self._lease_book.ask(
            incarnation, data.dataset, data.epoch, held, request.want, workers, data.stop, data.group, request.at_most
        )
        if before != self._lease_book.loops.where(incarnation):
            self._changed.notify()  # others may have waited for it to come here
        self._note_end(data, leases.end)
        for number in range(first, steps.next_number):
            self._recovery.composed(number)
            self._tell_of_rest(number, self._lease_book.plans[data.dataset])
        return leases

    def _note_end(self, data: TrainingPass, is_end: bool) -> None:
        """A worker that hears of the end of a part does not ask for its units again, whatever the ps go back to."""
        key, ended = (data.dataset, data.epoch), self._journal.history.ended
        if is_end and data.stop is not None and ended.get(key, 0) < data.stop and self._lease_book.synchronous:
            self._journal.write("ended", dataset=data.dataset, epoch=data.epoch, stop=data.stop)

    def _tell_of_rest(self, number: int, plan: Plan) -> None:
        """Once, where a batch has parts that no worker takes in its step."""
        units = self._lease_book.steps.open[number].units
        num_parts = len(plan.units_of(plan.batch_of(units[0].index)))
        if len(units) < num_parts and not self._has_rest:
            left = ", ".join(self._lease_book.loops.who_left(units[0].dataset, units[0].epoch))
            logger.warning(
                "Step %d has %d of the %d parts of its batch, as %s: the other parts become an update of their own, in "
                "later batches too, unlike in a single process",
                *(number, len(units), num_parts),
                f"{left} left the dataset early (break, return)" if left else "fewer workers take part than before",
            )
        self._has_rest = len(units) < num_parts

    def what_for(self, request: LeaseRequest[TrainingPass]) -> str:
        return "to finish their units"

    async def start_step(self, request: LeaseRequest[TrainingPass], clock: int) -> tuple[int, int]:
        """Waits until the staleness bound lets the caller start the step after ``clock`` others; returns its clock, and
        the first step for which it has to ask again."""
        incarnation = request.incarnation
        await self._admit(incarnation)
        await self.accept(request)
        with self._waits.of(incarnation) as note:
            while True:
                workers = self._sessions.live("worker")
                known = self._lease_book.clocks.clock(incarnation)
                dataset = request.units_of.dataset
                now, limit, late = self._lease_book.start_step(incarnation, dataset, clock, workers)
                if now != known:
                    self._changed.notify()
                if not late:
                    return now, limit
                note(f"to finish steps before step {now} may start", late)
                await self._changed.wait()
                await self._admit(incarnation)
