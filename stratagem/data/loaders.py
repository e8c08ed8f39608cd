"""Taking a user's DataLoader apart and building it again over our own batches (PROTOCOL.md 27)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from stratagem.cluster.units import Plan
from stratagem.errors import ConfigurationError

# Constructor arguments of DataLoader that mean the same over other batches.
_CARRIED = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "generator",
    "pin_memory_device",
)


def plan_of(loader: DataLoader[Any], num_slices: int, staleness: float) -> Plan:
    """How the epochs of ``loader`` are cut into units; its batches are GLOBAL batches.

    Raises:
        ConfigurationError: the loader draws examples in a way that cannot be planned; says which can.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"distribute_dataset expects a torch.utils.data.DataLoader, got {type(loader).__name__}; "
            "wrap the dataset in one: DataLoader(dataset, batch_size=64, shuffle=True)"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            "distribute_dataset needs a map-style dataset (with __len__ and __getitem__), got an IterableDataset: "
            "its examples cannot be lent by number"
        )
    sampler: Any = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        raise ConfigurationError(
            "distribute_dataset plans the batches itself: give the DataLoader batch_size=, not its own batch_sampler"
        )
    if not _is_plain(sampler):
        raise ConfigurationError(
            f"distribute_dataset expects shuffle=True or shuffle=False, got the sampler {type(sampler).__name__}; "
            "draw its indices once and wrap the dataset in torch.utils.data.Subset(dataset, indices)"
        )
    return Plan(
        num_examples=len(sampler),
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        shuffle=isinstance(sampler, RandomSampler),
        num_slices=num_slices,
        staleness=staleness,
    )


def _is_plain(sampler: Any) -> bool:
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def rebuild(loader: DataLoader[Any], batches: Sampler[list[int]]) -> DataLoader[Any]:
    """A DataLoader like ``loader`` that reads ``batches``."""
    arguments = {name: getattr(loader, name) for name in _CARRIED if hasattr(loader, name)}
    if not arguments["num_workers"]:
        arguments.pop("prefetch_factor")
        arguments.pop("multiprocessing_context")
    if not arguments.get("pin_memory_device"):
        arguments.pop("pin_memory_device", None)
    return DataLoader(loader.dataset, batch_sampler=batches, **arguments)


class Batches(Sampler[list[int]]):
    """A batch sampler over an iterator of index lists."""

    def __init__(self, indices: Iterator[list[int]]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        return self._indices


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with every tensor in it on ``device``; lists, tuples and dicts are walked through."""
    return _each_tensor(batch, lambda tensor: tensor.to(device, non_blocking=True))


def empty_like(batch: Any) -> Any:
    """``batch`` with no examples left in any of its tensors."""
    return _each_tensor(batch, lambda tensor: tensor[:0])


def _each_tensor(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: _each_tensor(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_each_tensor(item, change) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_each_tensor(item, change) for item in batch)
    return batch
