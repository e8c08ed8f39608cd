"""From a source to this worker's parts, step by step: by index, by cutting, or as they come; and to the devices."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from stratagem.data.index_batches import IndexBatches
from stratagem.data.loaders import (
    Batches,
    DropWatch,
    NumPasses,
    carried,
    length_of,
    rebuild,
    seed_epoch,
    tell_epoch,
    tell_epoch_to_all,
)
from stratagem.data.nested import empty_like, fingerprint, is_example, num_examples, part_of, tensors, to_device
from stratagem.errors import ConfigurationError


def cut(num_examples: int, num_replicas: int) -> list[range]:
    """The rule of ``tf.distribute``: ceil(examples / replicas) each until they are used up, nothing for the rest."""
    each = -(-num_examples // num_replicas)
    starts = [min(replica * each, num_examples) for replica in range(num_replicas)]
    return [range(start, min(start + each, num_examples)) for start in starts]


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """How a worker turns a global batch that it knows into steps."""

    num_workers: int
    worker: int
    num_local_replicas: int
    alone: bool
    """The batch is this worker's alone (FILE, OFF): all its slices, one after the other; else its own slices."""

    @property
    def num_replicas(self) -> int:
        """Slices of a global batch."""
        return self.num_workers * self.num_local_replicas

    @property
    def steps_per_batch(self) -> int:
        return self.num_workers if self.alone else 1

    def steps(self, num_examples: int) -> list[list[range]]:
        """For each step and local replica: its examples within a global batch of ``num_examples``."""
        slices, size = cut(num_examples, self.num_replicas), self.num_local_replicas
        if self.alone:
            return [slices[first : first + size] for first in range(0, len(slices), size)]
        return [slices[self.worker * size : (self.worker + 1) * size]]


