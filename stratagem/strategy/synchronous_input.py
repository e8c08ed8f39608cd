"""The datasets of strategies whose replicas run in step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from stratagem.arguments import checked
from stratagem.cluster.units import Plan
from stratagem.data.distribute import distribute, distribute_from_function
from stratagem.data.options import DistributeOptions, InputContext
from stratagem.data.placement import InputPlacement
from stratagem.data.split_dataset import SplitDataset
from stratagem.strategy.base import Strategy
from stratagem.strategy.newcomers import Newcomers
from stratagem.strategy.replicas.local_replicas import LocalReplicas
from stratagem.strategy.step_listener import StepListener
from stratagem.strategy.step_shares import StepShares
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.step_meter import StepMeter


class SynchronousInput(Strategy):
    """Cuts each batch into shares of the replicas of all workers."""

    _local: LocalReplicas
    _meter: StepMeter
    _num_datasets: int
    _seed: int
    _shares: StepShares
    _membership_callbacks: list[Callable[[int, int], None]]
    _num_told: int
    """What ``num_replicas_in_sync`` was when the callbacks were made, or called."""
    _newcomers: Newcomers | None = None
    """How others come into a ring that heals; None: nobody does."""

    @checked
    def on_membership_change(self, callback: Callable[[int, int], None]) -> None:
        self._membership_callbacks.append(callback)

    def _look_at_members(self) -> None:
        """A step begins, of a number that all workers know."""
        before, self._num_told = self._num_told, self._num_sharing()
        if self._num_told != before:
            for callback in self._membership_callbacks:
                callback(before, self._num_told)

    def _num_sharing(self) -> int:
        """Replicas that have a share of the step that is run: after a loss more than are left, to its end."""
        if self.communicator is None or self.communicator.healing is None:
            return self.num_replicas_in_sync
        return len(self._local.devices) * len(self.communicator.healing.placement(self.communicator.step).members)

    def distribute_dataset(
        self,
        source: DataLoader[Any] | Dataset[Any] | Iterable[Any],
        *,
        batch_size: int | None = None,
        options: DistributeOptions | None = None,
    ) -> SplitDataset:
        self._num_datasets += 1
        listener = self._listener(self._num_datasets)
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
            listener=self._listener(self._num_datasets),
        )

    def _placement(self, ordinal: int) -> InputPlacement:
        seed = functools.partial(self._seed_of_dataset, ordinal)
        if self.communicator is None:
            return InputPlacement(self._local.devices, seed=seed)
        rank, size = self.communicator.rank, self.communicator.size
        return InputPlacement(self._local.devices, size, rank, self.communicator, seed)

    def _listener(self, ordinal: int) -> StepListener:
        communicators = self._communicators()
        return StepListener(self._shares, self._meter, communicators, self._begin_step, self._newcomers, ordinal)

    def _communicators(self) -> list[Communicator]:
        """Those of the local replicas, and that with the other workers, each once."""
        every = [*self._local.communicators, *([] if self.communicator is None else [self.communicator])]
        return list({id(each): each for each in every}.values())

    def _begin_step(self, batch: Any) -> None:
        if self._newcomers is not None:
            self._newcomers.has_stepped = False
        self._look_at_members()
        self._placed(batch)

    def _placed(self, batch: Any) -> None:
        """Sees each batch of a dataset once it is on the devices."""

    def _report(self, ordinal: int, dataset: SplitDataset) -> Callable[[int, Sequence[int]], None] | None:
        """Tells who keeps books of the steps of a dataset; None: nobody does."""
        return None

    def _seed_of_dataset(self, ordinal: int, plan: Plan | None) -> int:
        """Seed of the order of a dataset, the same on every worker."""
        return self._seed
