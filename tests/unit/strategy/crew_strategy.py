"""The least strategy that has several local replicas: what variables are tested with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.data.values import PerReplica, local_values
from stratagem.strategy.cross_replica import CrossReplica
from stratagem.strategy.default import DefaultStrategy
from stratagem.strategy.replicas.context import ReplicaContext, get_replica_context
from stratagem.strategy.replicas.cross_device_ops import ReductionToOneDevice
from stratagem.strategy.replicas.replica_threads import ReplicaThreads
from stratagem.worker.ring.communicator import Communicator


class ReplicaThreadsStrategy(DefaultStrategy):
    """Runs a step on the threads of CPU replicas; with a communicator, on those of other workers too.

    Args:
        num_local: replicas in this process.
        communicator: to the other workers.
    """

    def __init__(self, num_local: int, communicator: Communicator | None = None) -> None:
        self._devices = (torch.device("cpu"),) * num_local
        self.communicator = communicator
        self.replica_threads = ReplicaThreads(self._devices)
        self.num_reduced = 0
        self.place: torch.device | None = None
        self._ops = ReductionToOneDevice()

    @property
    def local_devices(self) -> tuple[torch.device, ...]:
        return self._devices

    @property
    def parameter_device(self) -> torch.device | None:
        return self.place

    @property
    def num_replicas_in_sync(self) -> int:
        return len(self.local_devices) * (1 if self.communicator is None else self.communicator.size)

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        def step(replica: int) -> Any:
            context = ReplicaContext(self, self.replica_threads, replica, self._ops)
            return context.call(lambda: fn(*args, **kwargs))

        work = [functools.partial(step, replica) for replica in range(len(self.local_devices))]
        return PerReplica(tuple(self.replica_threads.run(work)))

    def reduce(self, op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        self.num_reduced += 1
        return CrossReplica(len(self._devices), self._ops, self.communicator).reduce(ReduceOp(op), value, axis)


def replica_id() -> int:
    """Of the calling replica, in the sync group."""
    context = get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def values_of(result: Any) -> list[float]:
    """The numbers that the local replicas returned."""
    return [float(value) for value in local_values(result)]
