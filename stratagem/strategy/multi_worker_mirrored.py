"""Synchronous training on several workers: each has the whole model, gradients are all-reduced during backward."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from stratagem.cluster.communication import CommunicationOptions, ReduceOp
from stratagem.cluster.config import WorkerConfig
from stratagem.cluster.resolvers import ClusterResolver
from stratagem.cluster.task import TaskId
from stratagem.data.distributed import DistributedDataset
from stratagem.data.loaders import plan_of
from stratagem.errors import ConfigurationError, StratagemError
from stratagem.strategy import roles
from stratagem.strategy.base import Preparation, Strategy
from stratagem.strategy.devices import default_device, parse_device
from stratagem.strategy.guard import guard
from stratagem.strategy.ring_units import RingUnits, Share
from stratagem.strategy.values import PerReplica, local_values
from stratagem.worker.reduction.batch_norm import SyncBatchNorm, convert_batch_norm
from stratagem.worker.reduction.compression import GradientCompression, compression_named
from stratagem.worker.reduction.reducer import GradientReducer, Weight
from stratagem.worker.ring.agreement import agree, same_everywhere
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.runtime import WorkerRuntime

BUCKET_BYTES = 25 << 20


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training: after ``backward()`` every worker's ``.grad`` is the gradient of the global batch.

    The constructor starts this task's server, joins the cluster, meets the other workers and opens the lanes to them.
    In a process whose task type is chief it serves until the job ends and then ends the process.

    Args:
        cluster_resolver: knows the cluster and this task; None: the environment (TF_CONFIG, torchrun's variables).
        communication_options: lanes, bucket size, timeout; the same on every worker. None: what the flags of
            ``stratagem run`` and ``stratagem worker`` say.
        device: where this worker computes; None: ``cuda:LOCAL_RANK`` if there is one, else the CPU.
        compression: of gradients on the way: "bf16", "fp16", "int8", "powersgd", "topk" or a
            :class:`GradientCompression`; None: what ``--compression`` says, else none.

    Raises:
        ConfigurationError: there is no cluster, it has ps, or the workers want different things.
        ClusterTimeoutError: the cluster did not come up in time; names who is missing.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        device: str | torch.device | None = None,
        compression: str | GradientCompression | None = None,
    ) -> None:
        config, cluster = roles.join_as(cluster_resolver)
        if cluster.num_ps:
            raise ConfigurationError(
                f"MultiWorkerMirroredStrategy trains without parameter servers, but the cluster has {cluster.num_ps} "
                "ps; use ParameterServerStrategy (--strategy ps) or leave the ps out"
            )
        self.device = default_device() if device is None else parse_device(device)
        self.options = communication_options or options_from(config)
        chosen = config.compression if compression is None else compression
        self._compression = compression_named(chosen) if isinstance(chosen, str) and chosen else chosen or None
        self._runtime = WorkerRuntime(config, cluster)
        roles.say_goodbye_at_exit(self._runtime)
        self.communicator: Communicator = self._runtime.ring.form(self.options, self.device, config.start_timeout_s)
        """Collectives among the workers; every worker must make the same calls in the same order."""
        self._reducers: list[GradientReducer] = []
        self._num_datasets = 0
        self._share: Share | None = None
        self._weight: float | None = None
        self._gradients = "mean"
        self._models: list[torch.nn.Module] = []
        self._prepared: set[int] = set()

    @property
    def num_replicas_in_sync(self) -> int:
        return self.communicator.size

    @property
    def is_lead(self) -> bool:
        return self._runtime.is_lead()

    @property
    def exposed_communication(self) -> float:
        return self._runtime.meter.exposed_fraction

    @property
    def task(self) -> TaskId:
        """This worker."""
        return self._runtime.task

    def _prepare(self, objects: Sequence[Any], preparation: Preparation) -> None:
        models = [item for item in objects if isinstance(item, torch.nn.Module)]
        optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
        self._gradients = preparation.gradients
        self._models += models
        for model in models:
            model.to(self.device)
            if preparation.sync_batchnorm:
                convert_batch_norm(model, self.communicator, self._weight_now)
        agree(self.communicator, models, optimizers)
        every = [*(p for optimizer in optimizers for p in _parameters_of(optimizer))]
        every += [parameter for model in models for parameter in model.parameters()]
        fresh = [parameter for parameter in every if id(parameter) not in self._prepared]
        self._prepared.update(map(id, fresh))
        reducer = GradientReducer(
            fresh,
            self.communicator,
            meter=self._runtime.meter,
            weight=self._weight_now,
            bucket_bytes=self.options.bytes_per_pack or BUCKET_BYTES,
            compression=self._compression,
            sparse=_sparse_tables(models),
            groups=[_parameters_of(optimizer) for optimizer in optimizers],
            early=not preparation.sync_batchnorm,
        )
        self._reducers.append(reducer)
        for optimizer in optimizers:
            guard(optimizer, preparation, self._runtime.meter)
            optimizer.register_step_pre_hook(lambda *_: _refuse_local_gradients(reducer))
            optimizer.register_step_post_hook(lambda optimizer, *_: reducer.committed(_parameters_of(optimizer)))

    def _weight_now(self) -> Weight:
        if self._weight is not None:
            return Weight(self._weight, self._weight)
        if self._gradients == "sum":
            return Weight(1.0, None)
        return Weight(1 / self.communicator.size if self._share is None else self._share.weight, None)

    def _begin(self, share: Share, batch: Any) -> None:
        self._share, self._weight = share, None
        self.communicator.step += 1
        for reducer in self._reducers:
            reducer.refresh()

    def distribute_dataset(self, loader: DataLoader[Any]) -> DistributedDataset:
        plan = plan_of(loader, self.communicator.size, staleness=0)
        self._num_datasets += 1
        dataset, chief = self._num_datasets, self._runtime.chief
        plan = dataclasses.replace(plan, seed=chief.open_dataset(dataset, plan))

        def report(epoch: int, accepted: Sequence[int]) -> None:
            chief.leave_epoch(dataset, epoch, accepted)

        source = RingUnits(
            plan,
            dataset,
            self.communicator.rank,
            self._runtime.meter,
            self._begin,
            report if self.communicator.rank == 0 else None,
        )
        return DistributedDataset(loader, plan, dataset, source, self.device)

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls ``fn`` once. A worker whose share of the batch is empty gets a batch of size 0; its gradient counts
        as zeros, and the buffers of its modules are what they were."""
        if self._share is None:
            return super().run(fn, args, kwargs)
        if self._share.num_examples:
            return PerReplica(super().run(fn, args, kwargs).values, (float(self._share.num_examples),))
        with self._buffers_kept():
            try:
                return PerReplica(super().run(fn, args, kwargs).values, (0.0,))
            except StratagemError:
                raise
            except Exception as error:
                raise ConfigurationError(
                    f"{getattr(fn, '__name__', 'the step function')} failed on a batch of size 0 ({error}): the last "
                    f"global batch is too small for {self.communicator.size} workers. Use DataLoader(drop_last=True), "
                    "or a step that takes size 0 (flatten(1) instead of view(batch, -1))"
                ) from error

    @contextlib.contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        # Statistics that all ranks form together must be the same on all, whatever a rank's own share.
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
        """Reduces a value over all replicas of all workers; every worker must call it. See :meth:`Strategy.reduce`."""
        if axis not in (None, 0):
            raise ConfigurationError(f"expected axis None or 0, got {axis!r}")
        (part,) = (torch.as_tensor(part) for part in local_values(value))
        if axis is None:
            return self.communicator.all_reduce(part, op)
        count = self.communicator.all_reduce(torch.tensor(part.shape[0], dtype=torch.float64))
        total = self.communicator.all_reduce(part.sum(0))
        return total / count.to(total.dtype) if op is ReduceOp.MEAN else total

    def reduce_mean(self, value: Any) -> torch.Tensor:
        """As :meth:`Strategy.reduce_mean`, over all replicas of all workers; every worker must call it."""
        (part,) = (torch.as_tensor(part).detach() for part in local_values(value))
        share = value.shares[0] if isinstance(value, PerReplica) and value.shares else 1.0
        weighted = part * share if share else torch.zeros_like(part)
        pair = torch.cat([weighted.flatten().double(), torch.tensor([share], dtype=torch.float64)])
        total = self.communicator.all_reduce(pair)
        mean = (total[:-1] / total[-1]).view(part.shape).to(part.dtype)
        if mean.numel() == 1:
            self._saw_loss(mean)
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

    def _saw_loss(self, loss: torch.Tensor) -> None:
        self._runtime.meter.newest_loss = loss

    def report(self, **metrics: float) -> None:
        self._runtime.meter.metrics.update({name: float(value) for name, value in metrics.items()})

    def replicas_agree(self, *modules: torch.nn.Module) -> bool:
        """Whether every worker has the same bits in every parameter; every worker must call it."""
        return same_everywhere(self.communicator, modules)


def options_from(config: WorkerConfig) -> CommunicationOptions:
    """What the flags of a worker say about communication."""
    return CommunicationOptions(
        bytes_per_pack=config.bucket_bytes,
        timeout_seconds=config.collective_timeout_s,
        transport=config.transport,
        wire_dtype=config.wire_dtype,
        chunk_bytes=config.chunk_bytes,
        stripes=config.stripes,
    )


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _refuse_local_gradients(reducer: GradientReducer) -> None:
    if reducer.has_pending:
        raise ConfigurationError(
            "optimizer.step() after backward() inside no_sync(): those gradients are this worker's alone, and the "
            "workers would part. Make the last backward() before a step outside of no_sync()"
        )


def _sparse_tables(models: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    tables = [module for model in models for module in model.modules()]
    weights = [table.weight for table in tables if isinstance(table, nn.Embedding | nn.EmbeddingBag) and table.sparse]
    return [weight for weight in weights if isinstance(weight, nn.Parameter)]
