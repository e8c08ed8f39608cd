"""Units leased to this worker, of training data or of an evaluation, and the report of their outcome.

Above staleness 0 a lease covers about a second of this worker's work, at staleness 0 as much of it as the chief gives
(:data:`stratagem.chief.leasing.lease_book.NUM_ASKING`). When the units are used up, the next call reports what was
accepted meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from stratagem.cluster.units import Lease, Plan, Topic, Unit
from stratagem.errors import PeerUnavailableError
from stratagem.rpc.fields import to_message
from stratagem.rpc.generated import chief_pb2
from stratagem.rpc.units import lease_from_proto
from stratagem.worker.chief_client import ChiefClient

LEASE_S = 1.0
"""Seconds of work that this worker asks for."""
GROWTH = 4
"""Times more units than last time, at most: the first steps say little about the next ones."""
REPORT_S = 0.5
"""Seconds after which a worker whose clock others may wait for says it, however few its steps."""


class Done(NamedTuple):
    """A script's progress, as far as the chief needs it."""

    num_groups: int = 0
    """Shard groups that it has prepared, counted on each ps."""
    steps_per_unit: int = 0
    """Updates of the unit that had most; before there is one, optimizers that it has prepared."""
    accumulates: bool = False
    """It has gradients of earlier batches for its next update."""


NOTHING = Done()


