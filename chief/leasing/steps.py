"""Staleness 0: which slices make a step, who computes them, and what becomes of a step whose worker died. Pure, no I/O.

A step is composed when a worker asks and none of the composed steps has a slice reserved for it. The slices of the
other workers are *reserved* until they ask, then *granted*. A slice ends as *accepted* (its worker said so), *removed*
(its worker died or left before it committed anywhere; the unit is leased again) or *absorbed* (its worker died after a
commit on some ps: the slice stays in the step, and its unit is accepted once the rest of the step is, or where it was
accumulated, that of the later step which its update belongs to).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Unit
from stratagem.errors import ConfigurationError

NUM_UNSYNCED = 64
"""Of so many steps one is on the disk before it is granted: a chief whose journal lost the last ones, when its machine
crashed, knows which numbers the ps may have seen."""


def is_late(incarnation: Incarnation) -> ConfigurationError:
    """Of a worker that begins where others accumulate."""
    return ConfigurationError(
        f"{incarnation.task} cannot continue at staleness 0: others are in the middle of an update of several batches, "
        "and it has not had all of these: it or another worker was lost or left a loop early (start the job again, and "
        "it resumes from its last checkpoint), or a batch has too few examples for all workers (give larger batches, "
        "with drop_last=True, or start fewer workers)"
    )


class SliceState(enum.Enum):
    RESERVED = "reserved"
    GRANTED = "granted"
    ACCEPTED = "accepted"
    ABSORBED = "absorbed"
    REMOVED = "removed"


@dataclasses.dataclass
class Slice:
    """One worker's part of a step."""

    unit: Unit
    incarnation: Incarnation | None
    """Who computes it; None after a restart of the chief, until it is known or given up."""
    state: SliceState = SliceState.RESERVED
    refresh: bool = False
    """Its worker had no slice in the step before and must wait for that step and pull weights first."""
    ordinals: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Absorbed slices: ordinals of the updates that are committed somewhere, and the step that each belongs to."""

    @property
    def unfinished(self) -> bool:
        """A worker still has to deliver it."""
        return self.state in (SliceState.RESERVED, SliceState.GRANTED)


@dataclasses.dataclass
class JobStep:
    """One synchronous step of the job."""

    number: int
    slices: list[Slice]
    group: str = ""
    """Of agreements, in which it was asked for."""

    @property
    def units(self) -> tuple[Unit, ...]:
        """Units of all slices as planned, in slice order."""
        return tuple(each.unit for each in self.slices)

    @property
    def closing(self) -> StepClosing:
        """What counts in it."""
        kept = [each for each in self.slices if each.state is not SliceState.REMOVED]
        committed = tuple((each.unit, ordinal) for each in kept for ordinal in each.ordinals)
        return StepClosing(self.number, tuple(each.unit for each in kept), committed)


@dataclasses.dataclass(frozen=True)
class StepClosing:
    """What every ps must learn about a step that lost a slice."""

    step: int
    included: tuple[Unit, ...]
    """Slices that count from now on."""
    committed: tuple[tuple[Unit, int], ...]
    """(unit, ordinal) that count as committed although the worker is gone."""


@dataclasses.dataclass
class Removal:
    """The consequences of losing slices."""

    closings: list[StepClosing] = dataclasses.field(default_factory=list)
    returned: dict[Unit, Incarnation | None] = dataclasses.field(default_factory=dict)
    """Units to lease again, once the closings are on every ps, and whose they were; of those that some ps has an
    update of, the rest."""
    accepted: list[Unit] = dataclasses.field(default_factory=list)
    """Units of absorbed slices whose step is complete with this."""


class JobSteps:
    """The steps in progress, in the order of their numbers."""

    def __init__(self, next_number: int = 1, is_new: bool = True) -> None:
        self.next_number = next_number
        self.open: dict[int, JobStep] = {}
        self._readmitted = set[int]()
        """Numbers of steps that an earlier chief knew of. They leap where a chief had begun."""
        self._of_unit: dict[Unit, JobStep] = {}
        self._members: frozenset[Incarnation | None] | None = None
        """Who had a slice of the newest step; None: all have its weights."""
        self._composes = is_new
        """Whether that was composed here. Of that of an earlier chief only those who have yet to deliver theirs are
        known: others may have missed it."""
        self._missed: set[Incarnation] = set()
        self.accumulating: set[Incarnation] = set()
        """Workers that have gradients of earlier batches for their next update, as they said last."""
        self.per_unit = 0
        """Updates that a unit has had, at most, as far as workers have said: of two optimizers, say."""

    def compose(
        self, units: Sequence[Unit], workers: Sequence[Incarnation], places: Sequence[int], group: str = ""
    ) -> JobStep:
        """A new step of pending units, at most one for each worker.

        Args:
            units: pending units of one global batch, in slice order.
            workers: live workers that take part, in worker order.
            places: for each unit its slice index in the whole batch; slice j goes to the j-th worker where possible.
            group: of agreements, in which the step is asked for.
        """
        free = dict(enumerate(workers))
        chosen = list(zip(units, places, strict=True))[: len(workers)]
        assigned: dict[Unit, Incarnation] = {}
        for unit, place in chosen:
            if place in free:
                assigned[unit] = free.pop(place)
        for unit, _ in chosen:
            if unit not in assigned:
                assigned[unit] = free.pop(min(free))
        if not self._composes:
            newest = self.open[max(self.open)].slices if self.open else ()
            self._composes, self._members = True, frozenset(each.incarnation for each in newest)
        known = assigned.values() if self._members is None else self._members  # others have missed a step
        slices = [Slice(unit, assigned[unit], refresh=assigned[unit] not in known) for unit, _ in chosen]
        step = self._add(JobStep(self.next_number, slices, group))
        self.next_number += 1
        self._members = frozenset(assigned.values())
        return step

    def readmit(self, number: int, units: Sequence[Unit], accepted: Container[Unit]) -> None:
        """Puts back a step that may have been open when the chief died; its unfinished slices belong to nobody yet. A
        step before it goes on without a unit that was leased anew in this one, which the journal may not have got to
        say."""
        self._readmitted.add(number)
        if number in self.open or all(unit in accepted for unit in units):
            return
        for unit in units:
            if (before := self._of_unit.get(unit)) is not None:
                for each in self._slices_of(unit):
                    each.state = SliceState.REMOVED if each.unfinished else each.state
                self._finish(before, Removal())
        states = [SliceState.ACCEPTED if unit in accepted else SliceState.RESERVED for unit in units]
        step = self._add(JobStep(number, [Slice(u, None, state) for u, state in zip(units, states, strict=True)]))
        self.next_number = max(self.next_number, number + 1)
        self._finish(step, Removal())

    def claim(self, unit: Unit, incarnation: Incarnation) -> None:
        """``incarnation`` says that it holds ``unit`` since before the chief restarted."""
        for each in self._slices_of(unit):
            if each.unfinished:
                each.incarnation, each.state = incarnation, SliceState.GRANTED

    def reserve_orphans(
        self, workers: Sequence[Incarnation], is_elsewhere: Callable[[Incarnation, int, int], bool]
    ) -> list[tuple[Unit, Incarnation]]:
        """Reserves slices without a worker for workers that have none in the step: the reply that granted them got
        lost. ``is_elsewhere``: see :meth:`WorkerLoops.is_elsewhere`. Returns what was reserved."""
        reserved: list[tuple[Unit, Incarnation]] = []
        for step in self.open.values():
            having = {each.incarnation for each in step.slices}
            dataset, epoch = step.units[0][:2]
            idle = [one for one in workers if one not in having and not is_elsewhere(one, dataset, epoch)]
            for each in step.slices:
                if each.unfinished and each.incarnation is None and idle:
                    each.incarnation = idle.pop(0)
                    # With a slice of the step before it still has the weights that this one is made of.
                    before = max((number for number in self._readmitted if number < step.number), default=0)
                    each.refresh = each.incarnation not in self.unfinished(before)
                    reserved.append((each.unit, each.incarnation))
        return reserved

    def to_deliver(self, incarnation: Incarnation | None) -> list[Unit]:
        """Units of unfinished slices of a worker; None: of those that belong to nobody."""
        every = (each for step in self.open.values() for each in step.slices)
        return [each.unit for each in every if each.unfinished and each.incarnation == incarnation]

    def orphans(self) -> list[Unit]:
        """Units of unfinished slices that belong to nobody."""
        return self.to_deliver(None)

    def reserved_for(self, incarnation: Incarnation, dataset: int, epoch: int, stop: int) -> JobStep | None:
        """The first step with a slice reserved for ``incarnation`` in one epoch, before unit ``stop``."""
        reserved = ((step, unit) for step, unit in self._reserved(incarnation) if unit.index < stop)
        return next((step for step, unit in reserved if (unit.dataset, unit.epoch) == (dataset, epoch)), None)

    def reserved_in(self, incarnation: Incarnation, group: str) -> list[Unit]:
        """Units that are reserved for ``incarnation`` in steps asked for in a group of agreements."""
        return [unit for step, unit in self._reserved(incarnation) if step.group == group]

    def waits_for(self, incarnation: Incarnation, step: JobStep) -> list[Incarnation]:
        """Workers whose earlier slices must be accepted before ``incarnation`` may have its slice of ``step``.
        ConfigurationError: one of them accumulates over these, for an update that wants that slice too."""
        if not self._own(incarnation, step).refresh and incarnation not in self._missed:
            return []
        earlier = [each for other in self.open.values() if other.number < step.number for each in other.slices]
        found = [(s.incarnation, s.unit[:2]) for s in earlier if s.unfinished and s.incarnation is not None]
        own = step.units[0][:2]  # slices of a loop that the caller has left, and others have not yet, are no hindrance
        if not self.accumulating.isdisjoint([other for other, units_of in found if units_of == own]):
            raise is_late(incarnation)
        return sorted({other for other, _ in found})

    def is_free(self, step: JobStep) -> bool:
        """Whether nobody has to wait for earlier steps before it may have its slice of this one."""
        return not any(each.refresh or each.incarnation in self._missed for each in step.slices)

    def unfinished(self, number: int) -> list[Incarnation]:
        """Workers that still have to deliver a slice of a step."""
        slices = self.open[number].slices if number in self.open else ()
        return sorted({each.incarnation for each in slices if each.unfinished and each.incarnation is not None})

    def grant(self, incarnation: Incarnation, step: JobStep) -> Slice:
        own = self._own(incarnation, step)
        own.refresh = own.refresh or incarnation in self._missed
        self._missed.discard(incarnation)
        own.state = SliceState.GRANTED
        return own

    def find(self, unit: Unit) -> tuple[JobStep, Slice] | None:
        step = self._of_unit.get(unit)
        return None if step is None else (step, next(each for each in step.slices if each.unit == unit))

    def holder(self, unit: Unit) -> Incarnation | None:
        """Whose slice of an open step it is."""
        found = self.find(unit)
        return None if found is None else found[1].incarnation

    def accept(self, unit: Unit) -> Removal:
        """A slice was accepted. Returns what becomes of absorbed slices with it."""
        done = Removal()
        for each in self._slices_of(unit):
            if each.state is not SliceState.REMOVED:
                each.state = SliceState.ACCEPTED
        if unit in self._of_unit:
            self._finish(self._of_unit[unit], done)
        return done

    def remove(self, units: Iterable[Unit], committed: Mapping[Unit, Mapping[int, int]]) -> Removal:
        """The workers of these unfinished slices will not deliver them; ``committed``: ordinals of the updates of these
        units that some ps has committed, each with the number of its step, or applied (0)."""
        removal = Removal()
        touched: dict[int, JobStep] = {}
        for unit in units:
            for each in self._slices_of(unit):
                if not each.unfinished:
                    continue
                step = self._of_unit[unit]
                touched[step.number] = step
                if ordinals := committed.get(unit, {}):
                    each.state, each.ordinals = SliceState.ABSORBED, ordinals
                    continue
                each.state = SliceState.REMOVED
                removal.returned[unit] = each.incarnation
                if each.incarnation is not None:
                    self._missed.add(each.incarnation)
        for number in sorted(touched):
            removal.closings.append(touched[number].closing)
            self._finish(touched[number], removal)
        for unit in removal.returned:
            self._of_unit.pop(unit, None)
        return removal

    def clear(self) -> None:
        """The ps went back to a checkpoint: no step in progress goes on. Everybody pulls weights anew."""
        self.open.clear()
        self._of_unit.clear()
        self._members, self._composes = None, True
        self._missed.clear()

    def forget(self, incarnation: Incarnation) -> None:
        self._missed.discard(incarnation)
        self.accumulating.discard(incarnation)

    def _add(self, step: JobStep) -> JobStep:
        is_last = step.number >= max(self.open, default=0)
        self.open[step.number] = step
        if not is_last:  # who holds more than one told of it after others had told of later ones
            self.open = dict(sorted(self.open.items()))
        self._of_unit.update((unit, step) for unit in step.units)
        return step

    def _reserved(self, incarnation: Incarnation) -> Iterator[tuple[JobStep, Unit]]:
        for step in self.open.values():
            for each in step.slices:
                if each.incarnation == incarnation and each.state is SliceState.RESERVED:
                    yield step, each.unit

    def _own(self, incarnation: Incarnation, step: JobStep) -> Slice:
        return next(each for each in step.slices if each.incarnation == incarnation)

    def _slices_of(self, unit: Unit) -> list[Slice]:
        step = self._of_unit.get(unit)
        return [] if step is None else [each for each in step.slices if each.unit == unit]

    def _finish(self, step: JobStep, removal: Removal) -> None:
        """Takes a step out once no worker has to deliver anything more for it, nor for a later one in which an absorbed
        slice of it counts."""
        later = {number for each in step.slices for number in each.ordinals.values() if number > step.number}
        if any(each.unfinished for each in step.slices) or not later.isdisjoint(self.open):
            return
        self.open.pop(step.number, None)
        for each in step.slices:
            if self._of_unit.get(each.unit) is step:
                del self._of_unit[each.unit]
            if each.state is SliceState.ABSORBED:
                if len(each.ordinals) < self.per_unit:
                    removal.returned[each.unit] = each.incarnation  # the next one makes the updates that it lacks
                else:
                    removal.accepted.append(each.unit)
        for before in sorted(number for number in self.open if number < step.number):  # which may have waited for it
            self._finish(self.open[before], removal)
