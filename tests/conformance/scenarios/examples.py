"""Data whose examples are numbers, and what a strategy hands out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import stratagem as sg
from stratagem.data.nested import tensors

Steps = list[list[list[int]]]
"""For each step and local replica: its examples."""


class Numbers(Dataset[int]):
    """0, 1, 2, … by index."""

    def __init__(self, num_examples: int) -> None:
        self.num_examples = num_examples
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


class Stream(IterableDataset[int]):
    """0, 1, 2, … with no numbers to ask for."""

    def __init__(self, num_examples: int) -> None:
        self.num_examples = num_examples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_examples))


def numbers(num_examples: int, batch_size: int, **arguments: Any) -> DataLoader[int]:
    """A loader of global batches of 0, 1, 2, …"""
    return DataLoader(Numbers(num_examples), batch_size=batch_size, **arguments)


def lists(num_examples: int, batch_size: int) -> list[torch.Tensor]:
    """Global batches of 0, 1, 2, … as they are."""
    return list(torch.arange(num_examples).split(batch_size))


class Reader:
    """Goes through datasets as a script does: under parameter servers each batch needs a step.

    Args:
        strategy: whose datasets they are.
    """

    def __init__(self, strategy: sg.Strategy) -> None:
        self._strategy = strategy
        self._step: Callable[[Any], None] | None = None
        if isinstance(strategy, sg.ParameterServerStrategy):
            probe = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(probe.parameters(), 0.1)
            strategy.prepare(probe, optimizer)

            def step(batch: Any) -> None:
                optimizer.zero_grad()
                probe(torch.ones(1, 1)).sum().backward()
                optimizer.step()

            self._step = step

    def items(self, dataset: Any) -> Iterator[tuple[Any, ...]]:
        """One epoch: what the local replicas have in each step."""
        for item in dataset:
            yield self._strategy.local_results(item)
            if self._step is not None:
                self._strategy.run(self._step, args=(item,))

    def epoch(self, dataset: Any) -> Steps:
        """One epoch, as numbers."""
        return [[examples(batch) for batch in parts] for parts in self.items(dataset)]


def examples(batch: Any) -> list[int]:
    """The numbers in a batch: its first tensor."""
    found: list[int] = next(iter(tensors(batch))).tolist()
    return found


def epoch(strategy: sg.Strategy, source: Any, batch_size: int | None = None, **options: Any) -> Steps:
    """One epoch of a source; ``options`` are those of :class:`DistributeOptions`."""
    chosen = sg.DistributeOptions(**options) if options else None
    reader = Reader(strategy)
    return reader.epoch(strategy.distribute_dataset(source, batch_size=batch_size, options=chosen))