@dataclasses.dataclass(frozen=True)
class Totals:
    """A step over all workers."""

    num_examples: int
    num_empty: int
    """Replicas without examples."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """What the local replicas get in a step."""

    batches: tuple[Any, ...]
    """One for each; those without examples have size 0."""
    num_examples: tuple[int, ...]
    totals: Totals | None = None
    """Where every worker knows them without asking."""
    rows: Sequence[Any] = ()
    """Indices of the whole global batch, where the examples have some."""


class IndexReader:
    """Reads each replica's examples by their indices, each replica's as a batch of its own: any collate_fn will do."""

    def __init__(
        self, loader: DataLoader[Any], batches: IndexBatches, batch_split: BatchSplit, common: str = ""
    ) -> None:
        self.knows_totals = not batch_split.alone
        """Whether :class:`Parts` say their totals, and all workers have equally many of them."""
        self.common = common
        """What all workers that have read something must have in common, in short; empty: nothing."""
        self._batches = batches
        self._batch_split = batch_split
        self._sampler = Batches(iter(()))
        self._loader = rebuild(loader, self._sampler, persistent=True)
        self._drop_watch = DropWatch(loader)

    @property
    def num_steps(self) -> int | None:
        """Steps in an epoch, where that is known."""
        return self._batches.num_batches if self._batch_split.steps_per_batch == 1 else None

    def read(self, epoch: int, first: int, seed: int, batch_split: BatchSplit | None = None) -> Iterator[Parts]:
        """The steps of an epoch from number ``first`` on, whose examples are shared out as at first, or by
        ``batch_split``."""
        split = batch_split or self._batch_split
        batches = self._batches.of_epoch(epoch, first // split.steps_per_batch, seed)
        return self.read_batches(batches, epoch, first, seed, split)

    def read_batches(
        self, batches: Iterator[Sequence[Any]], epoch: int, first: int, seed: int, split: BatchSplit
    ) -> Iterator[Parts]:
        """The steps that come of these global batches, which are indices; of the first one those from ``first`` on."""
        reading: collections.deque[tuple[tuple[int, ...], Totals | None, Sequence[Any]]] = collections.deque()

        def index_lists() -> Iterator[list[Any]]:
            first_step = first % split.steps_per_batch
            for indices in batches:
                for step in split.steps(len(indices))[first_step:]:
                    totals = None
                    if self.knows_totals:
                        slices = cut(len(indices), split.num_replicas)
                        totals = Totals(len(indices), sum(not rows for rows in slices))
                    reading.append((tuple(map(len, step)), totals, indices))
                    for rows in step:
                        # A share of size 0 has the form of a batch: one example is read, and cut off again.
                        yield list(indices[rows.start : rows.stop] if rows else indices[:1])
                first_step = 0

        tell_epoch(self._loader.dataset, epoch)
        seed_epoch(self._loader, seed, self._batches.ordinal, epoch, first, split.worker)
        self._sampler.indices = index_lists()
        loaded = iter(self._loader)
        while parts := list(islice(loaded, split.num_local_replicas)):
            counts, totals, rows = reading.popleft()
            for part, count in zip(parts, counts, strict=True):
                self._drop_watch.look(part, count)
            shares = (part if count else empty_like(part) for part, count in zip(parts, counts, strict=True))
            yield Parts(tuple(shares), counts, totals, rows)


class StreamReader:
    """Cuts the global batches of an iterable into the replicas' parts. What all have in common: see
    :class:`IndexReader`; None: the first global batch of each epoch."""

    def __init__(self, source: Reopened | ItemBatches, batch_split: BatchSplit, common: str | None = "") -> None:
        self.knows_totals = False
        self.common = common or ""
        self._takes_fingerprint = common is None
        self._source = source
        self._batch_split = batch_split

    @property
    def num_steps(self) -> int | None:
        return self._source.num_batches() if self._batch_split.steps_per_batch == 1 else None

    def read(self, epoch: int, first: int, seed: int) -> Iterator[Parts]:
        first_batch, first_step = divmod(first, self._batch_split.steps_per_batch)
        takes_fingerprint = self._takes_fingerprint
        for batch in self._source.open(epoch, first_batch, seed):
            if self._batch_split.num_replicas > 1 and self._source.gives_items and is_example(batch):
                raise ConfigurationError(
                    "expected items of a DataLoader with batch_size=None to be whole batches, got one example (a "
                    "tensor beside single numbers), which would be cut along its features: give the DataLoader "
                    "batch_size=. If it is a batch, give distribute_dataset an iterable of batches, not a DataLoader"
                )
            steps = [
                Parts(tuple(part_of(batch, rows.start, rows.stop) for rows in step), tuple(map(len, step)))
                for step in self._batch_split.steps(num_examples(batch))[first_step:]
            ]
            if takes_fingerprint:  # of what can be cut
                self.common, takes_fingerprint = f"first batch {fingerprint(batch):08x}", False
            yield from steps
            first_step = 0


class PerReplicaReader:
    """Hands out batches of single replicas, one replica after the other, as they come."""

    common = ""
    knows_totals = False

    def __init__(self, source: Iterable[Any], num_local_replicas: int, worker: int) -> None:
        self._source = Reopened(source, worker)
        self._num_local_replicas = num_local_replicas

    @property
    def num_steps(self) -> int | None:
        num_batches = self._source.num_batches()
        return None if num_batches is None else -(-num_batches // self._num_local_replicas)

    def read(self, epoch: int, first: int, seed: int) -> Iterator[Parts]:
        size = self._num_local_replicas
        source = self._source.open(epoch, first * size, seed)
        while batches := list(islice(source, size)):
            missing = size - len(batches)
            counts = (*map(num_examples, batches), *[0] * missing)
            yield Parts((*batches, *(empty_like(batches[0]) for _ in range(missing))), counts)


Reader = IndexReader | StreamReader | PerReplicaReader


class Reopened:
    """An iterable that is gone through once an epoch, an iterator in one epoch alone. What was before the first wanted
    batch is read and dropped."""

    def __init__(self, source: Iterable[Any], worker: int = 0) -> None:
        self._source = source
        self._worker = worker
        """Whose numbers a loader's processes draw; 0 where all draw the same."""
        self._passes = NumPasses(source)
        self.gives_items = isinstance(source, DataLoader) and source.batch_sampler is None
        """Whether its batches are what the dataset has: none is made here of examples."""

    def num_batches(self) -> int | None:
        return length_of(self._source)

    def open(self, epoch: int, first: int, seed: int) -> Iterator[Any]:
        """The batches of an epoch from number ``first`` on."""
        self._passes.begin()
        tell_epoch_to_all(self._source, epoch)
        if not isinstance(self._source, DataLoader):
            return islice(iter(self._source), first, None)
        if hasattr(self._source.dataset, "set_epoch"):
            # Processes that stay (persistent_workers) have copies of the dataset, which would be told no epoch.
            self._source._iterator = None
        given = self._source.generator, getattr(self._source, "in_order", True)
        seed_epoch(self._source, seed, epoch, self._worker)
        self._source.in_order = True  # positions, and workers that share a batch, go by the order
        try:
            return islice(iter(self._source), first, None)
        finally:
            self._source.generator, self._source.in_order = given


