"""What people give to ``fit``, ``evaluate`` and ``predict``, as something that gives GLOBAL batches."""

from __future__ import annotations

import dataclasses
import logging
import numbers
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stratagem.arguments import whole_number
from stratagem.data.distribute import distribute
from stratagem.data.distributed import DistributedDataset
from stratagem.data.loaders import is_dataset, length_of, tell_epoch_to_all
from stratagem.data.nested import is_rows, leaves, map_leaves, num_examples
from stratagem.data.options import DistributeOptions
from stratagem.data.placement import InputPlacement, StepCounter
from stratagem.data.split_dataset import SplitDataset
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.worker.reduction.batch_norm import SyncBatchNorm

logger = logging.getLogger(__name__)

DEFAULT_BATCH_SIZE = 32
_TABLE = (
    "expected arrays or tensors, got a list of lists of numbers, which may be examples or several inputs: "
    "numpy.array(x) makes it examples"
)

Distributed = DistributedDataset | SplitDataset


class Arrays(Dataset[Any]):
    """Examples along the first dimension of inputs, and perhaps targets and weights: tensors of one length, or dicts,
    lists and tuples of them; a DataLoader reads whole batches of it at once."""

    def __init__(self, parts: Sequence[Any]) -> None:
        if any(map(_is_table, parts)):
            raise ConfigurationError(_TABLE)
        self.parts = tuple(map_leaves(part, _tensor) for part in parts)
        if any(not leaf.dim() for leaf in leaves(self.parts)):
            raise ConfigurationError(
                "expected arrays or tensors whose first dimension is the examples, got single numbers; lists of "
                "numbers become one with numpy.array(x)"
            )
        if len(lengths := dict.fromkeys(len(leaf) for leaf in leaves(self.parts))) > 1:
            raise ConfigurationError(
                "expected inputs, targets and weights of the same number of examples, got "
                + " and ".join(map(str, lengths))
            )
        self._length = num_examples(self.parts)

    @classmethod
    def of(cls, x: Any, y: Any, sample_weight: Any) -> Arrays:
        """Of what people give by these names; None: there is none."""
        if sample_weight is not None and y is None:
            raise ConfigurationError("sample_weight needs y: the weights are those of the targets' losses")
        return cls([part for part in (x, y, sample_weight) if part is not None])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return map_leaves(self.parts, lambda leaf: leaf[index])

    def __getitems__(self, indices: list[int]) -> Any:
        rows = torch.tensor(indices)
        return map_leaves(self.parts, lambda leaf: leaf[rows])

    def split(self, fraction: float) -> tuple[Arrays, Arrays]:
        """Two of them: without the last ``fraction`` of the examples, and with those alone."""
        stop = int(len(self) * (1 - fraction)) if 0 < fraction < 1 else 0
        if not 0 < stop < len(self):
            raise ConfigurationError(
                f"expected a validation_split between 0 and 1 that leaves examples in both parts, got {fraction!r} of "
                f"{len(self)} examples"
            )
        first = Arrays(map_leaves(self.parts, lambda leaf: leaf[:stop]))
        return first, Arrays(map_leaves(self.parts, lambda leaf: leaf[stop:]))


def source_of(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    option: str = "batch_size",
) -> Any:
    """A DataLoader, an iterable of global batches or a distributed dataset that gives what ``x`` holds.

    A batch is ``(inputs,)``, ``(inputs, targets)`` or ``(inputs, targets, weights)`` where it comes from arrays.

    Args:
        x: arrays or tensors (one, or a dict, list or tuple of them), a Dataset, a DataLoader, an iterable of batches,
            or a distributed dataset.
        y: targets, only with arrays.
        sample_weight: weights of the examples, only with arrays.
        batch_size: examples in a GLOBAL batch, only with arrays and a Dataset; None: 32.
        shuffle: arrays and map-style Datasets are gone through in another order each epoch.
        option: what the script calls ``batch_size``.

    Raises:
        ConfigurationError: arguments that do not go together.
    """
    num_in_batch = DEFAULT_BATCH_SIZE if batch_size is None else whole_number("a batch_size", batch_size)
    if x is None:
        raise ConfigurationError("expected x=, the inputs, got None")
    if _is_arrays(x, y):
        return DataLoader(_some(Arrays.of(x, y, sample_weight)), num_in_batch, shuffle=shuffle, collate_fn=_as_is)
    for name, given in (("y", y), ("sample_weight", sample_weight)):
        if given is not None:
            raise ConfigurationError(
                f"{name}= goes with arrays; a {type(x).__name__} gives it in its batches: (inputs, targets) or "
                "(inputs, targets, weights)"
            )
    if _is_table(x):
        raise ConfigurationError(_TABLE)
    if is_dataset(x):
        shuffle = shuffle and not isinstance(x, IterableDataset)
        return DataLoader(x if isinstance(x, IterableDataset) else _some(x), num_in_batch, shuffle=shuffle)
    if batch_size is not None:
        raise ConfigurationError(f"{option}= is for arrays and Datasets; a {type(x).__name__} has batches of its own")
    if isinstance(x, str | bytes) or not hasattr(x, "__iter__"):
        raise ConfigurationError(
            "expected arrays, a Dataset, a DataLoader, an iterable of batches or a distributed dataset, got "
            f"{type(x).__name__}"
        )
    if isinstance(x, DataLoader | Distributed):
        if length_of(x) == 0:
            raise ConfigurationError(
                f"the {type(x).__name__} gives no batch: it has no examples, or drop_last=True and fewer than a batch"
            )
        return x
    return (_with_tensors(batch) for batch in x) if isinstance(x, Iterator) else _OfTensors(x)


