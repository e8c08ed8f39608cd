"""The datasets of strategies whose replicas run in step, and the work at their steps."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stratagem.arguments import checked
from stratagem.cluster.sources import seed_of_job
from stratagem.cluster.units import Plan
from stratagem.data.distribute import distribute, distribute_from_function, warn_of_own_batches
from stratagem.data.options import DistributeOptions, InputContext
from stratagem.data.placement import InputPlacement, Listener, StepShare
from stratagem.data.split_dataset import SplitDataset
from stratagem.data.values import ValueContext
from stratagem.errors import PeerUnavailableError, StratagemError
from stratagem.strategy.base import Strategy
from stratagem.strategy.newcomers import Newcomers
from stratagem.strategy.replicas.local_replicas import LocalReplicas
from stratagem.strategy.step_shares import StepShares
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.step_meter import StepMeter

REPORT_S = 1.0
"""Seconds between two reports of finished steps."""
REPORT_SHARE = 0.1
"""Of the time a step listener spends at most with reports that are not answered."""


class SynchronousInput(Strategy):
    """Splits each batch into shares for the replicas of all workers."""

    _local: LocalReplicas
    _meter: StepMeter
    _num_datasets: int
    _seed: int | None
    """None: the job's."""
    _shares: StepShares
    _membership_callbacks: list[Callable[[int, int], None]]
    _drawn_in: threading.Thread | None = None
    """The thread that took the newest batch; None: there was none."""
    _may_forget = True
    """The script may have forgotten to distribute its dataset, and nobody has said so."""
    _newcomers: Newcomers | None = None
    """How newcomers join a healing ring; None: none do."""

    @checked
    def on_membership_change(self, callback: Callable[[int, int], None]) -> None:
        self._membership_callbacks.append(callback)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        self._may_forget = False
        return super().distribute_values_from_function(value_fn)

    def _made_own_step(self) -> None:
        """A step without a batch of a distributed dataset."""
        num_workers = 1 if self.communicator is None else self.communicator.told_size
        if self._may_forget and self.num_replicas_in_sync > 1 and not self._num_datasets and self.is_lead:
            in_process = f"{self.num_replicas_in_sync} replicas"
            warn_of_own_batches(f"{num_workers} workers" if num_workers > 1 else in_process)
        self._may_forget = False

    def _look_at_members(self) -> None:
        """A step begins, of a number that all workers know."""
        before, now = self._shares.num_told, self._num_sharing()
        self._shares.num_told = now
        if now != before:
            for callback in self._membership_callbacks:
                callback(before, now)

    def _num_sharing(self) -> int:
        """Replicas that have a share of the step that is run: after a loss more than are left, to its end."""
        if self.communicator is None or self.communicator.healing is None:
            return self.num_replicas_in_sync
        return len(self._local.devices) * len(self.communicator.healing.placement(self.communicator.step).members)

    def _distribute(self, source: Any, batch_size: int | None, options: DistributeOptions | None) -> SplitDataset:
        self._num_datasets += 1
        listener = StepListener(self, self._num_datasets)
        dataset = distribute(
            source,
            placement=self._placement(self._num_datasets),
            ordinal=self._num_datasets,
            batch_size=batch_size,
            options=options,
            listener=listener,
        )
        listener.report = self._report(self._num_datasets, dataset)
        if self._newcomers is not None:
            self._newcomers.datasets[self._num_datasets] = dataset
        return dataset

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]], options: DistributeOptions | None = None
    ) -> SplitDataset:
        self._num_datasets += 1
        return distribute_from_function(
            dataset_fn,
            placement=self._placement(self._num_datasets),
            options=options,
            listener=StepListener(self, self._num_datasets),
        )

    def _placement(self, ordinal: int) -> InputPlacement:
        seed = functools.partial(self._seed_of_dataset, ordinal)
        if self.communicator is None:
            return InputPlacement(self._local.devices, seed=seed)
        rank, size = self.communicator.rank, self.communicator.size
        return InputPlacement(self._local.devices, size, rank, self.communicator, seed)

    def _communicators(self) -> list[Communicator]:
        """Those of the local replicas, and that with the other workers, each once."""
        every = [*self._local.communicators, *([] if self.communicator is None else [self.communicator])]
        return list({id(each): each for each in every}.values())

    def _placed(self, batch: Any) -> None:
        """Sees each batch of a dataset once it is on the devices."""

    def _report(self, ordinal: int, dataset: SplitDataset) -> Callable[[int, Sequence[int]], None] | None:
        """Tells who keeps books of the steps of a dataset; None: nobody does."""
        return None

    def _seed_of_dataset(self, ordinal: int, plan: Plan | None) -> int:
        """Seed of the order of a dataset, the same on every worker. Without a plan there is none of the job."""
        if self._seed is None:
            return 0 if plan is None else seed_of_job(os.environ)
        return self._seed


class StepListener(Listener):
    """Tells the shares of each batch of a strategy's dataset, counts steps, and numbers the collectives by them."""

    def __init__(self, strategy: SynchronousInput, ordinal: int) -> None:
        self._strategy = strategy
        self._ordinal = ordinal
        self._communicators = strategy._communicators()
        self.report: Callable[[int, Sequence[int]], None] | None = None
        """Tells who keeps books of an epoch's finished steps; None: nobody does. Raises ``PeerUnavailableError`` where
        that cannot be had now, after a second or so."""
        self._epoch = 0
        self._begun: StepShare | None = None
        self._finished: dict[int, list[int]] = {}
        """Steps of each epoch that nobody has been told of."""
        self._report_at = 0.0

    def arrive(self) -> None:
        if self._strategy._newcomers is not None:
            self._strategy._newcomers.arrive(self._ordinal)

    def between_steps(self, is_last: bool) -> None:
        if self._strategy._newcomers is not None:
            self._strategy._newcomers.between_steps(self._ordinal, is_last)

    def start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._strategy._meter.epoch = epoch
        self._strategy._meter.start_clock()

    def begin(self, share: StepShare, batch: Any) -> None:
        self._begun = share
        for communicator in self._communicators:
            communicator.step += 1
        self._strategy._drawn_in = threading.current_thread()
        if self._strategy._newcomers is not None:
            self._strategy._newcomers.has_stepped = False
        self._strategy._look_at_members()
        self._strategy._placed(batch)
        self._strategy._shares.begin(share, batch)
        self._strategy._meter.got_data()

    def done(self, share: StepShare) -> None:
        self._begun = None
        self._strategy._meter.step_done(sum(share.num_examples))
        self._strategy._meter.wants_data()
        if self.report is not None:
            self._finished.setdefault(self._epoch, []).append(share.step)
            if time.monotonic() > self._report_at:
                self._tell(self.report)

    def end_epoch(self, complete: bool) -> None:
        begun, self._begun = self._begun, None
        if begun is not None and self._strategy._meter.has_stepped:  # the script has left its loop after that step
            self.done(begun)
        self._strategy._meter.stop_clock()
        if complete:
            self._strategy._shares.end()
        if self.report is not None:
            self._tell(self.report)

    def _tell(self, report: Callable[[int, Sequence[int]], None]) -> None:
        """The chief keeps books; training goes on without it, and tells it later."""
        began = time.monotonic()
        for epoch, steps in list(self._finished.items()):
            try:
                report(epoch, steps)
            except PeerUnavailableError:
                break
            except StratagemError:
                pass  # it does not want them, or the job is over
            del self._finished[epoch]
        now = time.monotonic()
        self._report_at = now + max(REPORT_S, (now - began) / REPORT_SHARE)
