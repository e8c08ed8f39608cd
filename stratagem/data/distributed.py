"""Distributed datasets: an ordinary iterable whose batches come from units on loan."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from stratagem.cluster.units import Plan
from stratagem.data.loaders import Batches, rebuild, seed_epoch
from stratagem.data.nested import empty_like, to_device
from stratagem.data.order import epoch_order
from stratagem.worker.leases import Grant


class UnitSource(Protocol):
    """Where the units of one dataset come from, and who is told what became of them."""

    def start_epoch(self, epoch: int) -> None:
        """A pass over the dataset begins."""

    def next(self, wait: bool) -> Grant | None:
        """The next unit; None when the epoch is over, or (without ``wait``) when there is none right now."""

    def holds(self, grant: Grant) -> bool:
        """Whether the unit is still on loan here."""

    def begin(self, grant: Grant, batch: Any) -> None:
        """The script is about to get ``batch``, which holds the examples of the unit."""

    def done(self, grant: Grant) -> None:
        """The script asked for the batch after it."""

    def end_epoch(self, complete: bool) -> None:
        """The pass is over; not ``complete``: the script left its loop."""


class DistributedDataset:
    """Batches of this task. Each ``iter()`` is the next epoch.

    Args:
        loader: the user's loader of global batches.
        plan: how its epochs are cut into units.
        ordinal: ordinal of the dataset in the script, starting at 1.
        source: where the units come from.
        device: where the batches go.
    """

    def __init__(
        self, loader: DataLoader[Any], plan: Plan, ordinal: int, source: UnitSource, device: torch.device
    ) -> None:
        self.plan = plan
        self.loader = loader
        """Of all batches, as it was given."""
        self._ordinal = ordinal
        self._source = source
        self._device = device
        self._epoch = 0

    def __len__(self) -> int:
        """Global batches in an epoch."""
        return self.plan.num_batches

    def first_example(self) -> Any:
        """A batch of the first example, for a worker that has got none and has to know what they look like."""
        source, collate = self.loader.dataset, self.loader.collate_fn
        loader = DataLoader(source, batch_sampler=[[0]], collate_fn=collate, generator=torch.Generator())
        return to_device(next(iter(loader)), self._device)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epoch
        self._epoch += 1
        plan = self.plan
        order = epoch_order(plan.num_examples, plan.shuffle, plan.seed, self._ordinal, epoch)
        self._source.start_epoch(epoch)
        complete = False
        try:
            # A unit that a lost worker gave back may come after all others: then there is another pass.
            while (first := self._source.next(wait=True)) is not None:
                yield from self._pass(first, order)
            complete = True
        finally:
            self._source.end_epoch(complete)

    def _pass(self, first: Grant, order: torch.Tensor) -> Iterator[Any]:
        reading: collections.deque[Grant] = collections.deque()

        def indices() -> Iterator[list[int]]:
            grant: Grant | None = first
            while grant is not None:
                reading.append(grant)
                start, stop = self.plan.bounds(grant.unit.index)
                # A share of size 0 has the form of a batch: one example is read, and cut off again.
                yield order[start : stop if grant.num_examples else start + 1].tolist()
                grant = self._source.next(wait=False)

        loader = rebuild(self.loader, Batches(indices()))
        seed_epoch(loader, self.plan.seed, self._ordinal, first.unit.epoch, first.unit.index)
        for batch in loader:
            grant = reading.popleft()
            if not self._source.holds(grant):
                continue
            batch = to_device(batch if grant.num_examples else empty_like(batch), self._device)
            self._source.begin(grant, batch)
            yield batch
            self._source.done(grant)
