"""One pass that is the whole training: for parameter servers, whose chief counts the batches of a pass.

The chief sees to it that each batch of a pass is accepted exactly once, whatever dies, and that the pass ends for
everybody when the last one is. A pass of exactly as many batches as there are steps to make carries that over to
``max_steps``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from stratagem.cluster.units import Plan
from stratagem.data.distribute import leasable
from stratagem.data.index_batches import epoch_order
from stratagem.data.loaders import carried, plan_of
from stratagem.errors import ConfigurationError


class NumberedBatch(NamedTuple):
    """A batch, or a slice of one."""

    first: int
    """Place of its first example in the pass."""
    batch: Any


def repeated(source: Any, num_batches: int | None, start: int, seed: int) -> DataLoader[NumberedBatch]:
    """A loader that goes through the examples of ``source`` again and again, in another order each time if it shuffles.

    Every batch is full: one may hold the end of an epoch and the beginning of the next. With ``drop_last`` each epoch
    leaves out what does not fill a batch, and none does.

    Args:
        num_batches: of the pass; None: one epoch, whose last batch may be smaller.
        start: batches that were before it: the order goes on there.

    Raises:
        ConfigurationError: the batches of ``source`` cannot be leased; says why.
    """
    loader = leasable(source)
    plan = plan_of(loader, num_slices=1, staleness=float("inf"))
    kept = plan.num_batches * plan.batch_size if plan.drop_last else plan.num_examples
    if not kept:
        raise ConfigurationError("the input has no batch to train on")
    before = start * plan.batch_size
    if num_batches is None:
        examples = _Examples(loader.dataset, plan, seed, kept, kept * -(-before // kept), kept)
    else:
        examples = _Examples(loader.dataset, plan, seed, kept, before, num_batches * plan.batch_size)
    like = {**carried(loader, persistent=False), "collate_fn": functools.partial(_collate, loader.collate_fn)}
    return DataLoader(examples, batch_size=plan.batch_size, **like)


class _Examples(Dataset[Any]):
    """Examples by their place in the pass. ``kept``: examples of an epoch that are gone through; ``start``: examples
    before the pass, counted over all epochs."""

    def __init__(self, dataset: Any, plan: Plan, seed: int, kept: int, start: int, length: int) -> None:
        self._dataset = dataset
        self._plan = plan
        self._seed = seed
        self._kept = kept
        self._start = start
        self._length = length
        self._orders: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, places: list[int]) -> tuple[int, Any]:
        rows = [self._row(place) for place in places]
        if hasattr(self._dataset, "__getitems__"):
            return places[0], self._dataset.__getitems__(rows)
        return places[0], [self._dataset[row] for row in rows]

    def _row(self, place: int) -> int:
        epoch, position = divmod(self._start + place, self._kept)
        if epoch not in self._orders:
            if len(self._orders) > 1:
                del self._orders[min(self._orders)]
            order = epoch_order(self._plan.num_examples, self._plan.shuffle, self._seed, 1, epoch)
            self._orders[epoch] = order
        return int(self._orders[epoch][position])


def _collate(collate: Callable[[Any], Any], read: tuple[int, Any]) -> NumberedBatch:
    return NumberedBatch(read[0], collate(read[1]))
