"""Crews of CPU replicas with their communicators, alone or as one of several workers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from stratagem.strategy.replicas.cross_device_ops import ReductionToOneDevice
from stratagem.strategy.replicas.local_group import LocalGroup
from stratagem.strategy.replicas.local_replicas import ReplicaCommunicator
from stratagem.strategy.replicas.replica_threads import ReplicaThreads
from stratagem.worker.ring.communicator import Communicator

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas of one process."""

    replica_threads: ReplicaThreads
    communicators: list[ReplicaCommunicator]

    def run(self, work: Callable[[ReplicaCommunicator], T]) -> list[T]:
        """One step: calls ``work`` once a replica."""
        for communicator in self.communicators:
            communicator.step += 1
        return self.replica_threads.run([functools.partial(work, communicator) for communicator in self.communicators])


@contextlib.contextmanager
def replicas(size: int, workers: Communicator | None = None) -> Iterator[Replicas]:
    """``size`` CPU replicas, as one of ``workers``."""
    replica_threads = ReplicaThreads([torch.device("cpu")] * size, 0 if workers is None else workers.rank * size)
    communicators: list[ReplicaCommunicator] = []
    try:
        groups = LocalGroup.make(replica_threads, ReductionToOneDevice(), workers)
        communicators += [ReplicaCommunicator(group) for group in groups]
        yield Replicas(replica_threads, communicators)
    finally:
        for communicator in communicators:
            communicator.close()
        replica_threads.close()