def validation_source(data: Any, batch_size: int | None, default: int | None) -> Any:
    """As :func:`source_of`, of ``validation_data``: arrays come as ``(x, y)`` or ``(x, y, sample_weight)``. ``default``
    is the ``batch_size``, where there is none, of what takes one."""
    are_batches = isinstance(data, list) and all(isinstance(item, tuple | list | Mapping) for item in data)
    is_pair = isinstance(data, tuple | list) and len(data) in (2, 3) and not are_batches
    if is_pair and (is_rows(data[0]) or any(map(is_rows, leaves(data[1])[:1]))):
        return source_of(*data, batch_size=batch_size or default)
    size = batch_size or default if is_dataset(data) else batch_size
    return source_of(data, batch_size=size, option="validation_batch_size")


def for_training(
    strategy: Strategy, source: Any, module: nn.Module, device: torch.device, ordinal: int | None = None
) -> Any:
    """This process's part of ``source``, whose batches tell the strategy how much each replica counts. ``module``: that
    is trained, prepared; ``device``: where the batches go under the pass-through strategy, which has no device of its
    own; ``ordinal``: of the order of shuffled examples, unless the script has distributed ``source`` itself; None: that
    among the datasets of the strategy."""
    if isinstance(source, SplitDataset) and strategy.servers is not None:
        raise ConfigurationError(
            "under parameter servers fit counts the batches that the chief leases, and it does not lease those of "
            "distribute_datasets_from_function: give fit the DataLoader or the Dataset, or write the loop yourself"
        )
    if isinstance(source, Distributed):
        return source
    dataset = _distributed(strategy, source, module, device)
    if ordinal is not None:
        dataset.reorder(ordinal)
    return dataset


def _distributed(strategy: Strategy, source: Any, module: nn.Module, device: torch.device) -> Any:
    if not strategy.places_models:
        return distribute(source, placement=InputPlacement((device,)))
    if strategy.servers is not None:
        return strategy.distribute_dataset(source.given if isinstance(source, _OfTensors) else source)
    # A replica without examples adds zeros, as to one process; BatchNorm needs examples (docs/protocol.md 20).
    needs_examples = any(
        isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm) for layer in module.modules()
    )
    if not needs_examples:
        return strategy.distribute_dataset(source)
    dataset = strategy.distribute_dataset(source, options=DistributeOptions(on_empty="skip"))
    given, made = length_of(source), length_of(dataset)
    if given is not None and made is not None and made < given and strategy.is_lead:
        logger.warning(
            "%d of %d batches are skipped in each epoch: they leave one of the %d replicas without examples, which "
            "BatchNorm needs; compile(sync_batchnorm=True) trains them",
            *(given - made, given, strategy.num_replicas_in_sync),
        )
    return dataset


def for_evaluation(strategy: Strategy, source: Any, device: torch.device) -> Any:
    """This process's part of ``source``; each example is in exactly one worker's part, if the workers run in step.

    Where they do not (parameter servers), every worker's part is the whole. Training does not notice.
    """
    if isinstance(source, Distributed):
        return source
    workers = strategy.communicator
    if workers is None:
        return distribute(source, placement=InputPlacement(devices_of(strategy, device)))
    placement = InputPlacement(strategy.local_devices, workers.size, workers.rank, workers)
    return distribute(source, placement=placement, listener=StepCounter(workers))


def for_prediction(strategy: Strategy, source: Any, device: torch.device) -> SplitDataset:
    """All of ``source``, in its order, for the replicas of this process."""
    if isinstance(source, Distributed):
        raise ConfigurationError(
            "predict keeps the order of the examples, but a distributed dataset is one worker's part of them: give it "
            "the arrays, the Dataset or the DataLoader"
        )
    return distribute(source, placement=InputPlacement(devices_of(strategy, device)))


def devices_of(strategy: Strategy, device: torch.device) -> tuple[torch.device, ...]:
    """Devices of the local replicas; ``device`` under the pass-through strategy, which moves no module."""
    return strategy.local_devices if strategy.places_models else (device,)


def _is_arrays(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor | np.ndarray) or y is not None:
        return not isinstance(x, Dataset | DataLoader | Iterator)
    if isinstance(x, Mapping):
        return True
    if isinstance(x, list | tuple) and x:  # several inputs; a list of batches has a tuple, list or dict for each
        return isinstance(x[0], torch.Tensor | np.ndarray)
    return False


