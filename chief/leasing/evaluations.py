"""The units of evaluations: leased and counted like those of an epoch, all on one version of the weights. Pure, no I/O.

They leave no trace on the ps: a unit is accepted when its counts have arrived. If the weights have changed before the
last unit, the evaluation starts over under the next attempt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from stratagem.chief.leasing.leases import EpochLeases, Leases
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Lease, Plan, Topic, Unit, UnitBitmap
from stratagem.errors import ConfigurationError, LimitError

MAX_EVALUATIONS = 1 << 18
"""Of a job; each takes 1.3 KB."""
Versions = Mapping[str, tuple[int, int]]
"""Of each ps: (epoch of its store, updates applied)."""


@dataclasses.dataclass(frozen=True)
class Pin:
    """What an evaluation has to be of, as the journal keeps it."""

    plan: Plan
    attempt: int
    versions: Versions

    def to_record(self) -> dict[str, Any]:
        sizes = [self.plan.num_examples, self.plan.batch_size, self.plan.drop_last]
        return {"plan": sizes, "attempt": self.attempt, "versions": dict(self.versions)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Pin:
        versions = {task: (epoch, step) for task, (epoch, step) in record["versions"].items()}
        num_examples, batch_size, drop_last = record["plan"]
        return cls(Plan(num_examples, batch_size, drop_last, shuffle=False), record["attempt"], versions)


@dataclasses.dataclass
class RunningEvaluation:
    """One pass over evaluation data."""

    plan: Plan
    leases: EpochLeases
    attempt: int = 1
    versions: Versions | None = None
    """Of the weights; None before the first worker asked."""
    is_held: bool = False
    """Commits are held for it."""
    is_pinned: bool = False
    """``versions`` are of this hold."""
    is_proven: bool = False
    """All units were counted, and the weights were the same before and after."""
    askers: set[Incarnation] = dataclasses.field(default_factory=set)

    def pin(self, versions: Versions) -> bool:
        """These are the weights now. True when what was counted before was of others."""
        before, self.versions = self.versions, dict(versions)
        if before is None or before == self.versions:
            return False
        self.attempt += 1
        self.leases = EpochLeases(self.plan)
        return True

    @property
    def record(self) -> Pin:
        """For the journal."""
        return Pin(self.plan, self.attempt, self.versions or {})


class Evaluations(dict[Topic, RunningEvaluation]):
    def restore(self, name: Topic, pin: Pin, counted: Iterable[Unit], is_over: bool) -> None:
        """An earlier incarnation of the chief had begun it, and these units were counted."""
        done = UnitBitmap.first(pin.plan.num_units) if is_over else UnitBitmap.of(unit.index for unit in counted)
        leases = EpochLeases(pin.plan, done)
        self[name] = RunningEvaluation(pin.plan, leases, pin.attempt, pin.versions, is_proven=is_over)

    def open(self, name: Topic, plan: Plan) -> RunningEvaluation:
        """The evaluation of a name. ConfigurationError: it is over other data. LimitError: there are too many."""
        if name not in self and len(self) >= MAX_EVALUATIONS:
            raise LimitError(f"{name}: expected at most {MAX_EVALUATIONS:,} evaluations in a job; evaluate less often")
        known = self.setdefault(name, RunningEvaluation(plan, EpochLeases(plan)))
        if known.plan != plan:
            raise ConfigurationError(
                f"{name} is over {_sizes(known.plan)} in the job and over {_sizes(plan)} here. Every worker must "
                "evaluate the same data, in the same order of its calls."
            )
        return known

    def ask(self, name: Topic, incarnation: Incarnation, held: Collection[int], want: int, at_most: int = 0) -> Leases:
        """Leases units as :meth:`EpochLeases.ask` does."""
        evaluation = self[name]
        leases, plan = evaluation.leases, evaluation.plan
        evaluation.askers.add(incarnation)
        indices = leases.ask(incarnation, held, want, at_most, plan.num_units)
        granted = tuple(Lease(Unit(0, 0, index), plan.unit_examples(index)) for index in indices)
        waits_for = () if granted or leases.closed else tuple(sorted(leases.holders() - {incarnation}))
        return Leases(granted, not granted and leases.closed, waits_for, evaluation.attempt)

    def leave(self, name: Topic, incarnation: Incarnation) -> None:
        """``incarnation`` has given up: its units go to others."""
        evaluation = self.get(name)
        if evaluation is not None:
            for index in evaluation.leases.held_by(incarnation):
                evaluation.leases.give_back(index)
            evaluation.askers.discard(incarnation)

    def forget(self, incarnation: Incarnation) -> None:
        for name in self:
            self.leave(name, incarnation)


def _sizes(plan: Plan) -> str:
    return f"{plan.num_examples} examples in batches of {plan.batch_size}"
