"""Parameter servers: variables live on ps tasks; workers push gradients and take weights."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from stratagem.cluster.resolvers import ClusterResolver
from stratagem.cluster.task import TaskId
from stratagem.cluster.units import Unit
from stratagem.data.distributed import DistributedDataset
from stratagem.data.loaders import plan_of
from stratagem.errors import ConfigurationError
from stratagem.strategy import roles
from stratagem.strategy.base import Preparation, Strategy
from stratagem.strategy.devices import default_device, parse_device
from stratagem.strategy.partitioners import Partitioner
from stratagem.strategy.ps_units import LeasedUnits
from stratagem.strategy.ps_variables import VariableGroups
from stratagem.worker.close_reports import CloseReports
from stratagem.worker.gradient_push import GradientPush, PushPolicy, RolledBack, StepSlice
from stratagem.worker.leases import Grant, LeaseClient
from stratagem.worker.runtime import WorkerRuntime
from stratagem.worker.unit_tracker import UnitTracker

logger = logging.getLogger(__name__)


class ParameterServerStrategy(Strategy):
    """Asynchronous (default), bounded-staleness or synchronous training with parameter servers.

    The constructor starts this task's server, joins the cluster and returns when the cluster is complete. In a process
    whose task type is chief or ps it serves until the job ends and then ends the process.

    Args:
        cluster_resolver: knows the cluster and this task; None: the environment (TF_CONFIG, torchrun's variables).
        variable_partitioner: cuts variables into shards, for example ``FixedShardsPartitioner(2)``; None: each variable
            lies whole on one ps.
        staleness: bound s: a worker may not start step t before every live worker finished step t-s-1. 0: the gradients
            of a step are summed, weighted by example counts, and applied as one update. None: what
            ``stratagem run --staleness`` says, else inf (asynchronous).
        device: where this worker computes; None: ``cuda:LOCAL_RANK`` if there is one, else the CPU.

    Raises:
        ConfigurationError: there is no cluster, or it has no ps.
        ClusterTimeoutError: the cluster did not come up in time; names who is missing.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        staleness: float | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        config, cluster = roles.join_as(cluster_resolver)
        if not cluster.num_ps:
            raise ConfigurationError(
                "ParameterServerStrategy needs at least one ps, and the cluster has none; "
                "add them under 'ps', or start with: stratagem run --workers 2 --ps 2 train.py"
            )
        self.staleness = config.staleness if staleness is None else staleness
        if not self.staleness >= 0:
            raise ConfigurationError(f"expected a staleness of at least 0, got {self.staleness!r}")
        self.device = default_device() if device is None else parse_device(device)
        self._runtime = WorkerRuntime(config, cluster)
        roles.say_goodbye_at_exit(self._runtime)
        self._tracker = UnitTracker()
        self._closes = CloseReports(self._runtime.clients)
        self._groups = VariableGroups(self._runtime, variable_partitioner, self._tracker.backward)
        self._pushes: list[GradientPush] = []
        self._num_datasets = 0
        self._grants: list[Grant] = []
        self._batches: dict[int, tuple[Any, Unit]] = {}
        self._weight: float | None = None

    @property
    def num_replicas_in_sync(self) -> int:
        """Workers at staleness 0, else 1: each worker's update is its own."""
        return self._runtime.cluster.num_workers if self.staleness == 0 else 1

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
        if preparation.sync_batchnorm:
            raise ConfigurationError(
                "sync_batchnorm=True needs workers that run in step and talk to each other: use "
                "MultiWorkerMirroredStrategy (--strategy ring)"
            )
        policy = PushPolicy(preparation.gradients, preparation.clip_norm, preparation.nan)
        models = [item for item in objects if isinstance(item, torch.nn.Module)]
        optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
        for model in models:
            model.to(self.device)
        for member in self._groups.create(models, optimizers):
            push = GradientPush(
                member.optimizer,
                member.parameters,
                member.variables,
                member.staging,
                policy,
                self._closes,
                self._runtime.meter,
            )
            self._pushes.append(push)
            self._attach(push, member.parameters)

    def _attach(self, push: GradientPush, parameters: Sequence[torch.nn.Parameter]) -> None:
        stash: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

        def before(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # The hook's args begin with the optimizer itself.
            if kwargs.get("closure") is not None or any(callable(argument) for argument in args[1:]):
                raise ConfigurationError(
                    "optimizer.step(closure) cannot run on parameter servers: the closure would have to run there"
                )
            self._commit(push)
            for parameter in parameters:
                if parameter.grad is not None:
                    stash.append((parameter, parameter.grad))
                    parameter.grad = None

        def after(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for parameter, gradient in stash:
                parameter.grad = gradient
            stash.clear()

        push.optimizer.register_step_pre_hook(before)
        push.optimizer.register_step_post_hook(after)

    def _commit(self, push: GradientPush) -> None:
        try:
            pushed = push.push(self._tracker.step(), self._step_slice())
        except RolledBack:
            self._roll_back()
            return
        if not pushed:
            return
        self._accept(self._tracker.stepped())
        if self._tracker.current is None:
            self._runtime.meter.step_done(0)

    def _step_slice(self) -> StepSlice | None:
        if self.staleness > 0 and (self._num_datasets or self.staleness == math.inf):
            return None
        if self._tracker.current is None:
            raise ConfigurationError(
                f"staleness {self.staleness:g} needs to know which batch a step belongs to: iterate over "
                "strategy.distribute_dataset(loader)"
            )
        newest = self._grants[-1]
        held = {unit: grant.num_examples for grant in self._grants for unit in (grant.unit,)}
        num_examples = sum(held.get(unit, 0) for unit in self._tracker.open_units)
        weight = float(num_examples) if self._weight is None else self._weight
        return StepSlice(newest.step, newest.step_units, weight, num_examples)

    def _begin(self, grant: Grant | None, batch: Any) -> None:
        self._weight = None
        open_units = set(self._tracker.open_units)
        self._grants = [old for old in self._grants if old.unit in open_units]
        known = open_units | self._tracker.left_early
        self._batches = {key: old for key, old in self._batches.items() if old[1] in known}
        if grant is not None:
            self._grants.append(grant)
            self._batches[id(batch)] = batch, grant.unit

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls ``fn`` once. A batch of a distributed dataset among the arguments says which unit the steps belong to,
        also when the script took further batches since."""
        for argument in (*args, *(kwargs or {}).values()):
            batch, unit = self._batches.get(id(argument), (None, None))
            if unit is not None and batch is argument:
                self._accept(self._tracker.focus(unit))
        return super().run(fn, args, kwargs)

    def _accept(self, closed: Sequence[Unit]) -> None:
        self._closes.add(closed)
        for unit in closed:
            for lease in self._runtime.leases:
                lease.accept(unit)

    def _roll_back(self) -> None:
        """All ps went back to a checkpoint: drop what belongs to the past that is gone, take their weights."""
        self._tracker.abandon()
        self._grants.clear()
        self._batches.clear()
        for client in self._runtime.clients:
            client.connect()
        for lease in self._runtime.leases:
            lease.forget()
        self._closes.clear()
        self._groups.reattach()
        logger.warning("the parameter servers went back to a checkpoint; the interrupted step will be done again")

    def distribute_dataset(self, loader: DataLoader[Any]) -> DistributedDataset:
        num_slices = self._runtime.cluster.num_workers if self.staleness == 0 else 1
        plan = plan_of(loader, num_slices, self.staleness)
        self._num_datasets += 1
        seed = self._runtime.chief.open_dataset(self._num_datasets, plan)
        plan = dataclasses.replace(plan, seed=seed)
        ahead = 2 if self.staleness == math.inf else 1
        lease = LeaseClient(self._runtime.chief, self._num_datasets, ahead)
        self._runtime.leases.append(lease)
        source = LeasedUnits(
            plan, lease, self._tracker, self._closes, self._runtime.meter, self._groups.pull, self._begin
        )
        return DistributedDataset(loader, plan, self._num_datasets, source, self.device)

    def set_weight(self, weight: float) -> None:
        super().set_weight(weight)
        self._weight = weight

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._groups.paused():
            yield

    def _saw_loss(self, loss: torch.Tensor) -> None:
        self._runtime.meter.newest_loss = loss

    def report(self, **metrics: float) -> None:
        self._runtime.meter.metrics.update({name: float(value) for name, value in metrics.items()})

    def save_checkpoint(self, directory: str | os.PathLike[str] = "") -> str:
        """Takes a consistent checkpoint of all ps and returns its path.

        Args:
            directory: where; every ps must see it. Empty: the chief's ``--checkpoint-dir``.

        Raises:
            CheckpointError: it could not be written.
        """
        path, _step = self._runtime.chief.save_checkpoint(os.fspath(directory))
        return path