def _some(dataset: Any) -> Any:
    """A map-style dataset that is not empty."""
    if not len(dataset):
        raise ConfigurationError("expected at least one example, got none")
    return dataset


def _is_table(part: Any) -> bool:
    """Whether it is a list with a row that is a list of plain numbers."""
    rows = [row for row in part if isinstance(row, list | tuple) and row] if isinstance(part, list | tuple) else []
    return any(all(isinstance(one, numbers.Real) for one in row) for row in rows)


@dataclasses.dataclass(eq=False, repr=False)
class _OfTensors:
    """An iterable of batches whose arrays are tensors."""

    given: Any

    def __iter__(self) -> Iterator[Any]:
        return map(_with_tensors, self.given)

    def __len__(self) -> int:
        return len(self.given)

    def set_epoch(self, epoch: int) -> None:
        """Of what shuffles by itself."""
        tell_epoch_to_all(self.given, epoch)


def _with_tensors(batch: Any) -> Any:
    return map_leaves(batch, lambda leaf: _tensor(leaf) if isinstance(leaf, np.ndarray) else leaf)


def _tensor(leaf: Any) -> torch.Tensor:
    """Floats of numpy are float64 unless somebody says otherwise, parameters are not."""
    try:
        if isinstance(leaf, np.ndarray):  # torch takes no other byte order, and no array that runs backwards
            leaf = leaf.astype(leaf.dtype.newbyteorder("="), copy=min(leaf.strides, default=0) < 0)
        tensor = torch.as_tensor(leaf)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigurationError(
            f"expected arrays or tensors of numbers, got {type(leaf).__name__}; convert a pandas table with .to_numpy()"
        ) from None
    if isinstance(leaf, torch.Tensor) or tensor.dtype != torch.float64:
        return tensor
    return tensor.to(torch.get_default_dtype())


def close(batches: Any) -> None:
    """Says that nobody goes on with an iterator, if it can hear that."""
    if hasattr(batches, "close"):
        batches.close()


def _as_is(batch: Any) -> Any:
    return batch


class Heard:
    """A dataset of whose first batch somebody hears, as a step gets it, each time it is gone through; where the chief
    leases batches and others took them all, of the first example."""

    def __init__(self, dataset: Any, hear: Callable[[Any], None]) -> None:
        self._dataset = dataset
        self._hear = hear
        self._has_heard = False
        self.is_leased = isinstance(dataset, DistributedDataset)

    def __iter__(self) -> Iterator[Any]:
        return self._heard(iter(self._dataset))

    def parts(self, num_batches: int) -> Iterator[Iterator[Any]]:
        return map(self._heard, self._dataset.parts(num_batches))

    def _heard(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            for number, batch in enumerate(batches):
                if not number:
                    self._hear(batch)
                    self._has_heard = True
                yield batch
        finally:
            close(batches)
        if self.is_leased and not self._has_heard and self._dataset.plan.num_examples:
            self._hear(self._dataset.first_example())
            self._has_heard = True


class Passes:
    """Goes through a dataset epoch by epoch, each of ``num_steps`` GLOBAL batches, which may be part of a pass or
    several, or (None) a pass. Of what can be gone through once (``is_once``) the last may have fewer. A context
    manager: in the end it leaves the pass that is open."""

    def __init__(self, dataset: Heard | SplitDataset, num_steps: int | None, is_once: bool = False) -> None:
        self._dataset = dataset
        self._num_steps = num_steps
        self._is_once = is_once
        self.is_spent = False
        """Whether there was less than an epoch left, and no more comes."""
        self._open: Iterator[Any] | None = None
        leased = dataset if isinstance(dataset, Heard) and dataset.is_leased else None
        self._parts = leased.parts(num_steps) if leased is not None and num_steps is not None else None
        self._epoch: Generator[Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._epoch, self._open):
            close(each)

    def epoch(self, done: int = 0) -> Iterator[Any]:
        """The batches of the next epoch, of which ``done`` steps have been made before."""
        self._epoch = self._batches(done)
        return self._epoch

    def _batches(self, done: int) -> Generator[Any]:
        if self._num_steps is None:
            yield from self._dataset
            return
        if self._parts is not None:
            yield from next(self._parts)
            return
        empty_passes = 0
        for _ in range(done, self._num_steps):
            while True:
                if self._open is None:
                    self._open = iter(self._dataset)
                try:
                    batch = next(self._open)
                    break
                except StopIteration:
                    self._open = None
                    if self._is_once:
                        self.is_spent = True
                        logger.warning(
                            "The input ran out of data, and training ends: an input that can be iterated over only "
                            "once has to give steps_per_epoch * epochs batches"
                        )
                        return
                    empty_passes += 1
                    if empty_passes > 1:
                        return  # there is nothing to be had
            empty_passes = 0
            yield batch
