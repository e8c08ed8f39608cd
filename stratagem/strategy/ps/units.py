"""Units under parameter servers: leased from the chief, matched to steps, closed on every ps."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from stratagem.cluster.units import Lease, Plan, Topic, Unit
from stratagem.data.nested import tensors
from stratagem.data.placement import Listener, StepShare
from stratagem.errors import ConfigurationError, StaleStoreError, StratagemError
from stratagem.measuring import measures
from stratagem.strategy.ps.variables import VariableGroups
from stratagem.worker.leases import Done, LeaseClient
from stratagem.worker.runtime import WorkerRuntime
from stratagem.worker.unit_tracker import UnitTracker


class UnitListener(Protocol):
    """Hears of the units that this worker trains on."""

    group: str
    """Of agreements: whoever has left it gets no part of a step that is asked for meanwhile; "": all get theirs."""

    def begin_unit(self) -> None:
        """The script is about to get the batch of a unit."""

    def collect(self) -> tuple[Topic, bytes] | None:
        """What was counted since, if anything, and for which topic."""

    def flush(self) -> None:
        """There is no further batch now, perhaps never: a step with what was accumulated is due."""


class OwnBatches(Listener):
    """Counts the examples of a worker's own pipeline, which no chief leases; steps are counted as they are pushed."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._meter = runtime.meter
        self._dismissal = runtime.dismissal

    def start_epoch(self, epoch: int) -> None:
        self._meter.epoch = epoch
        self._meter.start_clock()

    def begin(self, share: StepShare, batch: Any) -> None:
        if (end := self._dismissal()) is not None:
            raise end
        self._meter.got_data()

    def done(self, share: StepShare) -> None:
        self._meter.examples += share.batch_examples
        self._meter.wants_data()

    def end_epoch(self, complete: bool) -> None:
        self._meter.stop_clock()


