"""Taking a user's DataLoader apart and building it again over our own batches (docs/protocol.md 27)."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from stratagem.cluster.units import Plan
from stratagem.data.nested import is_rows, leaves
from stratagem.errors import ConfigurationError
from stratagem.worker.step_meter import active_meter

logger = logging.getLogger(__name__)

# Constructor arguments of DataLoader that mean the same over other batches.
_CARRIED = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "pin_memory_device",
)

_STATEFUL_RANDOM = "<class 'torchdata.stateful_dataloader.sampler.RandomSampler'>"
"""What ``shuffle=True`` is in torchdata's StatefulDataLoader."""


class DropWatch:
    """Warns, once, of a ``collate_fn`` that drops examples where a batch is shared out before it is collated.
    ``weighs``: whether the shares of a batch weigh by their sizes."""

    def __init__(self, loader: DataLoader[Any], weighs: bool = True) -> None:
        self._looks = weighs and loader.collate_fn is not default_collate

    def look(self, collated: Any, num_examples: int) -> None:
        if not self._looks:
            return
        counts = {len(leaf) for leaf in leaves(collated) if is_rows(leaf)}
        if len(counts) == 1 and (count := counts.pop()) < num_examples:
            self._looks = False
            logger.warning(
                "collate_fn makes %d examples of %d: in the mean of a batch each replica's part counts as if none were "
                "dropped; remove them from the dataset, before batches are made",
                *(count, num_examples),
            )


def plan_of(loader: DataLoader[Any], num_slices: int, staleness: float) -> Plan:
    """How the epochs of ``loader`` are cut into units; its batches are GLOBAL batches. Raises ConfigurationError: the
    loader draws examples in a way that cannot be planned; says which can."""
    if reason := why_not_planned(loader):
        raise ConfigurationError(reason)
    assert loader.batch_size is not None, "else there is a reason"
    sampler: Any = loader.sampler
    return Plan(
        num_examples=len(sampler),
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        shuffle=type(sampler) is not SequentialSampler,
        num_slices=num_slices,
        staleness=staleness,
    )


def check_length(loader: DataLoader[Any], planned: int | None) -> None:
    """A ConfigurationError where there are not as many examples any more as epochs are planned for."""
    if (now := length_of(loader.sampler)) != planned:
        raise ConfigurationError(
            f"the dataset had {planned} examples when it was distributed, and now has {now}: epochs are planned for "
            "those that it had. Distribute it again, batches = strategy.distribute_dataset(loader), whenever it has "
            "others"
        )


