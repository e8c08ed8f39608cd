"""Staleness 0: which slices of a step are here, when the step can be applied, what a dead worker leaves behind.

A state machine. A slice is *prepared* (its gradient is here) and then *committed* (its worker knows that every ps has
it). A step is ready when every slice that counts is committed. When the chief closes a step, only the included slices
count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from stratagem.cluster.units import Unit, Update
from stratagem.errors import ConfigurationError, ProtocolError
from stratagem.ps.merge import coefficients
from stratagem.ps.requests import GroupCommit, RequestedSlice, Sender, UpdateAction, is_fenced
from stratagem.ps.shard_group import Parts
from stratagem.ps.staging import FRAME_OVERHEAD_BYTES
from stratagem.ps.units import UnitClose

NUM_REMEMBERED = 256
"""Steps applied, and steps closed, that are remembered for resends."""

_SCALE_TOLERANCE = 1e-6

GOES_ON = "A job that lost a worker, or a ps, resumes from its last checkpoint when it is restarted"

StepKey = tuple[int, int]
"""Step of the job and ordinal of the optimizer step within it."""


@dataclasses.dataclass(eq=False)
class Contribution:
    """One slice of a step."""

    sender: Sender
    unit: Unit
    """The slice; the last of the update's units."""
    update: Update
    slice: RequestedSlice
    groups: tuple[GroupCommit, ...]
    parts: Mapping[int, Parts]
    """Gradient of each group."""
    contributes: bool = True
    """False when the unit's update is applied here already: it counts as done and adds nothing."""
    committed: bool = False
    action: UpdateAction = UpdateAction.APPLY
    scale: float = 1.0
    num_servers: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes that it keeps here, at most."""
        pieces = [piece for parts in self.parts.values() for _, piece in parts]
        return sum(piece.nbytes for piece in pieces) + (1 + len(pieces)) * FRAME_OVERHEAD_BYTES


@dataclasses.dataclass
class _Step:
    planned: tuple[Unit, ...]
    contributions: dict[Unit, Contribution] = dataclasses.field(default_factory=dict)
    claimed: bool = False
    error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class _Closing:
    included: frozenset[Unit]
    orphans: frozenset[Unit]
    """Slices whose worker is gone."""
    committed: frozenset[tuple[Unit, int]]
    """These, in the updates that it had committed."""
    chief: Sender

    def after(self, earlier: _Closing | None) -> _Closing:
        """With what the same chief has said: its calls may overtake each other, and what it closes out stays out."""
        if earlier is None or earlier.chief != self.chief:
            return self
        included, orphans = self.included & earlier.included, self.orphans | earlier.orphans
        return _Closing(included, orphans, self.committed | earlier.committed, self.chief)

    def counts(self, unit: Unit, ordinal: int) -> bool:
        """Whether a slice is in an update of the step: one whose worker is gone is in those that it had committed."""
        return unit in self.included and (unit not in self.orphans or (unit, ordinal) in self.committed)


class SyncSteps:
    def __init__(self) -> None:
        self._open: dict[StepKey, _Step] = {}
        self._closings: dict[int, _Closing] = {}
        self._applied: dict[StepKey, frozenset[Unit]] = {}
        self._forgotten_step = 0
        self._accumulates = False
        """Updates have come of several batches."""
        self._left: dict[Unit, tuple[Sender, int]] = {}
        """Slices that have had all the updates that their workers make, and how many of these came here."""
        self._accumulated: dict[Unit, tuple[Sender, int]] = {}
        """Slices that were in the update of a later step, and its number."""

    @property
    def are_used(self) -> bool:
        """Whether updates come as slices of steps."""
        return bool(self._open or self._applied)

    def prepare(self, key: StepKey, contribution: Contribution) -> None:
        """Takes a slice. ProtocolError: another plan of the step, or the unit is not in it. ConfigurationError:
        hyper-parameters or merge differ from another slice's; names both senders."""
        planned, closing = contribution.slice.units, self._closings.get(key[0])
        step = self._open.setdefault(key, _Step(planned))
        is_alike = step.planned == planned
        if not is_alike and closing is not None:  # a chief that was started again leases it without what was closed out
            is_alike = closing.included.isdisjoint({*step.planned} ^ {*planned})
        if not is_alike or contribution.unit not in planned:
            raise ProtocolError(
                f"step {key[0]}: expected the planned slices {[str(unit) for unit in step.planned]}, got "
                f"{[str(unit) for unit in contribution.slice.units]} "
                f"with {contribution.unit} from {contribution.sender}"
            )
        for other in step.contributions.values():
            if other.unit != contribution.unit:
                _check_agreement(key, other, contribution)
        self._accumulates |= len(contribution.update.units) > 1
        if self._accumulates:
            for earlier, theirs in self._open.items():
                for one in theirs.contributions.values():
                    _check_batches(earlier, one, key, contribution)
        mine = step.contributions.get(contribution.unit)
        if mine is None or not mine.committed:
            step.contributions[contribution.unit] = contribution
        if (error := self._lacks_for_good(key)) is not None:
            raise error

    def leave(self, sender: Sender, closes: Iterable[UnitClose]) -> bool:
        """``sender`` has gone on from these slices: whoever waits for another update of one waits in vain. Whether
        somebody does."""
        self._left.update({close.unit: (sender, close.num_updates) for close in closes})
        while len(self._left) > NUM_REMEMBERED:
            del self._left[next(iter(self._left))]
        errors = {key: error for key in self._open if (error := self._lacks_for_good(key)) is not None}
        for key, error in errors.items():
            self.fail(key, error)
        return bool(errors)

    def _lacks_for_good(self, key: StepKey) -> ConfigurationError | None:
        came = self._open[key].contributions
        for unit in self.included(key) if came else ():
            other, number = self._accumulated.get(unit, (None, 0))
            if other is not None and number > key[0] and unit not in came:
                return _other_batches(key[0], next(iter(came.values())).sender, number, other)
        gone = [unit for unit in self.included(key) if unit not in came and self._is_left_without(unit, key[1])]
        if not gone or not came:
            return None
        return ConfigurationError(
            f"step {key[0]}: {next(iter(came.values())).sender} makes update {key[1] + 1} of this batch, and "
            f"{self._left[gone[0]][0]} continued without it: every worker must call optimizer.step() equally often on "
            "its slice of a batch. For a slice that should count for nothing, call strategy.set_weight(0); for losses "
            "that are not finite, prepare(nan='skip') makes all skip together. " + GOES_ON
        )

    def _is_left_without(self, unit: Unit, ordinal: int) -> bool:
        """Not where its worker has made the update, in an earlier step that a chief leases again whose disk lost it."""
        if unit not in self._left or ordinal < self._left[unit][1]:
            return False
        return not any(unit in units for (_, made), units in self._applied.items() if made == ordinal)

    def num_bytes(self, key: tuple[str, int]) -> int:
        """Bytes that the slices of one incarnation keep here, at most."""
        contributions = [one for step in self._open.values() for one in step.contributions.values()]
        return sum(one.num_bytes for one in contributions if one.sender.key == key)

    def is_open(self, key: StepKey) -> bool:
        """Whether any slice of the step came and the step is not applied."""
        return key in self._open

    def is_prepared(self, key: StepKey, unit: Unit) -> bool:
        step = self._open.get(key)
        return step is not None and unit in step.contributions

    def commit(self, key: StepKey, unit: Unit, action: UpdateAction, scale: float, num_servers: int) -> None:
        """The slice's worker commits. ConfigurationError: another action or scale than a slice committed before; names
        both senders."""
        step = self._open[key]
        mine = step.contributions[unit]
        for other in step.contributions.values():
            differs = abs(other.scale - scale) > _SCALE_TOLERANCE * max(abs(scale), abs(other.scale))
            if other.committed and other.unit != unit and (other.action is not action or differs):
                raise ConfigurationError(
                    f"step {key[0]}: {other.sender} commits {other.action.value} with scale {other.scale}, "
                    f"{mine.sender} {action.value} with scale {scale}; "
                    "call prepare(clip_norm=…, nan=…) alike on every worker"
                )
        mine.committed, mine.action, mine.scale, mine.num_servers = True, action, scale, num_servers

    def close(
        self,
        chief: Sender,
        step: int,
        included: Iterable[Unit],
        committed: Iterable[Update],
        is_applied: Callable[[Unit, int], bool],
    ) -> list[StepKey]:
        """The chief closes a step. Returns the keys of it that are open here. ``is_applied``: whether an update of a
        unit was here before: of one that is computed again for the rest of its updates, say. Such a one counts as
        committed, and need not have come again. ProtocolError: an included slice that counts as committed is not
        here."""
        pairs = [(unit, update.ordinal) for update in committed for unit in update.units]
        came = [pair for pair in pairs if self.is_prepared((step, pair[1]), pair[0]) or not is_applied(*pair)]
        said = _Closing(frozenset(included), frozenset(unit for unit, _ in pairs), frozenset(came), chief)
        closing = said.after(self._closings.get(step))
        keys = [key for key in self._open if key[0] == step]
        self._closings[step] = closing
        while len(self._closings) > NUM_REMEMBERED:
            del self._closings[min(self._closings)]
        for key in keys:
            contributions = self._open[key].contributions
            for unit in [unit for unit in contributions if not closing.counts(unit, key[1])]:
                del contributions[unit]
        lost = sorted(
            unit
            for unit, ordinal in closing.committed
            if (step, ordinal) in self._open
            and unit in closing.included
            and not self.is_prepared((step, ordinal), unit)
        )
        if lost:
            raise ProtocolError(f"step {step}: {lost[0]} counts as committed, and its gradient is not here")
        return keys

    def included(self, key: StepKey) -> tuple[Unit, ...]:
        """Slices that count, in slice order."""
        planned = self._open[key].planned
        closing = self._closings.get(key[0])
        return planned if closing is None else tuple(unit for unit in planned if closing.counts(unit, key[1]))

    def all_prepared(self, key: StepKey) -> bool:
        """Whether every slice that counts is here (or the step is applied)."""
        return key not in self._open or all(unit in self._open[key].contributions for unit in self.included(key))

    def is_ready(self, key: StepKey) -> bool:
        if key not in self._open:
            return False
        contributions = self._open[key].contributions
        closing = self._closings.get(key[0])
        stands_in = closing.committed if closing is not None else frozenset()
        return all(
            unit in contributions and (contributions[unit].committed or (unit, key[1]) in stands_in)
            for unit in self.included(key)
        )

    def claim(self, key: StepKey) -> bool:
        """True for exactly one caller once the step is ready: that caller applies it."""
        if not self.is_ready(key) or self._open[key].claimed:
            return False
        self._open[key].claimed, self._open[key].error = True, None
        return True

    def contributions(self, key: StepKey) -> list[Contribution]:
        """Slices that count and are here, in slice order."""
        step = self._open[key]
        return [step.contributions[unit] for unit in self.included(key) if unit in step.contributions]

    def coefficients(self, key: StepKey) -> list[float]:
        """Factor of each of :meth:`contributions`; 0 for one that adds nothing."""
        every = self.contributions(key)
        adding = [one for one in every if one.contributes]
        if not adding:
            return [0.0] * len(every)
        factors = iter(coefficients(adding[0].slice.merge, [one.slice.weight for one in adding]))
        return [next(factors) if one.contributes else 0.0 for one in every]

    def finish(self, key: StepKey) -> None:
        """The step is applied; its gradients can go."""
        self._applied[key] = frozenset(self.included(key))
        for one in self._open.pop(key).contributions.values():
            self._accumulated.update(dict.fromkeys(one.update.units[:-1], (one.sender, key[0])))
        while len(self._accumulated) > NUM_REMEMBERED:
            del self._accumulated[next(iter(self._accumulated))]
        while len(self._applied) > NUM_REMEMBERED:
            oldest = min(self._applied)
            self._forgotten_step = max(self._forgotten_step, oldest[0])
            del self._applied[oldest]

    def fail(self, key: StepKey, error: Exception) -> None:
        """The step cannot be applied; everybody who waits for it gets the error, and it may be tried again."""
        self._open[key].error = error
        self._open[key].claimed = False

    def error(self, key: StepKey) -> Exception | None:
        """Why the step could not be applied."""
        return self._open[key].error if key in self._open else None

    def is_applied(self, key: StepKey) -> bool:
        return key in self._applied or (key not in self._open and key[0] < self._forgotten_step)

    def is_left_out(self, key: StepKey, unit: Unit) -> bool:
        """Whether the chief closed the step without this slice."""
        if key in self._applied:
            return unit not in self._applied[key]
        closing = self._closings.get(key[0])
        return closing is not None and not closing.counts(unit, key[1])

    def committed_by(self, task: str, incarnation: int) -> list[tuple[StepKey, Unit]]:
        """What incarnations of ``task`` up to ``incarnation`` had committed of steps still open: with its last unit, in
        whose step it is, an update has those that were accumulated for it."""
        return sorted(
            (key, unit)
            for key, step in self._open.items()
            for one in step.contributions.values()
            for unit in one.update.units
            if one.committed and is_fenced(one.sender.key, task, incarnation)
        )

    def clear(self) -> None:
        self._open.clear()
        self._closings.clear()
        self._applied.clear()
        self._left.clear()
        self._accumulated.clear()
        self._forgotten_step = 0


