"""What an ``input_fn`` gives: batches, and the first of them to create a model with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stratagem.data.loaders import has_own_batches, is_plain
from stratagem.data.options import InputContext
from stratagem.errors import ConfigurationError
from stratagem.strategy.random_states import random_untouched
from stratagem.training.estimator.model_function import ModeKeys, taken
from stratagem.training.estimator.run_config import RunConfig
from stratagem.training.fit.steps import sample_of

InputFunction = Callable[..., Any]

_KNOWN = ("mode", "params", "config", "input_context")


class Input:
    """A user's ``input_fn``, which takes ``mode``, ``params``, ``config`` and ``input_context`` where it wants them.

    It returns a DataLoader of GLOBAL batches or an iterable of them. One that takes ``input_context`` makes batches for
    single replicas, and shards by it itself, as in ``distribute_datasets_from_function``.
    """

    def __init__(self, function: InputFunction, mode: ModeKeys, params: Mapping[str, Any], config: RunConfig) -> None:
        if not callable(function):
            raise ConfigurationError(f"expected an input_fn, got {type(function).__name__}; write lambda: loader")
        self._function = function
        self._given = {"mode": mode, "params": params, "config": config}
        self._takes = taken(function, getattr(function, "__qualname__", type(function).__name__), _KNOWN)

    @property
    def makes_replica_batches(self) -> bool:
        """Whether it wants to know its place."""
        return "input_context" in self._takes

    def open(self, context: InputContext | None = None) -> Any:
        """Calls it. ConfigurationError: it gives no batches."""
        given = {**self._given, "input_context": context or InputContext()}
        source = self._function(**{name: given[name] for name in self._takes})
        if isinstance(source, Dataset):
            raise ConfigurationError(
                f"the input_fn returned a {type(source).__name__}, which gives single examples: wrap it in a DataLoader"
            )
        is_pair = isinstance(source, tuple) and not any(isinstance(item, tuple | list) for item in source)
        if is_pair or isinstance(source, torch.Tensor | np.ndarray | Mapping):
            raise ConfigurationError(
                f"the input_fn returned {'features and labels' if is_pair else f'a {type(source).__name__}'}, not "
                "batches of them: wrap them in DataLoader(TensorDataset(features, labels), batch_size)"
            )
        if isinstance(source, str | bytes) or not hasattr(source, "__iter__"):
            raise ConfigurationError(
                f"expected a DataLoader or an iterable of batches from the input_fn, got {type(source).__name__}"
            )
        return source


def split(batch: Any) -> tuple[Any, Any]:
    """Features and labels of a batch: ``(features, labels)``, ``(features,)`` or features."""
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields") and 1 <= len(batch) <= 2:
        return batch[0], batch[1] if len(batch) == 2 else None
    return batch, None


def sample(source: Any) -> tuple[Any, Any]:
    """One or two examples as a batch, on the CPU, and the source, which gives as much as before.

    Random number generators are left where they were. ConfigurationError: there are none.
    """
    try:
        with random_untouched():
            is_loader = isinstance(source, DataLoader)
            read: Any = source.dataset if is_loader else source
            if is_loader and not isinstance(read, Iterator):
                batch = _batch_of(source)
            else:
                batches = iter(source)
                batch = next(batches)
                # What other processes read, each reads from its beginning.
                if isinstance(read, Iterator) and not (is_loader and source.num_workers):
                    source = itertools.chain([batch], batches)
    except (StopIteration, IndexError):
        raise ConfigurationError("the input has no examples") from None
    return sample_of(batch), source


def _batch_of(loader: DataLoader[Any]) -> Any:
    """A small batch, read here: no worker process is started for it."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        return next(iter(DataLoader(dataset, loader.batch_size, collate_fn=loader.collate_fn)))
    if loader.batch_sampler is None:
        index = 0 if is_plain(loader.sampler) else next(iter(loader.sampler))
        return loader.collate_fn(dataset[index])
    if has_own_batches(loader):
        indices = list(next(iter(loader.batch_sampler)))
    elif is_plain(loader.sampler):
        indices = list(range(min(2, len(dataset))))
    else:
        indices = list(itertools.islice(loader.sampler, 2))
    if not indices:
        raise StopIteration
    rows = dataset.__getitems__(indices) if hasattr(dataset, "__getitems__") else [dataset[index] for index in indices]
    return loader.collate_fn(rows)
