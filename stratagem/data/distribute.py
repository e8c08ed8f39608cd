"""The two ways in: a source of global batches, and a function that makes batches for single replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from stratagem.arguments import whole_number
from stratagem.cluster.units import Plan
from stratagem.data.distributed import DistributedDataset
from stratagem.data.files import file_based, own_files
from stratagem.data.healing_reader import HealingReader
from stratagem.data.index_batches import DrawnBatches, IndexBatches, PlannedBatches
from stratagem.data.loaders import has_own_batches, is_dataset, is_plain, length_of, plan_of, refuse_own_passes
from stratagem.data.nested import fingerprint, is_rows, values_in
from stratagem.data.options import AutoShardPolicy, DistributeOptions, InputContext
from stratagem.data.placement import InputPlacement, Listener
from stratagem.data.readers import (
    BatchSplit,
    IndexReader,
    ItemBatches,
    PerReplicaReader,
    Reader,
    Reopened,
    StreamReader,
)
from stratagem.data.split_dataset import SplitDataset
from stratagem.errors import ConfigurationError

logger = logging.getLogger(__name__)

_MOST_PARTS = 64
"""Longer lists that hold no examples are not looked into."""


def warn_of_own_batches(who: str) -> None:
    """A step was made, and the script has distributed nothing: it may have been forgotten."""
    logger.warning(
        "no dataset is distributed: each of the %s trains on what the script gives it, all on the same "
        "examples unless that shares them out. strategy.distribute_dataset(loader) does",
        who,
    )


def distribute(
    source: DataLoader[Any] | Dataset[Any] | Iterable[Any],
    *,
    placement: InputPlacement,
    ordinal: int = 1,
    batch_size: int | None = None,
    options: DistributeOptions | None = None,
    listener: Listener | None = None,
) -> SplitDataset:
    """This worker's part of a source of GLOBAL batches. Every worker has to call it, in the same order.

    Args:
        source: a DataLoader, an iterable of batches, or (with ``batch_size``) a Dataset.
        ordinal: ordinal of the dataset in the script, starting at 1.
        batch_size: examples in a global batch of a Dataset.

    Raises:
        ConfigurationError: the source cannot be shared out like that; says why, and what can be done.
    """
    options = DistributeOptions.of(options)
    listener = listener or Listener()
    batched = _with_batches(source, batch_size)
    policy = _choose(options.auto_shard_policy, batched)
    alone = policy is not AutoShardPolicy.DATA and placement.num_workers > 1
    common: str | None = ""
    if policy is AutoShardPolicy.FILE:
        batched, common = own_files(batched, placement.num_workers, placement.worker)
    elif policy is AutoShardPolicy.DATA and placement.num_workers > 1:
        common = None
    batch_split = BatchSplit(placement.num_workers, placement.worker, placement.num_local_replicas, alone)
    plan: Plan | None = None
    batches: IndexBatches | None = None
    contents = 0
    reader: Reader
    if not isinstance(batched, DataLoader) or isinstance(batched.dataset, IterableDataset):
        reader = StreamReader(Reopened(batched, placement.worker if alone else 0), batch_split, common)
    else:
        _refuse_distributed_sampler(batched)
        # The indices of an epoch are the same on all workers, or (FILE, OFF) each worker's own.
        shift, communicator = (placement.worker, None) if alone else (0, placement.communicator)
        contents = contents_of(batched.dataset) if communicator is not None else 0
        sampler: Iterable[Any] = batched.sampler if batched.batch_sampler is None else batched.batch_sampler
        if (planned := _plan(batched, num_slices=1)) is not None:
            batches = PlannedBatches(planned, ordinal, shift, batched)
        else:
            batches = DrawnBatches(sampler, batched.batch_sampler is not None, ordinal, shift, communicator)
        if batched.batch_sampler is None:
            reader = StreamReader(ItemBatches(batched, batches), batch_split, common or "")
        else:
            reader = IndexReader(batched, batches, batch_split, common or "")
            # Where the number of workers may change, a unit is a whole batch: the plan is the same for all of them.
            plan = _plan(batched, placement.num_replicas if placement.healing is None else 1) if not alone else None
    healing_reader: HealingReader | None = None
    if (healing := placement.healing) is not None:
        if plan is None or not isinstance(reader, IndexReader):
            raise _not_healing("this source")
        assert placement.communicator is not None
        healing_reader = HealingReader(reader, placement.communicator, healing, plan.batch_size)
    return SplitDataset(
        reader,
        placement,
        options,
        seed=placement.seed(plan),
        listener=listener,
        policy=policy,
        plan=plan,
        batches=batches,
        healing_reader=healing_reader,
        contents=contents,
    )


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Iterable[Any]],
    *,
    placement: InputPlacement,
    options: DistributeOptions | None = None,
    listener: Listener | None = None,
) -> SplitDataset:
    """This worker's batches, each for ONE replica, from what ``dataset_fn`` returns; it is called once, here. Nothing
    is sharded here: the ``auto_shard_policy`` of ``options`` has to be AUTO or OFF. Raises ConfigurationError:
    ``dataset_fn`` returns something else, or ``options`` ask for sharding."""
    options = DistributeOptions.of(options)
    if placement.healing is not None:
        raise _not_healing("a dataset function")
    if options.auto_shard_policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.OFF):
        raise ConfigurationError(
            f"AutoShardPolicy.{options.auto_shard_policy.name} is for distribute_dataset; a dataset function shards by "
            "context.num_input_pipelines and context.input_pipeline_id itself"
        )
    if not callable(dataset_fn):
        raise ConfigurationError(
            f"expected a function that gets an InputContext and returns batches, got {type(dataset_fn).__name__}: "
            "distribute_dataset takes datasets and loaders"
        )
    source = dataset_fn(InputContext(placement.num_workers, placement.worker, placement.num_replicas))
    if not isinstance(source, IterableDataset):
        source = _with_batches(source, None)
    reader = PerReplicaReader(source, placement.num_local_replicas, placement.worker)
    return SplitDataset(
        reader, placement, options, seed=placement.seed(None), listener=listener or Listener(), policy=None
    )


def leasable(
    source: DataLoader[Any] | Dataset[Any] | Iterable[Any],
    batch_size: int | None = None,
    options: DistributeOptions | None = None,
) -> DataLoader[Any]:
    """The loader whose batches a chief can lease; a ConfigurationError where ``source`` is an iterable, or ``options``
    are for workers that run in step."""
    options = DistributeOptions.of(options)
    if options.auto_shard_policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.LEASE):
        raise ConfigurationError(
            f"AutoShardPolicy.{options.auto_shard_policy.name} is for workers that run in step; under "
            "ParameterServerStrategy the chief leases batches: AutoShardPolicy.LEASE"
        )
    if options.on_empty != "call" or options.prefetch is not None:
        raise ConfigurationError(
            "on_empty and prefetch are for workers that run in step; under ParameterServerStrategy a worker gets no "
            "batch without examples, and prefetches batches by itself: leave both out"
        )
    batched = _with_batches(source, batch_size)
    if not isinstance(batched, DataLoader):
        raise ConfigurationError(
            f"under ParameterServerStrategy the chief leases batches by number, which a {type(batched).__name__} does "
            "not have: give distribute_dataset a DataLoader over a map-style dataset"
        )
    _refuse_distributed_sampler(batched)
    refuse_own_passes(batched)
    return batched


def _not_healing(source: str) -> ConfigurationError:
    return ConfigurationError(
        f"{source} cannot be redistributed when a worker is lost, which --min-workers asks for: what the lost worker "
        "had is known only for a DataLoader over a map-style dataset, in order or shuffled by the DataLoader, under "
        "AutoShardPolicy.DATA; use one, or leave out --min-workers"
    )


def _with_batches(source: Any, batch_size: int | None) -> Any:
    if isinstance(source, SplitDataset | DistributedDataset):
        raise ConfigurationError(
            "expected a source of global batches, got the result of distribute_dataset: iterate over it as it is"
        )
    if is_dataset(source):
        if batch_size is None:
            raise ConfigurationError(
                f"{type(source).__name__} gives single examples: add batch_size=, or wrap it in a DataLoader "
                "(DataLoader(dataset, batch_size=None) if its items are batches)"
            )
        return DataLoader(source, batch_size=whole_number("a batch_size", batch_size))
    if batch_size is not None:
        raise ConfigurationError(f"batch_size is for a Dataset; a {type(source).__name__} has batches of its own")
    is_scalar = not getattr(source, "ndim", 1)  # a tensor, whose __iter__ raises
    if isinstance(source, str | bytes) or is_scalar or not hasattr(source, "__iter__"):
        raise ConfigurationError(
            f"expected a DataLoader, a Dataset with batch_size=, or an iterable of batches, got {type(source).__name__}"
        )
    is_pair = isinstance(source, tuple) and is_rows(next(iter(source), None))
    if is_pair or is_rows(source) or isinstance(source, Mapping):
        raise ConfigurationError(
            f"expected batches, got {'arrays in a tuple' if is_pair else f'a {type(source).__name__}'}: wrap them in "
            "DataLoader(TensorDataset(inputs, targets), batch_size), or give the batches in a list"
        )
    return source


def _choose(policy: AutoShardPolicy, source: Any) -> AutoShardPolicy:
    if policy is AutoShardPolicy.LEASE:
        raise ConfigurationError(
            "AutoShardPolicy.LEASE leases units to workers that come and go, under ParameterServerStrategy; workers "
            "that run in step share each batch: use AutoShardPolicy.DATA"
        )
    if policy is not AutoShardPolicy.AUTO:
        return policy
    return AutoShardPolicy.DATA if file_based(source) is None else AutoShardPolicy.FILE


def _plan(loader: DataLoader[Any], num_slices: int) -> Plan | None:
    """None: a sampler of the user's has to be asked."""
    if has_own_batches(loader) or not is_plain(loader.sampler):
        return None
    if loader.batch_sampler is None:  # each item is a batch
        loader = DataLoader(loader.dataset, batch_size=1, sampler=loader.sampler)
    return plan_of(loader, num_slices, staleness=0)