def _check_batches(earlier: StepKey, one: Contribution, later: StepKey, other: Contribution) -> None:
    """Neither would ever be applied: each waits for a slice that its worker has put into the other."""
    if earlier[0] > later[0]:
        earlier, one, later, other = later, other, earlier, one
    if earlier[0] < later[0] and any(unit in one.slice.units for unit in other.update.units[:-1]):
        raise _other_batches(earlier[0], one.sender, later[0], other.sender)


def _other_batches(earlier: int, one: Sender, later: int, other: Sender) -> ConfigurationError:
    return ConfigurationError(
        f"{one} makes a step after the batch of step {earlier}, and {other} accumulates over it and makes one after "
        f"that of step {later}: every worker must step after the same batches. A batch smaller than the number of "
        "workers does not reach all of them: leave it out (drop_last=True). " + GOES_ON
    )


def _check_agreement(key: StepKey, one: Contribution, other: Contribution) -> None:
    if one.slice.merge is not other.slice.merge:
        raise ConfigurationError(
            f"step {key[0]}: {one.sender} merges by {one.slice.merge.value}, {other.sender} by "
            f"{other.slice.merge.value}; call prepare(gradients=…) alike on every worker"
        )
    if one.slice.is_set != other.slice.is_set and one.slice.weight and other.slice.weight:
        setter, counter = (one, other) if one.slice.is_set else (other, one)
        raise ConfigurationError(
            f"step {key[0]}: {setter.sender} has called set_weight({setter.slice.weight:g}), and {counter.sender} "
            f"weighs its slice by its {counter.slice.weight:g} examples: call it on every worker, or with 0 for "
            "what should not count"
        )
    theirs = {commit.group: commit.hyper_parameters for commit in one.groups}
    for commit in other.groups:
        expected = theirs.get(commit.group, commit.hyper_parameters)
        for index, (first, second) in enumerate(zip(expected, commit.hyper_parameters, strict=False)):
            names = sorted(name for name in {*first, *second} if first.get(name) != second.get(name))
            if names:
                raise ConfigurationError(
                    f"step {key[0]}: hyper-parameter {names[0]} of param_group {index} differs: {one.sender} has "
                    f"{first.get(names[0])}, {other.sender} has {second.get(names[0])}; "
                    "give its scheduler to strategy.prepare, which follows the steps of the job, or set it from what "
                    "all workers see, as the number of the epoch: a worker is not called for a batch that has no part "
                    "for it"
                )
