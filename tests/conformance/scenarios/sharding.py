"""Which part of a source each worker gets, by policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

import stratagem as sg
from tests.conformance.scenarios.examples import Reader, Steps, epoch, lists, numbers
from tests.conformance.scenarios.refusals import said
from tests.conformance.scenarios.resplitting import AnyOrder


def files(*names: str) -> sg.FileDataset[int]:
    """Files whose names say what is in them: "0-6" holds 0 … 5."""
    return sg.FileDataset(names, _read)


def _read(name: Any) -> Iterable[int]:
    start, stop = map(int, str(name).split("-"))
    return range(start, stop)


def by_file(strategy: sg.Strategy) -> Steps:
    loader = DataLoader(files("0-6", "6-12"), batch_size=4)
    return epoch(strategy, loader, auto_shard_policy=sg.AutoShardPolicy.FILE)


def by_unequal_files(strategy: sg.Strategy) -> Steps:
    loader = DataLoader(files("0-6", "6-8"), batch_size=4)
    return epoch(strategy, loader, auto_shard_policy=sg.AutoShardPolicy.FILE)


def too_few_files(strategy: sg.Strategy) -> str:
    loader = DataLoader(files("0-6"), batch_size=4)
    options = sg.DistributeOptions(auto_shard_policy=sg.AutoShardPolicy.FILE)
    return said(lambda: strategy.distribute_dataset(loader, options=options))


def no_files(strategy: sg.Strategy) -> str:
    options = sg.DistributeOptions(auto_shard_policy=sg.AutoShardPolicy.FILE)
    return said(lambda: strategy.distribute_dataset(numbers(6, 4), options=options))


def by_data(strategy: sg.Strategy) -> Steps:
    return epoch(strategy, numbers(12, 4), auto_shard_policy=sg.AutoShardPolicy.DATA)


def off(strategy: sg.Strategy) -> Steps:
    return epoch(strategy, numbers(12, 4), auto_shard_policy=sg.AutoShardPolicy.OFF)


def off_and_shuffled(strategy: sg.Strategy) -> Steps:
    return epoch(strategy, numbers(48, 4, shuffle=True), auto_shard_policy=sg.AutoShardPolicy.OFF)


def auto(strategy: sg.Strategy) -> dict[str, Steps]:
    """Of a source made of files, and of three that are not."""
    return {
        "files": epoch(strategy, DataLoader(files("0-6", "6-12"), batch_size=4)),
        "map-style": epoch(strategy, numbers(12, 4)),
        "list": epoch(strategy, lists(12, 4)),
    }


def other_batches(strategy: sg.Strategy) -> str:
    """Each worker's iterable begins with something else."""
    first = 0 if strategy.is_lead else 100
    return said(lambda: epoch(strategy, [torch.arange(first, first + 4)]))


def from_function(strategy: sg.Strategy) -> dict[str, Any]:
    told: list[int] = []

    def make(context: sg.InputContext) -> list[torch.Tensor]:
        each = context.get_per_replica_batch_size(12)
        told.extend([context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync, each])
        return list(torch.arange(24)[context.input_pipeline_id :: context.num_input_pipelines].split(each))

    dataset = strategy.distribute_datasets_from_function(make)
    return {"told": told, "steps": Reader(strategy).epoch(dataset)}


def uneven_functions(strategy: sg.Strategy) -> Steps:
    """The first worker's function has three batches, each other's one."""

    def make(context: sg.InputContext) -> list[torch.Tensor]:
        first = 10 * context.input_pipeline_id
        return lists(3, 1) if not first else [torch.tensor([first])]

    return Reader(strategy).epoch(strategy.distribute_datasets_from_function(make))


def indivisible(strategy: sg.Strategy) -> str:
    def make(context: sg.InputContext) -> list[torch.Tensor]:
        return lists(26, context.get_per_replica_batch_size(13))

    return said(lambda: strategy.distribute_datasets_from_function(make))


def other_policies(strategy: sg.Strategy) -> dict[str, str]:
    """What is said about each policy, for a source that fits it."""
    found = {}
    for policy in sg.AutoShardPolicy:
        source = DataLoader(files("0-6", "6-12"), batch_size=4) if policy.name == "FILE" else numbers(12, 4)
        options = sg.DistributeOptions(auto_shard_policy=policy)
        found[policy.name] = said(lambda: strategy.distribute_dataset(source, options=options))  # noqa: B023
    return found


def leased(strategy: sg.Strategy) -> list[Steps]:
    """Two epochs of batches leased."""
    reader = Reader(strategy)
    options = sg.DistributeOptions(auto_shard_policy=sg.AutoShardPolicy.LEASE)
    dataset = strategy.distribute_dataset(numbers(30, 4, shuffle=True), options=options)
    return [reader.epoch(dataset), reader.epoch(dataset)]


def not_to_be_lent(strategy: sg.Strategy) -> dict[str, str]:
    """What is said about sources and options that the chief cannot lease."""
    skip, ahead = sg.DistributeOptions(on_empty="skip"), sg.DistributeOptions(prefetch=2)
    sampler = AnyOrder(6)
    return {
        "list": said(lambda: strategy.distribute_dataset(lists(6, 4))),
        "stream": said(lambda: strategy.distribute_dataset(DataLoader(files("0-6"), batch_size=4))),
        "sampler": said(lambda: strategy.distribute_dataset(numbers(6, 4, sampler=sampler))),
        "function": said(lambda: strategy.distribute_datasets_from_function(lambda context: lists(6, 4))),
        "skip": said(lambda: strategy.distribute_dataset(numbers(6, 4), options=skip)),
        "prefetch": said(lambda: strategy.distribute_dataset(numbers(6, 4), options=ahead)),
    }
