"""The global batches of a map-style dataset, as indices: the same on every worker (docs/protocol.md 27)."""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from stratagem.cluster.units import Plan
from stratagem.data.loaders import NumPasses, check_length, length_of, tell_epoch
from stratagem.errors import ConfigurationError
from stratagem.worker.ring.agreement import broadcast_json, broadcast_tensors
from stratagem.worker.ring.communicator import Communicator


def epoch_order(num_examples: int, shuffle: bool, seed: int, dataset: int, epoch: int) -> torch.Tensor:
    """Indices of the examples in the order of one epoch, shape [num_examples], int64; the same on every worker. With
    ``shuffle`` a permutation seeded by (seed, dataset, epoch), else 0, 1, 2, …"""
    if not shuffle:
        return torch.arange(num_examples)
    return torch.randperm(num_examples, generator=torch.Generator().manual_seed(_seed_of(f"{seed}/{dataset}/{epoch}")))


def _seed_of(words: str) -> int:
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little", signed=True)


@dataclasses.dataclass(eq=False, repr=False)
class PlannedBatches:
    """Batches that follow from a plan: nothing has to be drawn or sent."""

    _plan: Plan
    """Its seed does not matter."""
    ordinal: int
    """Of the dataset whose order this is; a position that is restored brings its own."""
    _shift: int
    """Added to the seed, for an order of this worker's own."""
    _loader: DataLoader[Any]
    """Knows how many examples there are now."""

    @property
    def num_batches(self) -> int | None:
        """Global batches in an epoch, where that is known."""
        return self._plan.num_batches

    def of_epoch(self, epoch: int, first: int, seed: int) -> Iterator[Sequence[Any]]:
        """The batches of an epoch from number ``first`` on."""
        plan = self._plan
        check_length(self._loader, plan.num_examples)
        order = epoch_order(plan.num_examples, plan.shuffle, seed + self._shift, self.ordinal, epoch)
        for start in range(first * plan.batch_size, plan.num_batches * plan.batch_size, plan.batch_size):
            yield order[start : start + plan.batch_size].tolist()


@dataclasses.dataclass(eq=False, repr=False)
class DrawnBatches:
    """What a sampler of the user's says.

    One that has a length is drawn as a whole when an epoch starts, by worker 0 for all; one without, as it is read.
    Torch's random numbers are seeded for it by (seed, dataset, epoch): a resumed job draws the same.
    """

    _sampler: Iterable[Any]
    """Gives indices, or lists of them."""
    _is_of_batches: bool
    """Whether what it gives are batches, of indices in whatever can be gone through, arrays of numpy say."""
    ordinal: int
    _shift: int
    """As of :class:`PlannedBatches`."""
    _communicator: Communicator | None
    """Among the workers that have to draw the same; None: this one alone."""

    def __post_init__(self) -> None:
        if self._communicator is not None and self.num_batches is None:
            raise ConfigurationError(
                f"worker 0 draws all indices of an epoch for all workers, but {type(self._sampler).__name__} does not "
                "say how many there are: give it a __len__, or use distribute_datasets_from_function"
            )
        self._passes = NumPasses(self._sampler)

    @property
    def num_batches(self) -> int | None:
        return length_of(self._sampler)

    def of_epoch(self, epoch: int, first: int, seed: int) -> Iterator[Sequence[Any]]:
        self._passes.begin()
        for target in (self._sampler, getattr(self._sampler, "sampler", None)):
            tell_epoch(target, epoch)
        if self.num_batches is None:
            batches: Iterable[Any] = self._one_by_one(epoch, seed)
        elif self._communicator is None:
            batches = self._draw(epoch, seed)
        else:
            batches = self._shared(self._communicator, epoch, seed)
        return map(self._some, islice(batches, first, None))

    def _some(self, batch: Any) -> list[Any]:
        if indices := self._as_list(batch):
            return indices
        raise ConfigurationError(
            f"expected at least one index in each batch, got an empty list from {type(self._sampler).__name__}: "
            "leave it out"
        )

    def _seeded(self, epoch: int, seed: int) -> _Seeded:
        return _Seeded(_seed_of(f"{seed + self._shift}/{self.ordinal}/{epoch}/sampler"), self._sampler)

    def _draw(self, epoch: int, seed: int) -> list[list[Any]]:
        with self._seeded(epoch, seed):
            return [self._as_list(batch) for batch in self._sampler]

    def _one_by_one(self, epoch: int, seed: int) -> Iterator[Any]:
        """Of a sampler that may have no end."""
        end = object()
        with (seeded := self._seeded(epoch, seed)):
            drawn = iter(self._sampler)
        while True:
            with seeded:
                batch = next(drawn, end)
            if batch is end:
                return
            yield batch

    def _shared(self, communicator: Communicator, epoch: int, seed: int) -> list[list[int]]:
        """Worker 0's batches, on every worker."""
        drawn: dict[str, torch.Tensor] = {}
        failure: Exception | None = None
        if communicator.rank == 0:
            try:
                drawn = self._packed(self._draw(epoch, seed))
            except Exception as error:
                failure = error
        reason = broadcast_json(communicator, None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if reason is not None:
            name = type(self._sampler).__name__
            raise ConfigurationError(f"worker 0 draws the indices of {name} for all workers; there it failed: {reason}")
        drawn = broadcast_tensors(communicator, drawn)
        return [part.tolist() for part in drawn["indices"].split(drawn["sizes"].tolist())]

    def _packed(self, batches: list[list[Any]]) -> dict[str, torch.Tensor]:
        try:
            indices = [operator.index(index) for batch in batches for index in batch]
        except TypeError as error:
            raise ConfigurationError(
                f"expected indices that are whole numbers from {type(self._sampler).__name__} ({error}); several "
                "workers cannot share others"
            ) from None
        sizes = [len(batch) for batch in batches]
        return {
            "sizes": torch.tensor(sizes, dtype=torch.int64),
            "indices": torch.tensor(indices, dtype=torch.int64),
        }

    def _as_list(self, batch: Any) -> list[Any]:
        if isinstance(batch, torch.Tensor):
            return batch.reshape(-1).tolist()
        return list(batch) if self._is_of_batches or isinstance(batch, list | tuple | range) else [batch]


IndexBatches = PlannedBatches | DrawnBatches


class _Seeded:
    """Inside, torch's global CPU generator and those of a sampler go on in a stream of their own, which ``seed`` began;
    outside they are where they were."""

    def __init__(self, seed: int, sampler: Any) -> None:
        found = [getattr(sampler, "generator", None), getattr(getattr(sampler, "sampler", None), "generator", None)]
        self._every = [torch.default_generator, *(each for each in found if isinstance(each, torch.Generator))]
        self._states = [torch.Generator(each.device).manual_seed(seed).get_state() for each in self._every]

    def __enter__(self) -> None:
        others = [generator.get_state() for generator in self._every]
        for generator, state in zip(self._every, self._states, strict=True):
            generator.set_state(state)
        self._states = others

    def __exit__(self, *_: object) -> None:
        self.__enter__()
