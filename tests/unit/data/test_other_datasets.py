"""Datasets that are none of torch's classes."""

from __future__ import annotations

import functools
import math
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from stratagem.data.distribute import distribute, distribute_from_function, leasable
from stratagem.data.distributed import DistributedDataset
from stratagem.data.loaders import plan_of, why_not_planned
from stratagem.data.placement import InputPlacement
from stratagem.data.split_dataset import SplitDataset
from stratagem.errors import ConfigurationError
from stratagem.training.fit.sources import source_of
from tests.conformance.scenarios.examples import Numbers
from tests.unit.data.reading import CPU
from tests.unit.data.test_leased_parts import OneWorker


def test_what_is_a_dataset_by_its_methods_gives_single_examples() -> None:
    class Rows:
        """As datasets.Dataset of Hugging Face, which is none of torch."""

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index])

        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            return [self[index] for index in indices]

        def __iter__(self) -> Iterator[torch.Tensor]:
            return map(self.__getitem__, range(3))

    with pytest.raises(ConfigurationError, match="single examples: add batch_size="):
        distribute(Rows(), placement=InputPlacement((CPU,)))
    batches = distribute(Rows(), placement=InputPlacement((CPU,)), batch_size=2)
    assert [batch.tolist() for batch in batches] == [[[0], [1]], [[2]]]
    assert len(source_of(Rows(), batch_size=2)) == 2


def test_a_length_that_is_not_implemented_is_not_known() -> None:
    class Stream(IterableDataset[int]):
        def __len__(self) -> int:
            raise NotImplementedError

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    source = source_of(DataLoader(Stream(), batch_size=2))
    assert [batch.tolist() for batch in distribute(source, placement=InputPlacement((CPU,)))] == [[0, 1], [2]]


def test_a_loader_whose_items_are_batches_is_not_told_of_a_batch_sampler() -> None:
    items, sampled = DataLoader(Numbers(4), batch_size=None), DataLoader(Numbers(4), batch_sampler=[[0, 1], [2]])
    assert "items of a DataLoader with batch_size=None" in why_not_planned(items)
    assert "not its own batch_sampler" in why_not_planned(sampled)


def test_a_stream_that_cannot_be_leased_is_refused_with_what_to_do() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    refusal = why_not_planned(DataLoader(Stream(), batch_size=2))
    assert all(advice in refusal for advice in ("list(dataset)", "distribute_datasets_from_function", "ring"))
    assert not why_not_planned(DataLoader(list(Stream()), batch_size=2)), "the first advice works"  # type: ignore[arg-type]


def test_a_stream_comes_in_the_order_of_its_loader_whatever_process_is_first() -> None:
    second_is_ready = multiprocessing.get_context("fork").Event()

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            worker = get_worker_info()
            assert worker is not None
            if worker.id == 0:
                assert second_is_ready.wait(60)
            yield from range(worker.id, 8, 2)
            second_is_ready.set()

    # Each worker of a ring reads it, and keeps its part of each batch: they have to be the same batches.
    loader = DataLoader(
        Stream(), batch_size=2, num_workers=2, prefetch_factor=4, multiprocessing_context="fork", in_order=False
    )
    batches = distribute(loader, placement=InputPlacement((CPU,)))
    assert [batch.tolist() for batch in batches] == [[0, 2], [1, 3], [4, 6], [5, 7]]


class Doubled(DataLoader[int]):
    def __iter__(self) -> Any:
        return (2 * batch for batch in super().__iter__())


class DoubledInside(DataLoader[int]):
    """As the neighbour loaders of torch_geometric."""

    def _get_iterator(self) -> Any:
        return (2 * batch for batch in super()._get_iterator())


@pytest.mark.parametrize("kind", [Doubled, DoubledInside])
def test_what_a_loader_does_to_its_batches_is_not_left_out(kind: type[DataLoader[int]]) -> None:
    """Its examples were read without it, which changed the numbers of every strategy."""
    placement = InputPlacement((CPU,))
    for wants in (leasable, functools.partial(distribute, placement=placement)):
        with pytest.raises(ConfigurationError, match=rf"{kind.__name__}\..* would not be called.* collate_fn"):
            wants(kind(Numbers(4), batch_size=2))
    by_function = distribute_from_function(lambda context: kind(Numbers(4), batch_size=2), placement=placement)
    assert [batch.tolist() for batch in by_function] == [[0, 2], [4, 6]], "the second advice works"


class OneBad(Numbers):
    """Its third example cannot be read."""

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise ValueError("a bad example")
        return super().__getitem__(index)


def test_a_pass_that_an_error_of_its_data_ended_does_not_seem_complete() -> None:
    batches = iter(distribute(DataLoader(OneBad(6), batch_size=2), placement=InputPlacement((CPU,))))
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(ValueError, match="a bad example"):
        next(batches)
    with pytest.raises(ConfigurationError, match="ended by ValueError: a bad example"):
        next(batches)
    with pytest.raises(StopIteration):  # a loop that goes on after any error ends too
        next(batches)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("is_leased", [False, True])
def test_a_dataset_that_has_other_examples_is_distributed_again(is_leased: bool, shuffle: bool) -> None:
    """A curriculum, a replay buffer: later passes had the first examples alone, or ended in an IndexError."""
    examples = [0, 1, 2]
    loader: DataLoader[int] = DataLoader(examples, batch_size=2, shuffle=shuffle)  # type: ignore[arg-type]

    def distributed() -> DistributedDataset | SplitDataset:
        if not is_leased:
            return distribute(loader, placement=InputPlacement((CPU,)))
        plan = plan_of(loader, 1, math.inf)
        return DistributedDataset(loader, plan, 1, OneWorker(plan), CPU)

    batches = distributed()
    assert sum(len(batch) for batch in batches) == 3
    examples += [3, 4]
    with pytest.raises(ConfigurationError, match=r"had 3 examples when .* now has 5: .* Distribute it again"):
        next(iter(batches))
    assert sum(len(batch) for batch in distributed()) == 5
