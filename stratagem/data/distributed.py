"""Distributed datasets: an ordinary iterable whose batches come from leased units."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from stratagem.cluster.units import Lease, Plan
from stratagem.data.index_batches import epoch_order
from stratagem.data.loaders import Batches, DropWatch, check_length, length_of, rebuild, seed_epoch, tell_epoch
from stratagem.data.nested import empty_like, to_device, warn_of_left_examples
from stratagem.errors import ConfigurationError
from stratagem.tensorflow_names import WithWaysOut


class UnitSource(Protocol):
    """Where the units of one dataset come from, and who is told what became of them."""

    def start_epoch(self, epoch: int, stop: int) -> None:
        """A pass over the dataset begins, or goes on; its units before ``stop`` are meant."""

    def next(self, wait: bool) -> Lease | None:
        """The next unit; None when all are accepted that are meant, or (no ``wait``) there is none right now."""

    def has_next(self) -> bool:
        """Whether :meth:`next` gives one without asking anybody."""

    def holds(self, lease: Lease) -> bool:
        """Whether the unit is still leased here."""

    def begin(self, lease: Lease, batch: Any, following: Callable[[], Any]) -> None:
        """The script is about to get ``batch``, which holds the examples of the unit. ``following``: see
        :meth:`Ahead.following`."""

    def done(self, lease: Lease) -> None:
        """The script asked for the batch after it."""

    def end_epoch(self) -> None:
        """All units that are meant are accepted."""

    def leave(self) -> None:
        """The script left its loop."""


class DistributedIterator(WithWaysOut, Iterator[Any]):
    """Gives the batches of this task, one a step. Given up, it leaves the pass, as a loop does that ends early."""

    def __init__(self, batches: Generator[Any]) -> None:
        self._batches = batches
        self._error = ""
        self.close = batches.close

    def __next__(self) -> Any:
        if error := self._error:  # the end of a generator that failed looks like that of the pass
            self._error = ""
            raise ConfigurationError(
                f"this pass was ended by {error}. Its other batches cannot be had: where an example may be bad, let "
                "the dataset leave it out, or give another in its place"
            )
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
            raise

    def get_next(self) -> Any:
        """TensorFlow's name for ``next()``; there are no more where it raises StopIteration."""
        return next(self)


class Ahead(Iterator[Any]):
    """Batches, the next of which may be looked at before its turn. ``has_more``: whether it need not be waited for."""

    def __init__(self, batches: Iterator[Any], has_more: Callable[[], bool]) -> None:
        self._batches = batches
        self._has_more = has_more
        self._read: list[Any] = []
        self._error: Exception | None = None

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._read.pop() if self._read else next(self._batches)

    def following(self) -> Any:
        """The batch after the last one given; None: it is not here yet."""
        if not self._read and self._error is None and self._has_more():
            try:
                self._read.append(next(self._batches))
            except Exception as error:  # of the script's data: it comes when it is its turn
                self._error = error
        return self._read[0] if self._read else None


