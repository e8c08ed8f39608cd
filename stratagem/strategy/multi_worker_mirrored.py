"""Synchronous training on several workers: each replica has the whole model, gradients are reduced during backward."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stratagem.arguments import check_kind, checked
from stratagem.cluster.communication import CommunicationImplementation, CommunicationOptions
from stratagem.cluster.job_rules import check_healing
from stratagem.cluster.resolvers import ClusterResolver
from stratagem.cluster.task import TaskId
from stratagem.cluster.units import Plan
from stratagem.data.split_dataset import SplitDataset
from stratagem.strategy import roles
from stratagem.strategy.devices import named_devices, parse_devices
from stratagem.strategy.one_cycle import watch_one_cycles
from stratagem.strategy.one_process import EvaluatorStrategy
from stratagem.strategy.replicas.cross_device_ops import CrossDeviceOps
from stratagem.strategy.synchronous import SynchronousStrategy
from stratagem.worker.reduction.compression import GradientCompression, compression_named
from stratagem.worker.reduction.gradient_layout import BUCKET_BYTES
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.runtime import WorkerRuntime
from stratagem.worker.step_meter import StepMeter

NUM_UNTOLD = 4096
"""Newest steps of which a worker tells the chief when it becomes the lead, for the one before may not have told."""


@checked
class MultiWorkerMirroredStrategy(SynchronousStrategy):
    """Synchronous training: after ``backward()`` every replica's ``.grad`` is the gradient of the global batch.

    The constructor starts this task's server, joins the cluster, meets the other workers and opens the lanes to them.
    In a process whose task type is chief it serves until the job ends and then exits the process. A worker with several
    devices has a replica on each; they reduce among themselves first, then once with the other workers. Without a
    cluster there is one worker, this process. In an evaluator there is one replica, which evaluates and does not train.

    Args:
        cluster_resolver: knows the cluster and this task; None: the environment (TF_CONFIG, torchrun's variables). It
            may also be the implementation, as in ``MultiWorkerMirroredStrategy(CollectiveCommunication.RING)``.
        communication_options: lanes, bucket size, timeout; the same on every worker. None: the flags of
            ``stratagem run`` and ``stratagem worker``.
        communication: the implementation alone, under TensorFlow's former name for the argument.
        devices: where this worker computes, one replica each; every worker needs the same number. None: the value of
            ``--devices``, else its part of the GPUs of the host (LOCAL_RANK of LOCAL_WORLD_SIZE), else the CPU.
        cross_device_ops: how the replicas of this worker reduce among themselves; see :class:`MirroredStrategy`.
        compression: of gradients in transit: "bf16", "fp16", "int8", "powersgd", "topk" or a
            :class:`GradientCompression`; None: the value of ``--compression``, else none.

    Raises:
        ConfigurationError: the cluster has ps, or the workers' settings differ.
        ClusterTimeoutError: the cluster did not come up in time; names the missing tasks.
    """

    communicator: Communicator
    """Collectives among the workers; None without a cluster."""

    def __new__(cls, cluster_resolver: Any = None, *_: Any, **__: Any) -> Any:
        resolver = None if isinstance(cluster_resolver, CommunicationImplementation | str) else cluster_resolver
        return EvaluatorStrategy() if roles.is_evaluator(resolver) else super().__new__(cls)

    def __init__(
        self,
        cluster_resolver: ClusterResolver | CommunicationImplementation | str | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        communication: CommunicationImplementation | str | None = None,
        devices: str | torch.device | Sequence[str | torch.device] | None = None,
        cross_device_ops: CrossDeviceOps | type[CrossDeviceOps] | None = None,
        compression: str | GradientCompression | None = None,
    ) -> None:
        if isinstance(cluster_resolver, CommunicationImplementation | str):
            communication, cluster_resolver = cluster_resolver, None
        config, cluster = roles.join_or_alone(cluster_resolver)
        own = parse_devices(named_devices(config.devices) if devices is None else devices)
        self.options = communication_options or config.communication_options(
            bytes_per_pack=config.bucket_bytes, timeout_seconds=config.collective_timeout_s
        )
        if communication is not None:
            self.options = dataclasses.replace(self.options, implementation=CommunicationImplementation(communication))
        chosen = config.compression if compression is None else compression
        check_kind(chosen, str, GradientCompression)
        self._runtime = None if cluster is None else WorkerRuntime(config, cluster)
        if self._runtime is not None:
            roles.say_goodbye_at_exit(self._runtime)
        workers = self._runtime.ring.form(self.options, own[0], config.start_timeout_s) if self._runtime else None
        if workers is not None and workers.healing is not None:
            check_healing(len(own), chosen, workers.group.name == "nccl")
            watch_one_cycles()
        super().__init__(
            own,
            StepMeter() if self._runtime is None else self._runtime.meter,
            workers=workers,
            ops=cross_device_ops,
            bucket_bytes=self.options.bytes_per_pack or BUCKET_BYTES,
            compression=compression_named(chosen) if isinstance(chosen, str) and chosen else chosen or None,
        )
        self._meter.in_step = True

    @property
    def is_lead(self) -> bool:
        return self._runtime is None or self._runtime.is_lead()

    @property
    def task(self) -> TaskId:
        """This worker."""
        return TaskId("worker", 0) if self._runtime is None else self._runtime.task

    @property
    def wire(self) -> dict[str, str]:
        alone = self._runtime is None
        return {} if alone else {"lane": self.communicator.group.name, "wire_dtype": self.options.wire_dtype}

    def _label(self, replica: int) -> str:
        return str(self.task) if len(self.local_devices) == 1 else f"{self.task}, {super()._label(replica)}"

    def _seed_of_dataset(self, ordinal: int, plan: Plan | None) -> int:
        if self._runtime is None:
            return super()._seed_of_dataset(ordinal, plan)
        if plan is None or (self._newcomers is not None and self._newcomers.is_new):
            return 0  # a newcomer gets it from the others
        return self._runtime.chief.open_dataset(ordinal, plan)

    def _report(self, ordinal: int, dataset: SplitDataset) -> Callable[[int, Sequence[int]], None] | None:
        plan = dataset.plan
        if plan is None or self._runtime is None:
            return None
        chief = self._runtime.chief
        untold: collections.deque[tuple[int, int]] = collections.deque(maxlen=NUM_UNTOLD)

        def report(epoch: int, steps: Sequence[int]) -> None:
            untold.extend((epoch, step) for step in steps)
            if not self.is_lead:  # a newcomer may be rank 0
                return
            planned = [told for told in untold if told[1] < plan.num_batches]  # not what comes again after a loss
            for at in sorted({epoch for epoch, _ in untold}):
                units = [unit for epoch, step in planned if epoch == at for unit in plan.units_of(step)]
                chief.report_units(ordinal, at, units)
            untold.clear()

        return report
