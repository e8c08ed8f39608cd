"""TPUs, through torch_xla."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from stratagem.arguments import known_arguments
from stratagem.cluster.communication import ReduceOp
from stratagem.cluster.resolvers import ClusterResolver
from stratagem.data.nested import tensors
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.strategy.model_parts import all_parameters, sparse_embeddings
from stratagem.strategy.synchronous import SynchronousStrategy
from stratagem.worker.interrupts import preemption
from stratagem.worker.reduction.backward import Backward, BackwardReducer
from stratagem.worker.reduction.backward_status import BackwardStatus
from stratagem.worker.reduction.gradient_slot import OwnSlot
from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.ring.communicator import Communicator, Position
from stratagem.worker.ring.group import Group, Tag
from stratagem.worker.step_meter import StepMeter


@known_arguments
class TPUStrategy(SynchronousStrategy):
    """Synchronous training on TPUs: one replica per process, each with the whole model on its own XLA device.

    NOT EXERCISED ON HARDWARE. What ran, on torch 2.9.1 and torch_xla 2.9.0 (the newest at this writing; torch has to
    match) with the CPU as XLA device: one replica by ``torch_xla.launch``, and SPMD over 2 and 4 logical devices
    (``make test-xla``). Several replicas in sync ran only on a stand-in for torch_xla, whose replicas are threads.

    torch_xla starts the processes and knows where the TPUs are::

        def train(index):
            strategy = sg.TPUStrategy()
            ...

        torch_xla.launch(train)

    Or one process has all devices of a host (SPMD). It is one replica, whose step gets the global batch; datasets
    shard it over the devices, and the compiler inserts the transfers. A batch that the number of devices does not
    divide is computed on each of them::

        torch_xla.runtime.use_spmd()
        strategy = sg.TPUStrategy()

    The graph of a step is dispatched after each ``optimizer.step()``.

    Args:
        resolver: the cluster of hosts, to check that torch_xla has found replicas on all of them; None: no check.
        seed: seed of the order of the examples; None: STRATAGEM_SEED, else 0.

    Raises:
        ConfigurationError: torch_xla is not installed or does not match torch, the cluster is another one, or there are
            several hosts under SPMD.
    """

    communicator: Communicator

    def __init__(self, resolver: ClusterResolver | None = None, *, seed: int | None = None) -> None:
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
        """Number of XLA devices that a batch of this process is sharded over: 1, or all of the host under SPMD."""
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
        parameters = self._fresh(replica, all_parameters(models, groups))
        return XlaReducer(parameters, self._group, self.communicator, weight, self._meter)


class XlaReducer(BackwardReducer[Backward]):
    """When ``backward()`` returns, ``p.grad`` is the global gradient, still lazy.

    As :mod:`stratagem.worker.reduction.reducer` (docs/protocol.md 15), but without buckets: XLA compiles the whole step
    and overlaps by itself. All that crosses to the host is one small vector at the end of a backward. ``parameters``:
    the same on every replica, in the same order; dense gradients; ``communicator``: over the same group, for what
    replicas tell each other first; ``weight``: how much this replica counts; asked once in each backward.
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


def check_torch_xla() -> None:
    """Makes sure that torch_xla is there and was built for this torch; a ConfigurationError says what to install."""
    series = _series(torch.__version__)
    try:
        version = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        try:
            version = str(importlib.import_module("torch_xla").__version__)
        except ModuleNotFoundError:
            raise ConfigurationError(
                f"TPUStrategy needs torch_xla, which is not installed: pip install 'torch_xla[tpu]~={series}.0'. Its "
                f"version has to match that of torch, {torch.__version__}; if there is none, install the torch that "
                "the newest torch_xla matches"
            ) from None
    if _series(version) != series:
        raise ConfigurationError(
            f"torch_xla {version} does not match torch {torch.__version__}: both need the same first two numbers. "
            f"Install torch_xla {series}, or torch {_series(version)}"
        )