@dataclasses.dataclass(eq=False, repr=False)
class DistributedDataset(WithWaysOut):
    """Batches of this task, of the user's loader of global batches. Each ``iter()`` is the next epoch."""

    loader: DataLoader[Any]
    """Of all batches, as it was given."""
    plan: Plan
    ordinal: int
    """Of the order of shuffled examples, from 1."""
    _source: UnitSource
    _device: torch.device

    def __post_init__(self) -> None:
        self._drop_watch = DropWatch(self.loader, weighs=self.plan.num_slices > 1)
        self._planned = length_of(self.loader.sampler)
        self._epoch = 0
        self._order = -1, torch.empty(0)
        self._current: object | None = None
        """Whoever goes through units now, or did and left."""

    @property
    def epoch(self) -> int:
        """Passes completed, or left, by this worker."""
        return self._epoch - (self._current is not None)

    def reorder(self, ordinal: int) -> None:
        """Takes the order of examples of the dataset with this ordinal."""
        self.ordinal = ordinal

    def begin_at(self, epoch: int) -> None:
        """Leaves the passes before ``epoch`` out, unless one has begun: a job before this one has completed them. What
        was done of a pass that was under way is the chief's to know, which does where it goes on from a checkpoint."""
        if not self._epoch:
            self._epoch = epoch

    def __len__(self) -> int:
        """Global batches in an epoch."""
        return self.plan.num_batches

    def first_example(self) -> Any:
        """A batch of the first example, for a worker that has got none and has to know what they look like."""
        source, collate = self.loader.dataset, self.loader.collate_fn
        loader = DataLoader(source, batch_sampler=[[0]], collate_fn=collate, generator=torch.Generator())
        return to_device(next(iter(loader)), self._device)

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._pass_over())

    def _pass_over(self) -> Generator[Any]:
        yield from self._until(self._epoch, self.plan.num_batches)

    def parts(self, num_batches: int) -> Iterator[Iterator[Any]]:
        """The data in parts of so many global batches of the job, whoever takes them; each may be a piece of a pass or
        several passes. Gives the batches of this task, part by part, without end; a part is over when all of it is
        accepted."""
        first = self._epoch
        for start in itertools.count(0, num_batches):
            yield self._part(first, start, start + num_batches)

    def _part(self, first: int, start: int, stop: int) -> Iterator[Any]:
        """Batches ``start`` … ``stop - 1`` since the beginning of the pass ``first``."""
        in_pass = self.plan.num_batches
        while start < stop and in_pass:
            epoch, begin = divmod(start, in_pass)
            end = min(in_pass, begin + stop - start)
            yield from self._until(first + epoch, end)
            start += end - begin

    def _until(self, epoch: int, stop: int) -> Iterator[Any]:
        """What is left of the global batches before ``stop`` of one pass."""
        if self._current is not None:
            self._source.leave()
        this = self._current = object()
        plan = self.plan
        self._epoch = epoch + 1
        tell_epoch(self.loader.dataset, epoch)
        check_length(self.loader, self._planned)
        self._source.start_epoch(epoch, plan.units_of(stop - 1).stop if stop else 0)
        try:
            # A unit that a lost worker gave back may come after all others: then there is another loader.
            while (first := self._source.next(wait=True)) is not None:
                if self._order[0] != epoch:
                    self._order = epoch, epoch_order(plan.num_examples, plan.shuffle, plan.seed, self.ordinal, epoch)
                for batch in self._loaded(first, self._order[1]):
                    yield batch
                    if self._current is not this:
                        raise ConfigurationError(
                            "a newer iter() of this distributed dataset continues with another pass"
                        )
            self._current = None
            self._source.end_epoch()
        except SystemExit:  # this process is to end: its goodbye gives everything back, and no chief may be there now
            self._current = object()
            raise
        finally:
            # An iterator that a script holds to its end is closed after the goodbye, when libraries are gone.
            if self._current is this and not sys.is_finalizing():
                self._current = None
                self._source.leave()

    def _loaded(self, first: Lease, order: torch.Tensor) -> Iterator[Any]:
        reading: collections.deque[Lease] = collections.deque()

        def indices() -> Iterator[list[int]]:
            lease: Lease | None = first
            while lease is not None:
                reading.append(lease)
                start, stop = self.plan.bounds(lease.unit.index)
                # A share of size 0 has the form of a batch: one example is read, and cut off again.
                yield order[start : stop if lease.num_examples else start + 1].tolist()
                lease = self._source.next(wait=False)

        loader = rebuild(self.loader, Batches(indices()))
        seed_epoch(loader, self.plan.seed, self.ordinal, first.unit.epoch, first.unit.index)
        batches = Ahead(iter(loader), self._source.has_next)
        for batch in batches:
            lease = reading.popleft()
            if not self._source.holds(lease):
                continue
            self._drop_watch.look(batch, lease.num_examples)
            if not lease.num_examples:
                batch = empty_like(batch)
                warn_of_left_examples(batch)
            batch = to_device(batch, self._device)
            self._source.begin(lease, batch, batches.following)
            yield batch
            self._source.done(lease)
