"""Units in a ring: every worker takes its own slice of every global batch, in step with the others."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from stratagem.cluster.units import Plan, Unit
from stratagem.errors import StratagemError
from stratagem.worker.leases import Grant
from stratagem.worker.step_meter import StepMeter

REPORT_S = 1.0
"""Seconds between two reports of accepted units to the chief."""


@dataclasses.dataclass(frozen=True)
class Share:
    """This worker's part of a global batch."""

    num_examples: int
    batch_examples: int

    @property
    def weight(self) -> float:
        """Of its gradient in a mean over the global batch."""
        return self.num_examples / self.batch_examples


class RingUnits:
    """Implements :class:`stratagem.data.distributed.UnitSource`: slice ``rank`` of each batch, in order.

    A worker without a slice gets a batch of size 0, so that every worker makes every step.

    Args:
        plan: the plan of the dataset, with one slice for each worker.
        ordinal: ordinal of the dataset.
        rank: which slices are this worker's.
        meter: counts steps and examples.
        on_begin: hears of each share before its batch is handed out.
        report: tells the chief of an epoch's accepted units; None: somebody else does.
    """

    def __init__(
        self,
        plan: Plan,
        ordinal: int,
        rank: int,
        meter: StepMeter,
        on_begin: Callable[[Share, Any], None],
        report: Callable[[int, Sequence[int]], None] | None,
    ) -> None:
        self._plan = plan
        self._ordinal = ordinal
        self._rank = rank
        self._meter = meter
        self._on_begin = on_begin
        self._report = report
        self._epoch = 0
        self._next = 0
        self._accepted: list[int] = []
        self._reported_at = 0.0

    def start_epoch(self, epoch: int) -> None:
        self._epoch, self._next = epoch, 0
        self._meter.epoch = epoch
        self._meter.start_clock()

    def next(self, wait: bool) -> Grant | None:
        if self._next >= self._plan.num_batches:
            return None
        units = self._plan.units_of(self._next)
        self._next += 1
        if self._rank < len(units):
            index = units[self._rank]
            return Grant(Unit(self._ordinal, self._epoch, index), self._plan.unit_examples(index))
        return Grant(Unit(self._ordinal, self._epoch, units[0]), 0)

    def holds(self, grant: Grant) -> bool:
        return True

    def begin(self, grant: Grant, batch: Any) -> None:
        units = self._plan.units_of(self._plan.batch_of(grant.unit.index))
        self._on_begin(Share(grant.num_examples, sum(map(self._plan.unit_examples, units))), batch)

    def done(self, grant: Grant) -> None:
        self._meter.step_done(grant.num_examples)
        self._accepted += self._plan.units_of(self._plan.batch_of(grant.unit.index))
        if time.monotonic() - self._reported_at > REPORT_S:
            self._tell()

    def end_epoch(self, complete: bool) -> None:
        self._tell()

    def _tell(self) -> None:
        if self._report is not None and self._accepted:
            with contextlib.suppress(StratagemError):  # the chief keeps books; the ring goes on without them
                self._report(self._epoch, self._accepted)
        self._accepted = []
        self._reported_at = time.monotonic()
