"""What workers and replicas get of a source: workers are threads, values are lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stratagem.data.distribute import distribute
from stratagem.data.options import DistributeOptions
from stratagem.data.placement import InputPlacement, Listener, StepShare
from stratagem.data.split_dataset import SplitDataset
from stratagem.data.values import local_values
from stratagem.worker.ring.communicator import Communicator
from tests.conformance.scenarios.examples import Numbers, Steps
from tests.unit.ring.thread_group import run_ranks

CPU = torch.device("cpu")


class Epochs(Numbers):
    """Each example is the epoch that it is read in."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return self.epoch


class Shares(Listener):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.begun: list[StepShare] = []
        self.events: list[str] = []

    def start_epoch(self, epoch: int) -> None:
        self.events.append(f"start {epoch}")

    def begin(self, share: StepShare, batch: Any) -> None:
        self.begun.append(share)
        self.events.append(f"begin {share.step}")

    def done(self, share: StepShare) -> None:
        self.events.append(f"done {share.step}")

    def end_epoch(self, complete: bool) -> None:
        self.events.append("complete" if complete else "left")


def batches(num_examples: int, size: int) -> list[torch.Tensor]:
    """Global batches of 0, 1, 2, …"""
    return list(torch.arange(num_examples).split(size))


def values(item: Any) -> list[list[int]]:
    """The examples of each local replica in one item."""
    return [(batch[0] if isinstance(batch, list | tuple) else batch).tolist() for batch in local_values(item)]


def steps_of(dataset: SplitDataset) -> Steps:
    """One epoch."""
    return [values(item) for item in dataset]


def on_workers(
    num_workers: int,
    work: Callable[[InputPlacement], Any],
    replicas: int = 1,
    seed: int = 0,
) -> list[Any]:
    """Runs ``work`` on each worker, told where it stands."""

    def run(communicator: Communicator) -> Any:
        return work(InputPlacement((CPU,) * replicas, num_workers, communicator.rank, communicator, lambda plan: seed))

    if num_workers == 1:
        return [work(InputPlacement((CPU,) * replicas, seed=lambda plan: seed))]
    return run_ranks(num_workers, run)


def epoch(
    make_source: Callable[[], Any],
    num_workers: int = 1,
    replicas: int = 1,
    options: DistributeOptions | None = None,
    batch_size: int | None = None,
) -> list[Steps]:
    """What each worker gets in one epoch."""

    def work(placement: InputPlacement) -> Steps:
        return steps_of(distribute(make_source(), placement=placement, options=options, batch_size=batch_size))

    return on_workers(num_workers, work, replicas)
