"""Evaluation data under parameter servers: units leased from the chief, all evaluated with one version of the weights.

Nothing of it is on the ps: a unit is accepted when the chief has what was counted on it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from stratagem.cluster.units import Lease, Plan
from stratagem.data.split_dataset import SplitDataset
from stratagem.errors import StratagemError
from stratagem.measuring import measures
from stratagem.worker.chief_client import ChiefClient
from stratagem.worker.leases import LeaseClient
from stratagem.worker.step_meter import StepMeter


class EvaluatedUnits:
    """Implements :class:`stratagem.data.distributed.UnitSource`; each epoch is a pass. The epoch of a unit is the
    attempt of its pass.

    Args:
        pull: takes the weights of the ps.
    """

    def __init__(self, chief: ChiefClient, group: str, plan: Plan, pull: Callable[[], None], meter: StepMeter) -> None:
        self._client = LeaseClient(chief, plan)
        self.group = group
        """Names the evaluation."""
        self.num_passes = 0
        """Passes that were begun; the newest is the ordinal of the topic."""
        self._pull = pull
        self._meter = meter
        self._pulled = 0
        self._begin: Callable[[], None] = lambda: None  # nobody counts
        self._collect: Callable[[], bytes] = bytes

    def counted_by(self, begin: Callable[[], None], collect: Callable[[], bytes]) -> None:
        """Who counts: hears of the beginning of each unit, and says at its end what it has counted."""
        self._begin, self._collect = begin, collect

    def start_epoch(self, epoch: int, stop: int) -> None:
        self.num_passes = epoch + 1
        self._client.start_evaluation(self.group, epoch)
        self._pulled = 0

    def next(self, wait: bool) -> Lease | None:
        if not wait:
            return self._client.next(wait)
        with self._meter.exposed("the other workers to finish the evaluation", phase=measures.MEETING):
            return self._client.next(wait)

    def holds(self, lease: Lease) -> bool:
        return self._client.holds(lease.unit)

    def begin(self, lease: Lease, batch: Any) -> None:
        if self._pulled != self._client.attempt:
            self._pull()
            self._pulled = self._client.attempt
        self._begin()

    def done(self, lease: Lease) -> None:
        if self.holds(lease):
            self._client.count(lease.unit, self._collect())
            self._client.accept(lease.unit)

    def end_epoch(self) -> None:
        """See :class:`~stratagem.data.distributed.UnitSource`."""

    def leave(self) -> None:
        with contextlib.suppress(StratagemError):  # a job that ends has nobody to tell
            self._client.leave()


class WholeData:
    """Evaluation data that have no numbers (an iterable): one unit, for one worker.

    Args:
        num_batches: no more than these; None: all.
    """

    def __init__(self, batches: SplitDataset, num_batches: int | None, units: EvaluatedUnits) -> None:
        self._batches = batches
        self._num_batches = num_batches
        self._units = units

    def __iter__(self) -> Iterator[Any]:
        self._units.start_epoch(self._units.num_passes, 1)
        complete = False
        try:
            while (lease := self._units.next(wait=True)) is not None:
                self._units.begin(lease, None)
                with contextlib.closing(iter(self._batches)) as batches:
                    yield from itertools.islice(batches, self._num_batches)
                self._units.done(lease)
            complete = True
        finally:
            if not complete:
                self._units.leave()
