"""Units leased to this worker, and the report of what was accepted."""

from __future__ import annotations

import collections
import dataclasses

from stratagem.cluster.units import Unit
from stratagem.rpc.generated import chief_pb2
from stratagem.worker.chief_client import ChiefClient


@dataclasses.dataclass(frozen=True)
class Grant:
    """A unit leased."""

    unit: Unit
    num_examples: int
    step: int = 0
    """Staleness 0: the step of the job it is a slice of; 0 otherwise."""
    step_units: tuple[Unit, ...] = ()
    """Staleness 0: the units of all slices of the step, in slice order."""
    refresh: bool = False
    """Pull weights before computing: this worker had no part in the last step."""


class LeaseClient:
    """Acquires units of one dataset.

    Args:
        chief: the chief.
        dataset: ordinal of the dataset.
        ahead: units to acquire at once.
    """

    def __init__(self, chief: ChiefClient, dataset: int, ahead: int) -> None:
        self._chief = chief
        self._dataset = dataset
        self._ahead = ahead
        self._epoch = 0
        self._stop = 0
        self._ready: collections.deque[Grant] = collections.deque()
        self._unreported: dict[Unit, chief_pb2.Grant] = {}
        self._held: dict[Unit, chief_pb2.Grant] = {}
        self._deltas: dict[Unit, dict[str, chief_pb2.UnitDelta]] = {}

    def start_epoch(self, epoch: int, stop: int) -> None:
        """The following calls are about the units before ``stop`` of this pass over the dataset."""
        self._epoch, self._stop = epoch, stop

    def next(self, wait: bool, group: str) -> Grant | None:
        """The next unit; None when all are accepted that are meant, or (no ``wait``) there is none right now."""
        if not self._ready:
            held = [unit.index for unit in self._held if unit.epoch == self._epoch]
            accepted, deltas = self._accepted()
            reply = self._chief.next_units(
                self._dataset, self._epoch, accepted, deltas, held, self._ahead, wait, self._stop, group
            )
            self._reported()
            for grant in reply.grants:
                unit = Unit(grant.unit.dataset, grant.unit.epoch, grant.unit.index)
                self._held[unit] = grant
                steps = tuple(Unit(unit.dataset, unit.epoch, index) for index in grant.step_units)
                self._ready.append(Grant(unit, grant.num_examples, grant.step, steps, grant.refresh))
        return self._ready.popleft() if self._ready else None

    def accept(self, unit: Unit) -> None:
        """Every ps has the unit's updates; the chief hears of it with the next call."""
        grant = self._held.pop(unit, None)
        if grant is not None:
            self._unreported[unit] = grant

    def count(self, unit: Unit, tally: chief_pb2.TallyName, data: bytes) -> None:
        """What was counted on a unit; the chief hears of it with its acceptance."""
        delta = chief_pb2.UnitDelta(index=unit.index, tally=tally, data=data)
        self._deltas.setdefault(unit, {})[tally.group] = delta

    def _accepted(self) -> tuple[list[int], list[chief_pb2.UnitDelta]]:
        deltas = [delta for unit in self._unreported for delta in self._deltas.get(unit, {}).values()]
        return [unit.index for unit in self._unreported], deltas

    def _reported(self) -> None:
        for unit in self._unreported:
            self._deltas.pop(unit, None)
        self._unreported.clear()

    def holds(self, unit: Unit) -> bool:
        """Whether the unit is leased to this worker."""
        return unit in self._held

    def start_step(self, clock: int) -> int:
        """Waits for the staleness bound; returns the clock the chief holds for this worker."""
        now = self._chief.start_step(self._dataset, self._epoch, *self._accepted(), clock)
        self._reported()
        return now

    def leave(self) -> None:
        """Gives back everything that is not accepted."""
        accepted, deltas = self._accepted()
        self.forget()
        self._chief.leave_epoch(self._dataset, self._epoch, accepted, deltas)

    def forget(self) -> None:
        """The job went back to a checkpoint: the chief has taken everything back and leases anew."""
        self._unreported.clear()
        self._ready.clear()
        self._held.clear()
        self._deltas.clear()

    def held(self) -> list[chief_pb2.Grant]:
        """Units leased, and those it has not heard the end of, for a chief that restarted."""
        return [*self._unreported.values(), *self._held.values()]