@dataclasses.dataclass(eq=False, repr=False)
class LeaseClient:
    """Acquires the units of a dataset, pass by pass."""

    _chief: ChiefClient
    _plan: Plan
    _first: int = 2
    """Units to acquire before the speed is known, and at least."""
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._pass = chief_pb2.NextUnitsRequest()
        self._ready: collections.deque[Lease] = collections.deque()
        self._held: dict[Unit, Lease] = {}
        self._unreported: dict[Unit, Lease] = {}
        self._states: dict[Unit, dict[str, chief_pb2.MetricState]] = {}
        self._answered_at = self._clock()
        self._num_last = self._first
        self._limit = 0
        self._reported_step = 0
        self._first_open = 0
        self._accumulates = False
        self.attempt = 0
        """Of an evaluation: units of others do not count; grows when the weights have changed."""

    def start_epoch(self, dataset: int, epoch: int, stop: int) -> None:
        """The following calls are about the units before ``stop`` of this pass over a dataset."""
        self._pass = chief_pb2.NextUnitsRequest(dataset=dataset, epoch=epoch, stop=stop)
        self._answered_at = self._clock()

    def start_evaluation(self, group: str, ordinal: int) -> None:
        """The following calls are about the ``ordinal``-th pass of an evaluation."""
        name = chief_pb2.Topic(group=group, ordinal=ordinal)
        evaluation = to_message(chief_pb2.EvaluationPass, self._plan, name=name)
        self.forget()
        self.attempt = 0
        self._pass = chief_pb2.NextUnitsRequest(evaluation=evaluation)
        self._answered_at = self._clock()

    def next(self, wait: bool, group: str = "", counts: bool = False, done: Done = NOTHING) -> Lease | None:
        """The next unit; None when all are accepted that are meant, or (no ``wait``) there is none right now.

        Args:
            wait: for a unit that others may give back, or the end.
            group: of agreements, in which this worker trains.
            counts: a unit that this worker does not live to report has to be computed again.
            done: what its script has done by now.
        """
        if not self._ready and not self.is_over():
            self.take(self._chief.next_units(self.request(wait, group, counts, done)))
        return self.ready()

    def is_over(self) -> bool:
        """The pass was closed before this worker came to it, as the chief has said, and there is nothing to report: who
        is started again goes through all passes from the first."""
        is_known = not self._pass.HasField("evaluation") and self._pass.epoch < self._first_open
        return is_known and not self._held and not self._unreported

    @property
    def has_ready(self) -> bool:
        """Whether :meth:`ready` gives one."""
        return bool(self._ready)

    def ready(self) -> Lease | None:
        """The next unit that is here."""
        return self._ready.popleft() if self._ready else None

    def request(
        self, wait: bool, group: str = "", counts: bool = False, done: Done = NOTHING
    ) -> chief_pb2.NextUnitsRequest:
        """What to ask the chief for now."""
        self._accumulates = done.accumulates
        request = self._report()
        request.held.extend(unit.index for unit in self._held if unit.epoch == self._epoch)
        request.want, request.at_most, request.wait = self._first, self._affordable(), wait
        request.group, request.counts = group, counts
        request.num_groups, request.steps_per_unit = done.num_groups, done.steps_per_unit
        return request

    def take(self, reply: chief_pb2.NextUnitsReply) -> None:
        self._reported()
        self._first_open = max(self._first_open, reply.first_open)
        if reply.attempt != self.attempt:
            self.attempt = reply.attempt
            self._held.clear()
        for proto in reply.leases:
            index = proto.unit.index
            lease = lease_from_proto(proto, self._plan.unit_examples(index))
            if self.attempt:
                lease = Lease(Unit(0, self.attempt, index), lease.num_examples)
            self._held[lease.unit] = lease
            self._ready.append(lease)

    def holds(self, unit: Unit) -> bool:
        return unit in self._held

    def count(self, unit: Unit, data: bytes, topic: Topic | None = None) -> None:
        """What was counted on a unit; the chief hears of it with its acceptance. In an evaluation there is one topic,
        in training a name says which."""
        state = chief_pb2.MetricState(index=unit.index, data=data)
        if topic is not None:
            state.topic.group, state.topic.ordinal = topic.group, topic.ordinal
        self._states.setdefault(unit, {})[state.topic.group] = state

    def accept(self, unit: Unit) -> None:
        """Every ps has the unit's updates, or it is evaluated; the chief hears of it with the next call."""
        lease = self._held.pop(unit, None)
        if lease is not None:
            self._unreported[unit] = lease

    def start_step(self, step: int, staleness: float) -> tuple[int, bool]:
        """Waits for the staleness bound. ``step``: steps that this worker has completed. Gives the number from which
        this worker counts its steps, and whether the chief was asked.

        The chief is asked when the bound may be reached, and soon enough that others, which wait for this worker's
        steps, need not wait for its report: half the bound at the latest.
        """
        lag = step - self._reported_step
        is_late = self._clock() - self._answered_at >= REPORT_S
        if step < self._limit and lag < max(1, staleness // 2) and not (lag and is_late):
            return step, False
        request = self._pass
        accepted, states = self._accepted()
        reply = self._chief.start_step(request.dataset, request.epoch, accepted, states, step)
        self._reported()
        self._limit, self._reported_step = reply.limit, reply.clock
        return reply.clock, True

    def report(self) -> None:
        """Tells the chief what is accepted while this worker waits for a ps: at staleness 0 perhaps for the part of one
        who may not begin before that."""
        if self._unreported and self._plan.staleness == 0:
            with contextlib.suppress(PeerUnavailableError):
                self._chief.report(self._report())
                self._reported()

    def leave(self) -> None:
        """Gives back everything that is not accepted."""
        self._accumulates = False
        request = self._report()
        self.forget()
        request.leave = True
        self._chief.next_units(request)

    def forget(self) -> None:
        """Nothing that was leased is this worker's any more."""
        self.roll_back()
        self._states.clear()

    def roll_back(self) -> None:
        """The job went back to a checkpoint: the chief has taken everything back and leases anew. What was counted is
        told all the same: where the checkpoint has an update of several units, nobody makes any of these again."""
        self._unreported.clear()
        self._ready.clear()
        self._held.clear()
        self._limit = self._first_open = 0
        self._accumulates = False

    def held(self) -> list[Lease]:
        """Units leased, and those it has not heard the end of, for a chief that restarted."""
        return [*self._unreported.values(), *self._held.values()]

    @property
    def _epoch(self) -> int:
        return self.attempt if self._pass.HasField("evaluation") else self._pass.epoch

    def _report(self) -> chief_pb2.NextUnitsRequest:
        request = chief_pb2.NextUnitsRequest()
        request.CopyFrom(self._pass)
        request.accumulates = self._accumulates
        accepted, states = self._accepted()
        request.accepted.extend(accepted)
        request.states.extend(states)
        if request.HasField("evaluation"):
            request.evaluation.attempt = self.attempt
        return request

    def _affordable(self) -> int:
        """Units that this worker needs :data:`LEASE_S` for, by what it did since the last answer."""
        if self._unreported:
            elapsed_s = max(self._clock() - self._answered_at, 1e-3)
            speed = len(self._unreported) / elapsed_s
            self._num_last = min(GROWTH * self._num_last, max(self._first, math.ceil(LEASE_S * speed)))
        return self._num_last

    def _accepted(self) -> tuple[list[int], list[chief_pb2.MetricState]]:
        states = [state for unit, own in self._states.items() if unit not in self._held for state in own.values()]
        return [unit.index for unit in self._unreported], states

    def _reported(self) -> None:
        self._answered_at = self._clock()
        self._states = {unit: own for unit, own in self._states.items() if unit in self._held}
        self._unreported.clear()