def _refuse_distributed_sampler(loader: DataLoader[Any]) -> None:
    for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        # The second is no word that a sampler of one's own would have for its processes.
        is_of_accelerate = getattr(sampler, "num_processes", 1) != 1 and hasattr(sampler, "process_index")
        if is_of_accelerate or isinstance(sampler, DistributedSampler):
            raise ConfigurationError(
                f"a {type(sampler).__name__} gives each worker a part of the examples, and distribute_dataset would "
                "split that part again: leave it out, or return the DataLoader from a function given to "
                "distribute_datasets_from_function"
            )


def contents_of(dataset: Any) -> int:
    """A number of the length of a map-style dataset and of the first, middle and last example in the arrays, lists and
    datasets that it keeps: other data have another one, but for a few that look alike. 0: there is no telling.

    ``__getitem__`` is not called: it may draw random numbers. Texts with a slash, which may be paths of one machine,
    do not count.
    """
    try:
        return fingerprint([value for value in values_in(_ends(dataset, 4)) if _counts(value)]) + 1
    except Exception:  # whatever it is: this only looks, and its reading says what is wrong
        return 0


def _ends(dataset: Any, depth: int) -> list[Any]:
    size = length_of(dataset)
    if not size or not depth:
        return []

    def of(held: Any) -> Any:
        if (is_rows(held) or type(held) in (list, tuple, range)) and len(held) == size:
            return [held[index] for index in (0, size // 2, size - 1)]
        if type(held) in (list, tuple, dict) and len(held) <= _MOST_PARTS:
            return [of(part) for part in (held.values() if isinstance(held, dict) else held)]
        return _ends(held, depth - 1) if is_dataset(held) else []

    if callable(getattr(dataset, "with_format", None)):  # datasets.Dataset of Hugging Face, without its transforms
        plain = dataset.with_format(None)
        return [size, *(plain[index] for index in (0, size // 2, size - 1))]
    return [size, of(dataset if is_rows(dataset) or type(dataset) in (list, tuple) else list(vars(dataset).values()))]


def _counts(value: Any) -> bool:
    return is_rows(value) or isinstance(value, torch.Tensor | int | float) or (type(value) is str and "/" not in value)