def _series(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


class XlaGroup(Group):
    """The replicas of a torch_xla job, one process for each, as ranks. Implements
    :class:`stratagem.worker.ring.group.Group`; every call moves its values to the device and back.

    That is for what is small or rare. Gradients stay on the device: :meth:`sum_on_device`. torch_xla has no timeout: a
    replica that never comes is waited for; one that is somewhere else is told by its tag.
    """

    name = "torch_xla"
    timeout_s = math.inf
    """XLA waits as long as it likes."""

    def __init__(self) -> None:
        self._xla = importlib.import_module("torch_xla")
        self._model = importlib.import_module("torch_xla.core.xla_model")
        runtime = importlib.import_module("torch_xla.runtime")
        self.rank: int = runtime.global_ordinal()
        self.size: int = runtime.world_size()
        self.device: torch.device = self._xla.device()
        """Of this replica."""
        self.num_devices = 1
        """Over which a batch of this replica is sharded: more than one under SPMD."""
        if runtime.is_spmd():
            if runtime.process_count() > 1:
                raise ConfigurationError(
                    "TPUStrategy with SPMD runs on one host, and here there are more: leave out "
                    "torch_xla.runtime.use_spmd(), and start a process for each device with torch_xla.launch"
                )
            self.num_devices = runtime.global_runtime_device_count()
            self._spmd = importlib.import_module("torch_xla.distributed.spmd")
            self._mesh = self._spmd.Mesh(np.arange(self.num_devices), (self.num_devices,), ("data",))

    # -- on the device ------------------------------------------------------------------------------------------

    def sum_on_device(self, tensors: list[torch.Tensor]) -> None:
        """Sums each tensor over the replicas, in place; lazily, as part of the step's graph."""
        if tensors:
            self._model.all_reduce(self._model.REDUCE_SUM, tensors)

    def shard(self, tensor: torch.Tensor) -> None:
        """Lays the first dimension of a tensor on the device over all devices, if it divides; else all have all of it.

        XLA takes others too, but its partitioner aborts the process on some programs with them (torch_xla 2.9: a
        scatter by 2 indices over 4 devices).
        """
        if self.num_devices > 1 and tensor.dim() and tensor.shape[0] and tensor.shape[0] % self.num_devices == 0:
            self._spmd.mark_sharding(tensor, self._mesh, ("data", *[None] * (tensor.dim() - 1)))

    def run_graph(self) -> None:
        """Sends off everything that was only recorded so far."""
        self._xla.sync()

    # -- Group --------------------------------------------------------------------------------------------------

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, op: ReduceOp, tag: Tag) -> None:
        self.barrier(tag)
        wide = source.float() if source.dtype in (torch.float16, torch.bfloat16) else source
        if op is ReduceOp.PRODUCT:  # TPUs have no such reduction
            out.copy_(self._gathered(wide).prod(0))
            return
        out.copy_(self._model.all_reduce(getattr(self._model, f"REDUCE_{op.name}"), wide.to(self.device)).cpu())

    def all_gather(self, source: torch.Tensor, outs: Sequence[torch.Tensor], tag: Tag) -> None:
        self.barrier(tag)
        padded = source.new_zeros(max(out.numel() for out in outs))
        padded[: source.numel()] = source
        for row, out in zip(self._gathered(padded), outs, strict=True):
            out.copy_(row[: out.numel()])

    def broadcast(self, buffer: torch.Tensor, root: int, tag: Tag) -> None:
        self.barrier(tag)
        buffer.copy_(self._gathered(buffer)[root])

    def all_to_all(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], tag: Tag) -> None:
        self.barrier(tag)
        lengths = self._gathered(torch.tensor([source.numel() for source in sources], dtype=torch.int64))
        padded = sources[0].new_zeros(int(lengths.sum(1).max()))
        padded[: sum(source.numel() for source in sources)] = torch.cat(list(sources))
        for row, counts, out in zip(self._gathered(padded), lengths.tolist(), outs, strict=True):
            out.copy_(row.split([*counts, row.numel() - sum(counts)])[self.rank])

    def close(self, reason: str) -> None:
        """Nothing to do: the runtime belongs to the process."""

    def barrier(self, tag: Tag) -> None:
        """Also tells when the replicas are not in the same collective."""
        tags = self._gathered(torch.tensor([tag.ordinal, tag.fingerprint], dtype=torch.int64)).tolist()
        for rank, other in enumerate(tags):
            if other != tags[self.rank]:
                raise CollectiveError(
                    f"replica {rank} is at collective {other[0]}, replica {self.rank} at {tag.ordinal}, or at a "
                    "different one with that number: every replica has to make the same calls",
                    rank,
                )

    def _gathered(self, source: torch.Tensor) -> torch.Tensor:
        """One row for each rank."""
        if self.size == 1 or not source.numel():
            return source.expand(self.size, -1)
        rows: torch.Tensor = self._model.all_gather(source.to(self.device).unsqueeze(0), 0).cpu()
        return rows
