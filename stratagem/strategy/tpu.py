"""TPUs, through torch_xla."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from stratagem.cluster.communication import ReduceOp
from stratagem.cluster.resolvers import ClusterResolver
from stratagem.data.distributed import DistributedDataset
from stratagem.data.loaders import plan_of
from stratagem.errors import CollectiveError, ConfigurationError, StratagemError
from stratagem.strategy.base import Preparation, Strategy
from stratagem.strategy.guard import guard
from stratagem.strategy.replicas.context import ReplicaContext
from stratagem.strategy.ring_units import RingUnits, Share
from stratagem.strategy.values import PerReplica, local_values
from stratagem.strategy.xla_group import XlaGroup, check_torch_xla
from stratagem.strategy.xla_reducer import XlaReducer
from stratagem.worker.reduction.batch_norm import SyncBatchNorm, convert_batch_norm
from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.ring.agreement import agree, same_everywhere
from stratagem.worker.ring.communicator import Communicator, Position
from stratagem.worker.step_meter import StepMeter


class TPUStrategy(Strategy):
    """Synchronous training on TPUs: one replica a process, each with the whole model on its own XLA device.

    NOT EXERCISED ON HARDWARE. The newest torch_xla at this writing is 2.9, and Stratagem needs a newer torch, for which
    there is none; a matching pair is required at run time. The tests run it on a stand-in for torch_xla.

    torch_xla starts the processes and knows where the TPUs are::

        def train(index):
            strategy = sg.TPUStrategy()
            ...

        torch_xla.launch(train)

    The graph of a step is sent off after each ``optimizer.step()``.

    Args:
        resolver: the cluster of hosts, if it should be checked that torch_xla has found replicas on all of them; None:
            what torch_xla has found is right.
        seed: seed of the order of the examples.

    Raises:
        ConfigurationError: torch_xla is not installed or does not match torch, or the cluster is another one.
    """

    def __init__(self, resolver: ClusterResolver | None = None, *, seed: int = 0) -> None:
        check_torch_xla()
        self._group = XlaGroup()
        _check_hosts(resolver, self._group.size)
        self.device = self._group.device
        self.communicator = Communicator(self._group, _explain)
        """Collectives among the replicas; each of them must make the same calls in the same order."""
        self._seed = seed
        self._meter = StepMeter()
        self._reducers: list[XlaReducer] = []
        self._models: list[nn.Module] = []
        self._prepared: set[int] = set()
        self._num_datasets = 0
        self._share: Share | None = None
        self._weight: float | None = None
        self._gradients = "mean"

    @property
    def num_replicas_in_sync(self) -> int:
        return self._group.size

    @property
    def is_lead(self) -> bool:
        return self._group.rank == 0

    def _prepare(self, objects: Sequence[Any], preparation: Preparation) -> None:
        models = [item for item in objects if isinstance(item, nn.Module)]
        optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
        self._gradients = preparation.gradients
        self._models += models
        for model in models:
            _refuse_sparse(model)
            model.to(self.device)
            if preparation.sync_batchnorm:
                convert_batch_norm(model, self.communicator, self._weight_now)
        agree(self.communicator, models, optimizers)
        every = [parameter for optimizer in optimizers for parameter in _parameters_of(optimizer)]
        every += [parameter for model in models for parameter in model.parameters()]
        fresh = [parameter for parameter in dict.fromkeys(every) if id(parameter) not in self._prepared]
        self._prepared.update(map(id, fresh))
        reducer = XlaReducer(fresh, self._group, self.communicator, self._weight_now)
        self._reducers.append(reducer)
        for optimizer in optimizers:
            guard(optimizer, preparation, self._meter)
            optimizer.register_step_pre_hook(lambda *_: _refuse_local_gradients(reducer))
            optimizer.register_step_post_hook(lambda *_: self._group.run_graph())

    def _weight_now(self) -> Weight:
        if self._weight is not None:
            return Weight(self._weight, self._weight)
        if self._gradients == "sum":
            return Weight(1.0, None)
        return Weight(1 / self._group.size if self._share is None else self._share.weight, None)

    def _begin(self, share: Share, batch: Any) -> None:
        self._share, self._weight = share, None
        self.communicator.step += 1

    def distribute_dataset(self, loader: DataLoader[Any]) -> DistributedDataset:
        plan = dataclasses.replace(plan_of(loader, self._group.size, staleness=0), seed=self._seed)
        self._num_datasets += 1
        source = RingUnits(plan, self._num_datasets, self._group.rank, self._meter, self._begin, None)
        return DistributedDataset(loader, plan, self._num_datasets, source, self.device)

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls ``fn`` once. A replica whose share of the batch is empty gets a batch of size 0; its gradient counts
        as zeros, and the buffers of its modules are what they were."""
        with ReplicaContext(self, workers=self.communicator).entered():
            if self._share is None:
                return PerReplica((fn(*args, **(kwargs or {})),))
            if self._share.num_examples:
                return PerReplica((fn(*args, **(kwargs or {})),), (float(self._share.num_examples),))
            return PerReplica((self._run_on_nothing(fn, args, kwargs or {}),), (0.0,))

    def _run_on_nothing(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._buffers_kept():
            try:
                return fn(*args, **kwargs)
            except StratagemError:
                raise
            except Exception as error:
                raise ConfigurationError(
                    f"{getattr(fn, '__name__', 'the step function')} failed on a batch of size 0 ({error}): the last "
                    f"global batch is too small for {self._group.size} replicas. Use DataLoader(drop_last=True), which "
                    "also saves XLA a compilation, or a step that takes size 0"
                ) from error

    @contextlib.contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        modules = [part for model in self._models for part in model.modules() if not isinstance(part, SyncBatchNorm)]
        buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
        kept = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, old in zip(buffers, kept, strict=True):
                    buffer.copy_(old)

    def reduce(self, op: ReduceOp, value: Any, axis: int | None = None) -> torch.Tensor:
        """Reduces a value over all replicas; every replica must call it. See :meth:`Strategy.reduce`."""
        if axis not in (None, 0):
            raise ConfigurationError(f"expected axis None or 0, got {axis!r}")
        (part,) = (torch.as_tensor(part) for part in local_values(value))
        if axis is None:
            return self.communicator.all_reduce(part, op)
        count = self.communicator.all_reduce(torch.tensor(part.shape[0], dtype=torch.float64))
        total = self.communicator.all_reduce(part.sum(0))
        return total / count.to(total) if op is ReduceOp.MEAN else total

    def reduce_mean(self, value: Any) -> torch.Tensor:
        """As :meth:`Strategy.reduce_mean`, over all replicas; every replica must call it."""
        (part,) = (torch.as_tensor(part).detach() for part in local_values(value))
        share = value.shares[0] if isinstance(value, PerReplica) and value.shares else 1.0
        weighted = part.cpu() * share if share else torch.zeros(part.shape)
        pair = torch.cat([weighted.flatten().double(), torch.tensor([share], dtype=torch.float64)])
        total = self.communicator.all_reduce(pair)
        mean = (total[:-1] / total[-1]).view(part.shape).to(part)
        if mean.numel() == 1:
            self._meter.newest_loss = mean
        return mean

    def set_weight(self, weight: float) -> None:
        super().set_weight(weight)
        self._weight = weight

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for reducer in self._reducers:
                stack.enter_context(reducer.no_sync())
            yield

    def report(self, **metrics: float) -> None:
        self._meter.metrics.update({name: float(value) for name, value in metrics.items()})

    def replicas_agree(self, *modules: nn.Module) -> bool:
        """Whether every replica has the same bits in every parameter; every replica must call it."""
        return same_everywhere(self.communicator, modules)


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


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigurationError(f"XLA has no sparse gradients: give {name or 'the embedding'} sparse=False")


def _refuse_local_gradients(reducer: XlaReducer) -> None:
    if reducer.has_pending:
        raise ConfigurationError(
            "optimizer.step() after backward() inside no_sync(): those gradients are this replica's alone, and the "
            "replicas would part. Make the last backward() before a step outside of no_sync()"
        )