def why_not_planned(loader: Any) -> str:
    """Why :func:`plan_of` cannot plan it; empty: it can."""
    if not isinstance(loader, DataLoader):
        return (
            f"distribute_dataset expects a torch.utils.data.DataLoader, got {type(loader).__name__}; "
            "wrap the dataset in one: DataLoader(dataset, batch_size=64, shuffle=True)"
        )
    if isinstance(loader.dataset, IterableDataset):
        return (
            "distribute_dataset needs a map-style dataset (with __len__ and __getitem__), got an IterableDataset: "
            "its examples cannot be leased by number. Read it into a list, DataLoader(list(dataset), ...); where it is "
            "too large, use a ring of workers, or (asynchronous parameter servers) distribute_datasets_from_function"
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        return (
            "distribute_dataset plans the batches itself, and the items of a DataLoader with batch_size=None are whole "
            "batches: give it a dataset of single examples, and the DataLoader batch_size="
        )
    if loader.batch_size is None:
        return "distribute_dataset plans the batches itself: give the DataLoader batch_size=, not its own batch_sampler"
    if not is_plain(loader.sampler):
        return (
            "distribute_dataset expects shuffle=True or shuffle=False, got the sampler "
            f"{type(loader.sampler).__name__}; draw its indices once and wrap the dataset in "
            "torch.utils.data.Subset(dataset, indices)"
        )
    return ""


def refuse_own_passes(loader: DataLoader[Any]) -> None:
    """A ConfigurationError where the class of ``loader`` changes the batches that torch's would give: a loader that is
    built over other batches does not."""
    for name in ("__iter__", "_get_iterator"):
        method = getattr(type(loader), name)
        if method.__module__.split(".")[0] not in ("torch", "torchdata"):
            raise ConfigurationError(
                f"{type(loader).__name__}.{name} would not be called, because distribute_dataset reads the examples of "
                "a loader in batches of its own: let the collate_fn or the step do what it does, or use a plain "
                "DataLoader if it changes no batch. Or return the loader from a function given to "
                "distribute_datasets_from_function"
            )


def has_own_batches(loader: DataLoader[Any]) -> bool:
    """Whether the loader was given a ``batch_sampler``; its ``sampler`` then says nothing."""
    return loader.batch_sampler is not None and loader.batch_size is None


def is_dataset(source: Any) -> bool:
    """Whether it gives single examples: a Dataset, or what a DataLoader reads like one (``datasets.Dataset``)."""
    return isinstance(source, Dataset) or hasattr(source, "__getitems__")


def length_of(source: Any) -> int | None:
    """How much a source says that it gives; None where it does not say, as a BatchSampler over a sampler without."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


class NumPasses:
    """How often a source, or a sampler with one of its own, may be gone through: an iterator once."""

    def __init__(self, source: Any) -> None:
        every = (source, getattr(source, "sampler", None))
        self._once = next((each for each in every if isinstance(each, Iterator)), None)
        self._is_spent = False

    def begin(self) -> None:
        """A pass begins; a ConfigurationError where there is none left."""
        if self._once is not None and self._is_spent:
            raise ConfigurationError(
                f"a {type(self._once).__name__} gives its batches only once, and this is the second pass: distribute "
                "something that starts over with each iter(), such as a DataLoader, a list, or a class with __iter__, "
                "or let it give all batches there are to be (in fit steps_per_epoch * epochs)"
            )
        self._is_spent = True


def is_plain(sampler: Any) -> bool:
    """Whether a plan can stand for the sampler: it says all examples once, in order or shuffled."""
    if type(sampler) is RandomSampler or str(type(sampler)) == _STATEFUL_RANDOM:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def rebuild(loader: DataLoader[Any], batches: Sampler[Any], persistent: bool = False) -> DataLoader[Any]:
    """A DataLoader like ``loader`` that reads ``batches``; ``persistent``: it keeps its worker processes between epochs
    if that does."""
    return DataLoader(loader.dataset, batch_sampler=batches, **carried(loader, persistent))


def rebuild_over(loader: DataLoader[Any], dataset: Dataset[Any]) -> DataLoader[Any]:
    """A DataLoader like ``loader`` over another dataset of its kind; a ConfigurationError where its sampler knows the
    numbers of the old dataset's examples."""
    sampling: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if not isinstance(dataset, IterableDataset):
        if has_own_batches(loader) or not is_plain(loader.sampler):
            raise ConfigurationError(
                "AutoShardPolicy.FILE gives each worker different examples, which the DataLoader's own sampler cannot "
                "index: use shuffle=True or shuffle=False, or AutoShardPolicy.DATA"
            )
        sampling["shuffle"] = type(loader.sampler) is not SequentialSampler
    return DataLoader(dataset, **sampling, **carried(loader, persistent=True))


def carried(loader: DataLoader[Any], persistent: bool) -> dict[str, Any]:
    """Arguments of a DataLoader like ``loader`` over other batches; ``persistent`` as of :func:`rebuild`."""
    refuse_own_passes(loader)
    if hasattr(loader, "load_state_dict"):
        _refuse_position(loader)
    arguments = {name: getattr(loader, name) for name in _CARRIED if hasattr(loader, name)}
    if (meter := active_meter()) is not None:
        meter.loader_workers = loader.num_workers
    if not arguments["num_workers"]:
        arguments.pop("prefetch_factor")
        arguments.pop("multiprocessing_context")
    if not arguments.get("pin_memory_device"):
        arguments.pop("pin_memory_device", None)
    if persistent:
        # A process that stays has a copy of the dataset, which would be told no epoch.
        arguments["persistent_workers"] = loader.persistent_workers and not hasattr(loader.dataset, "set_epoch")
    return arguments


def _refuse_position(loader: Any) -> None:
    """From now on torchdata's StatefulDataLoader is not asked for a position: it knows that of passes over itself."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise ConfigurationError(
            f"the {type(loader).__name__} does not know how far the distributed dataset over it is, and cannot set it: "
            "sg.Checkpoint (or BackupAndRestore of fit) keeps the position in the data, and resumes there"
        )

    if getattr(loader, "next_iter_state", None) is not None:  # it was given one before
        refuse()
    loader.state_dict = loader.load_state_dict = refuse


def seed_epoch(loader: DataLoader[Any], *numbers: int) -> None:
    """Has a loader seed its worker processes by ``numbers`` (of the order, the epoch).

    Torch's own generator, or one that the user gave, is the same on all workers, and begins anew with each process.
    """
    seed = int.from_bytes(hashlib.blake2b(str(numbers).encode(), digest_size=7).digest())
    loader.generator = torch.Generator().manual_seed(seed)


def tell_epoch(target: Any, epoch: int) -> None:
    """What samplers and datasets that shuffle by themselves go by."""
    if callable(tell := getattr(target, "set_epoch", None)):
        tell(epoch)


def tell_epoch_to_all(source: Any, epoch: int) -> None:
    """As :func:`tell_epoch`, of an iterable of batches and what it may be made of."""
    for part in ("dataset", "sampler", "batch_sampler"):
        tell_epoch(getattr(source, part, None), epoch)
    tell_epoch(source, epoch)


class Batches(Sampler[Any]):
    """A sampler over an iterator of indices, or of lists of them, which may be exchanged before each epoch."""

    def __init__(self, indices: Iterator[Any]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return self.indices