@dataclasses.dataclass(eq=False, repr=False)
class LeasedUnits:
    """Implements :class:`stratagem.data.distributed.UnitSource` with leases."""

    _plan: Plan
    _dataset: int
    """Its ordinal."""
    _client: LeaseClient
    _runtime: WorkerRuntime
    _groups: VariableGroups
    _tracker: UnitTracker
    _accept: Callable[[Sequence[Unit]], None]
    """Hears which units are complete."""
    _pull: Callable[[], None]
    """Takes newer weights from the ps, and waits for one that restarts."""
    _attach: Callable[[], None]
    """Gives a ps that came back the values that it lacks."""
    _on_begin: Callable[[Lease | None, Any], None]
    """Hears of each unit before its batch is handed out, and of the end of it as (None, None)."""
    _listeners: Callable[[], Sequence[UnitListener]]

    def __post_init__(self) -> None:
        self._meter = self._runtime.meter
        self._bounded = 0 < self._plan.staleness < math.inf
        self._clock = 0
        self._is_counting = self._is_skipped = False
        self._num_examples = 0
        self._last_batch = range(0)
        """Units of the last batch of the pass."""
        self.is_read = False
        """Whether the script goes through an epoch."""

    def start_epoch(self, epoch: int, stop: int) -> None:
        self._tracker.start_epoch()
        self.is_read = True
        self._last_batch = self._plan.units_of(self._plan.batch_of(stop - 1)) if stop else range(0)
        self._client.start_epoch(self._dataset, epoch, stop)
        self._is_skipped = self._client.is_over()
        self._meter.epoch = epoch
        self._meter.start_clock()

    def next(self, wait: bool) -> Lease | None:
        if (lease := self._client.ready()) is not None:
            return lease
        group = next((listener.group for listener in self._listeners() if listener.group), "")
        # Of an update of several units a part alone cannot be made again: a dead worker's stand as they are there.
        counts = bool(self._listeners()) and not self._tracker.accumulates
        with self._meter.within(measures.LEASE_WAIT):
            lease = self._ask(wait=False, group=group, counts=counts)
        if lease is not None or not wait:
            return lease
        self._check_batches()
        for listener in self._listeners():
            listener.flush()
        # Nothing may stay open here while others wait for the end of the epoch, or it could never close.
        self._accept(self._tracker.end())
        self._groups.closes.deliver()
        with self._meter.exposed("the other workers to finish the epoch", phase=measures.MEETING):
            return self._ask(wait=True, group=group, counts=counts)

    def has_next(self) -> bool:
        return self._client.has_ready

    def _check_batches(self) -> None:
        """What was accumulated is dropped where a pass ends, and the others go on with theirs where it does not."""
        waiting = self._tracker.open_units[-1:] if self._tracker.has_waiting else ()
        if self._plan.staleness == 0 and waiting and waiting[0].index not in self._last_batch:
            raise ConfigurationError(
                "at staleness 0 an update over several batches needs a slice of each batch on every worker, and this "
                f"worker has none of the batch after {waiting[0]}: choose a batch size that gives a slice to each of "
                f"the {self._plan.num_slices} workers, and drop a last batch that does not (drop_last=True). If a "
                "worker was lost, restart the job; it resumes from its last checkpoint"
            )

    def _ask(self, wait: bool, group: str, counts: bool) -> Lease | None:
        while True:
            done = Done(self._groups.num_groups, self._num_updates(), self._tracker.has_waiting)
            try:
                return self._client.next(wait, group, counts, done)
            except StaleStoreError:  # no unit is leased before a ps has its initial values again
                self._attach()

    def _num_updates(self) -> int:
        """Of a unit, as far as this worker knows."""
        return self._tracker.steps_per_unit or len(self._groups.pushes)

    def share(self, lease: Lease) -> float:
        """Staleness 0: the part of its global batch that a lease is."""
        return lease.num_examples / sum(stop - start for start, stop in map(self._plan.bounds, lease.step_units))

    def holds(self, lease: Lease) -> bool:
        return self._client.holds(lease.unit)

    def begin(self, lease: Lease, batch: Any, following: Callable[[], Any]) -> None:
        if (end := self._runtime.dismissal()) is not None:
            for listener in self._listeners():
                listener.flush()
            self._groups.closes.deliver()
            raise end  # whoever is in the loop leaves it, and what this worker holds goes back
        if self._bounded:
            with self._meter.exposed("slower workers (staleness bound)", phase=measures.GATE_WAIT):
                self._clock, has_asked = self._client.start_step(self._clock, self._plan.staleness)
                if has_asked:  # else the weights of the last commit have what the bound asks for
                    self._pull()
        elif lease.refresh:
            with self._meter.exposed("weights of the step that was missed"):
                self._groups.refresh()
        for push in self._groups.pushes if self._tracker.has_returned else ():
            push.optimizer.zero_grad()  # the batches that are in it come again
        self._tracker.take(lease.unit)
        self._on_begin(lease, batch)

        def tensors_of_following() -> Sequence[torch.Tensor]:
            with self._meter.within(measures.DATA_WAIT):
                return [*tensors(following())]

        # Where there is a bound, rows are read when it has been waited for.
        is_free = self._plan.staleness == math.inf
        self._groups.reads.begin(lambda: [*tensors(batch)], tensors_of_following if is_free else None)
        self._is_counting, self._num_examples = True, lease.num_examples
        for listener in self._listeners():
            listener.begin_unit()
        self._meter.got_data()

    def done(self, lease: Lease) -> None:
        self._is_counting = False
        self._groups.reads.begin()
        for listener in self._listeners():
            if (counted := listener.collect()) is not None:
                topic, data = counted
                self._client.count(lease.unit, data, topic)
        self._accept(self._tracker.leave())
        if self._plan.staleness == 0 and self._tracker.num_idle:
            raise ConfigurationError(
                "at staleness 0 the other workers wait for every batch: call optimizer.step() before taking the next "
                "one (or backward() alone, to accumulate), after a backward() through the model. Where a slice has no "
                "loss, that of (model(torch.zeros_like(x)) * 0).sum() is one; if it should not count in the mean, call "
                "strategy.set_weight(0) before. To evaluate, iterate over the DataLoader itself, on the lead"
            )
        self._groups.check_alone()
        self._on_begin(None, None)
        self._clock += 1
        self._meter.step_done(lease.num_examples)
        self._meter.wants_data()

    def end_epoch(self) -> None:
        self.is_read = False
        self._meter.stop_clock()
        self._on_begin(None, None)
        if not self._is_skipped:
            self._groups.look_closely()
            self._pull()  # evaluation after the epoch sees every update of the epoch

    def leave(self) -> None:
        self.is_read = False
        # A unit that the script was working on goes back. If it had stepped, the next worker's update is recognised as
        # a duplicate, unless either is one of several: a part of an update alone cannot be made again.
        is_done = self._plan.staleness > 0 and not self._listeners() and self._tracker.has_all(self._num_updates())
        if is_done and self._is_counting:
            self._meter.step_done(self._num_examples)
        self._meter.stop_clock()
        self._on_begin(None, None)
        if is_done or self._tracker.accumulates or self._tracker.has_waiting:
            self._accept(self._tracker.leave(is_whole=is_done))
            # As at the end of a loop: .grad has what waits for the next update. A ps must not seem to lack it.
            if self._plan.staleness > 0 and (waiting := self._tracker.drop_waiting()):
                self._accept(waiting)
                with contextlib.suppress(StratagemError):
                    self._groups.closes.deliver()
        self._tracker.abandon()
        self._groups.reads.begin()
        if self._is_counting:
            self._is_counting = False
            for listener in self._listeners():
                listener.collect()
        with contextlib.suppress(StratagemError):  # a job that ends has nobody to tell
            self._client.leave()
