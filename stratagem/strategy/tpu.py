"""TPUs, through torch_xla."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from stratagem.arguments import known_arguments
from stratagem.cluster.resolvers import ClusterResolver
from stratagem.data.nested import tensors
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.strategy.model_parts import sparse_embeddings
from stratagem.strategy.synchronous import SynchronousStrategy
from stratagem.strategy.xla_group import XlaGroup, check_torch_xla
from stratagem.worker.preemption_request import preemption
from stratagem.worker.reduction.backward import Backward, BackwardReducer
from stratagem.worker.reduction.backward_status import BackwardStatus
from stratagem.worker.reduction.gradient_slot import OwnSlot
from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.ring.communicator import Communicator, Position
from stratagem.worker.step_meter import StepMeter


@known_arguments
class TPUStrategy(SynchronousStrategy):
    """Synchronous training on TPUs: one replica a process, each with the whole model on its own XLA device.

    NOT EXERCISED ON HARDWARE. What ran, on torch 2.9.1 and torch_xla 2.9.0 (the newest at this writing; torch has to
    match) with the CPU as XLA device: one replica by ``torch_xla.launch``, and SPMD over 2 and 4 logical devices
    (``make test-xla``). Several replicas in sync ran on a stand-in for torch_xla only, whose replicas are threads.

    torch_xla starts the processes and knows where the TPUs are::

        def train(index):
            strategy = sg.TPUStrategy()
            ...

        torch_xla.launch(train)

    Or one process has all devices of a host (SPMD). It is one replica, whose step gets the global batch; datasets lay
    it over the devices, and the compiler adds what has to travel. A batch that the number of devices does not divide is
    computed on each of them::

        torch_xla.runtime.use_spmd()
        strategy = sg.TPUStrategy()

    The graph of a step is sent off after each ``optimizer.step()``.

    Args:
        resolver: the cluster of hosts, if it should be checked that torch_xla has found replicas on all of them; None:
            what torch_xla has found is right.
        seed: seed of the order of the examples.

    Raises:
        ConfigurationError: torch_xla is not installed or does not match torch, the cluster is another one, or there are
            several hosts under SPMD.
    """

    communicator: Communicator

    def __init__(self, resolver: ClusterResolver | None = None, *, seed: int = 0) -> None:
        check_torch_xla()
        self._group = XlaGroup()
        _check_hosts(resolver, self._group.size)
        self.device = self._group.device
        super().__init__((self.device,), StepMeter(), workers=Communicator(self._group, _explain), seed=seed)

    @property
    def is_lead(self) -> bool:
        return self._group.rank == 0

    @property
    def num_devices(self) -> int:
        """XLA devices that a batch of this process is laid over: 1, or all of the host under SPMD."""
        return self._group.num_devices

    def _placed(self, batch: Any) -> None:
        for tensor in tensors(batch):
            self._group.shard(tensor)

    def _before_placing(self, models: Sequence[nn.Module]) -> None:
        for name, _ in sparse_embeddings(models):
            raise ConfigurationError(f"XLA has no sparse gradients: give {name} sparse=False")

    def _make_reducer(
        self,
        replica: int,
        models: Sequence[nn.Module],
        groups: Sequence[Sequence[nn.Parameter]],
        weight: Callable[[], Weight],
        early: bool,
    ) -> XlaReducer:
        parameters = self._fresh_parameters(replica, models, groups)
        return XlaReducer(parameters, self._group, self.communicator, weight, self._meter)


class XlaReducer(BackwardReducer[Backward]):
    """When ``backward()`` returns, ``p.grad`` is the global gradient, still lazy.

    As :mod:`stratagem.worker.reduction.reducer` (docs/protocol.md 15), but without buckets: XLA compiles the whole step
    and overlaps by itself. All that crosses to the host is one small vector at the end of a backward.

    Args:
        parameters: the same on every replica, in the same order; dense gradients.
        communicator: over the same group, for what replicas tell each other first.
        weight: how much this replica counts; asked once in each backward.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        group: XlaGroup,
        communicator: Communicator,
        weight: Callable[[], Weight],
        meter: StepMeter,
    ) -> None:
        super().__init__(weight, meter, Backward)
        self._group = group
        self._communicator = communicator
        self._slots: list[_LazySlot] = [_LazySlot(parameter, index) for index, parameter in enumerate(parameters)]
        for slot in self._slots:
            if slot.parameter.requires_grad:
                self._hook(slot)

    def refresh(self) -> None:
        """Parameters that need gradients later stay out: XLA would have to compile the step again."""

    def committed(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """A step was made: its graph is sent off."""
        self._group.run_graph()

    def _synchronise(self, backward: Backward) -> None:
        status, total = self._exchange(backward)
        merged = status.decode(total, self._group.size)
        if merged.wants_end:
            preemption.agreed = True
        present = [slot for slot in self._slots if merged.present[slot.index]]
        gradients = [slot.contribution() for slot in present]
        self._group.sum_on_device(gradients)
        if merged.divisor:
            for gradient in gradients:
                gradient.div_(merged.divisor)
        reduced = {slot.index: gradient for slot, gradient in zip(present, gradients, strict=True)}
        for slot in self._slots:
            if slot.taken:
                slot.merge(reduced.get(slot.index))

    def _tell_failure(self, backward: Backward) -> None:
        self._exchange(backward, failed=True)

    def _exchange(self, backward: Backward, failed: bool = False) -> tuple[BackwardStatus, torch.Tensor]:
        status = BackwardStatus(
            self._present(), backward.weights, 0, 1, self._num_reduced, failed, preemption.requested
        )
        self._num_reduced += 1
        return status, self._communicator.all_reduce(status.encode(self._group.rank, self._group.size))


class _LazySlot(OwnSlot):
    """The gradient is lazy."""

    def contribution(self) -> torch.Tensor:
        """What is summed in place: zeros where this replica has no gradient."""
        self.take()
        if self._own is None or not (self.fired or self.pending):
            return torch.zeros_like(self.parameter.detach())
        return self._own if self.fired else self._own.clone()


def _check_hosts(resolver: ClusterResolver | None, num_replicas: int) -> None:
    cluster = resolver.cluster_spec() if resolver is not None else None
    if cluster is None:
        return
    if cluster.num_ps:
        raise ConfigurationError(
            f"TPUStrategy trains without parameter servers, but the cluster has {cluster.num_ps} ps; leave them out"
        )
    if num_replicas % cluster.num_workers:
        raise ConfigurationError(
            f"the cluster has {cluster.num_workers} workers, each a host with as many TPUs as the others, but "
            f"torch_xla has found {num_replicas} replicas; start the script with torch_xla.launch on every host"
        )


def _explain(error: CollectiveError, position: Position) -> CollectiveError:
    return CollectiveError(f"{error} (this replica is at {position})", error.rank)