class ItemBatches:
    """A map-style dataset whose items are global batches: a DataLoader with ``batch_size=None``. ``indices``: which
    items, as batches of one index; with a BatchSampler in the place of the sampler, an item is what the dataset has for
    the whole list."""

    gives_items = True

    def __init__(self, loader: DataLoader[Any], indices: IndexBatches) -> None:
        self._indices = indices
        self._takes_lists = isinstance(loader.sampler, BatchSampler)
        self._sampler = Batches(iter(()))
        arguments = carried(loader, persistent=True)
        self._loader = DataLoader(loader.dataset, batch_size=None, sampler=self._sampler, **arguments)

    def num_batches(self) -> int | None:
        return self._indices.num_batches

    def open(self, epoch: int, first: int, seed: int) -> Iterator[Any]:
        tell_epoch(self._loader.dataset, epoch)
        seed_epoch(self._loader, seed, epoch, first)
        batches = self._indices.of_epoch(epoch, first, seed)
        self._sampler.indices = batches if self._takes_lists else map(_single, batches)
        return iter(self._loader)


def _single(indices: Sequence[Any]) -> Any:
    if len(indices) != 1:
        raise ConfigurationError(
            f"expected one index at a time from the sampler of a DataLoader with batch_size=None, got {len(indices)}: "
            "give sampler=BatchSampler(sampler, batch_size, drop_last), whose lists the dataset gets whole"
        )
    return indices[0]


Arrivals = dict[torch.device, torch.cuda.Event]
"""The end of the copies of a step, by GPU."""


class DeviceCopies:
    """Reads steps ahead (0: each is read and copied when it is wanted) and starts their copies to the devices of the
    local replicas. GPUs copy on a stream of their own, beside what they compute; that the host goes on meanwhile needs
    ``DataLoader(pin_memory=True)``."""

    def __init__(self, devices: Sequence[torch.device], ahead: int) -> None:
        self.ahead = ahead
        self._devices = tuple(devices)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        if ahead:
            self._streams = {device: torch.cuda.Stream(device) for device in devices if device.type == "cuda"}

    def of(self, steps: Iterator[Parts]) -> Iterator[Parts]:
        """The same steps, on the devices."""
        under_way: collections.deque[tuple[Parts, Arrivals]] = collections.deque()
        for parts in steps:
            under_way.append(self._send(parts))
            if len(under_way) > self.ahead:
                yield self._receive(*under_way.popleft())
        while under_way:
            yield self._receive(*under_way.popleft())

    def _send(self, parts: Parts) -> tuple[Parts, Arrivals]:
        batches: list[Any] = []
        arrivals: Arrivals = {}
        for batch, device in zip(parts.batches, self._devices, strict=True):
            stream = self._streams.get(device)
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                batches.append(to_device(batch, device))
            if stream is not None:
                arrivals[device] = stream.record_event()
        return dataclasses.replace(parts, batches=tuple(batches)), arrivals

    def _receive(self, parts: Parts, arrivals: Arrivals) -> Parts:
        for device, arrival in arrivals.items():
            torch.cuda.current_stream(device).wait_event(arrival)
        for batch, device in zip(parts.batches, self._devices, strict=True):
            for tensor in tensors(batch) if device in self._streams else ():
                # The memory, which belongs to the copying stream, is not reused before this one is done with it.
                tensor.record_stream(torch.cuda.current_stream(device))
        return parts
