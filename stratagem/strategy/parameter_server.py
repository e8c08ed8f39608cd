"""Parameter servers: variables live on ps tasks; workers push gradients and take weights."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from stratagem.arguments import checked
from stratagem.cluster.resolvers import ClusterResolver
from stratagem.cluster.task import TaskId
from stratagem.cluster.units import Lease, Unit
from stratagem.data.distribute import distribute_from_function, leasable, warn_of_own_batches
from stratagem.data.distributed import DistributedDataset
from stratagem.data.loaders import plan_of
from stratagem.data.nested import tensors
from stratagem.data.options import DistributeOptions, InputContext
from stratagem.data.placement import InputPlacement
from stratagem.data.split_dataset import SplitDataset
from stratagem.errors import ConfigurationError
from stratagem.measuring import measures
from stratagem.strategy import roles
from stratagem.strategy.base import Strategy
from stratagem.strategy.devices import default_device, parse_device
from stratagem.strategy.loss_scaling import refuse_divided
from stratagem.strategy.one_process import EvaluatorStrategy
from stratagem.strategy.partitioners import Partitioner
from stratagem.strategy.prepared import Preparation, Prepared
from stratagem.strategy.ps.buffers import LostBuffers
from stratagem.strategy.ps.checks import check_asked, check_contents, check_prepared
from stratagem.strategy.ps.schedules import follow, keep_up, push_of, warn_of_unprepared
from stratagem.strategy.ps.servers import Servers
from stratagem.strategy.ps.steps import step_by
from stratagem.strategy.ps.units import LeasedUnits, OwnBatches, UnitListener
from stratagem.strategy.ps.variables import VariableGroups
from stratagem.strategy.replicas.context import run_alone, watch_torch
from stratagem.strategy.replicas.copies import move_original
from stratagem.worker.gradient_guard import parameters_of
from stratagem.worker.leases import LeaseClient
from stratagem.worker.push.gradient_push import GradientPush, RolledBack, StepSlice
from stratagem.worker.reduction.backward import BackwardWatch
from stratagem.worker.runtime import WorkerRuntime
from stratagem.worker.unit_tracker import UnitTracker

logger = logging.getLogger(__name__)


@checked
class ParameterServerStrategy(Strategy):
    """Asynchronous (default), bounded-staleness or synchronous training with parameter servers.

    The constructor starts this task's server, joins the cluster and returns when the cluster is complete. In a process
    whose task type is chief or ps it serves until the job ends and then exits the process. In an evaluator there is one
    replica, which evaluates and does not train.

    A prepared scheduler that is stepped with every update follows the updates of the whole job, as TensorFlow's
    schedules follow ``optimizer.iterations``, although each worker makes only a part of them. One that is stepped with
    every epoch advances by one.

    Args:
        cluster_resolver: knows the cluster and this task; None: the environment (TF_CONFIG, torchrun's variables).
        variable_partitioner: cuts variables into shards, for example ``FixedShardsPartitioner(2)``; None: each variable
            lies whole on one ps.
        staleness: bound s: a worker may not start step t before every live worker finished step t-s-1. 0: the gradients
            of a step are summed, weighted by example counts, and applied as one update. None: the value of
            ``stratagem run --staleness``, else inf (asynchronous).
        device: where this worker computes; None: ``cuda:LOCAL_RANK`` if available, else the CPU.

    Raises:
        ConfigurationError: there is no cluster, or it has no ps.
        ClusterTimeoutError: the cluster did not come up in time; names the missing tasks.
    """

    holds_tables = True

    def __new__(cls, cluster_resolver: ClusterResolver | None = None, *_: Any, **__: Any) -> Any:
        return EvaluatorStrategy() if roles.is_evaluator(cluster_resolver) else super().__new__(cls)

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
        self._meter = self._runtime.meter
        roles.say_goodbye_at_exit(self._runtime)
        self._tracker = UnitTracker(in_step=self.staleness == 0)
        self._groups = VariableGroups(self._runtime, variable_partitioner)
        self._runtime.meter.in_step = self.staleness == 0
        self.servers: Servers = Servers(self._runtime, self._groups, self.staleness, self.device, self._pull_all)
        watch_torch()
        self.prepared: Prepared = Prepared(has_nested=False)
        self._known: dict[int, Any] = {}  # what has been prepared, by identity
        self._may_forget = True
        """The script may have forgotten to distribute its dataset, and nobody has said so."""
        self._units: weakref.WeakValueDictionary[int, LeasedUnits] = weakref.WeakValueDictionary()
        self._metrics: list[UnitListener] = []
        self._lease: Lease | None = None
        """Of the newest unit."""
        self._newest = 0, 0
        """Staleness 0: dataset and number of the newest step that this worker has a slice of."""
        self._missed: list[Callable[[int], None]] = []
        """Of schedulers and models: told before a batch, and at the end of all, of steps that were made without this
        worker."""
        self._batches: dict[int, tuple[Any, Unit]] = {}
        self._is_undone = self._runs_undone = False
        """The ps went back to a checkpoint, and the batch that the script works on, or runs a function with, was taken
        before: it comes again, and what the script still makes of it is no update."""
        self._undone: list[Any] = []
        """Batches that the script had taken by then."""
        self._weight: float | None = None

    @property
    def num_replicas_in_sync(self) -> int:
        """Workers at staleness 0, else 1: each worker's update is its own."""
        return self._runtime.cluster.num_workers if self.staleness == 0 else 1

    @property
    def wire(self) -> dict[str, str]:
        lanes = {client.lane.name for client in self._runtime.clients}
        return {"lane": ", ".join(sorted(lanes)), "wire_dtype": "float32"}

    @property
    def is_lead(self) -> bool:
        return self._runtime.is_lead()

    @property
    def first_replica_id(self) -> int:
        return self.task.index if self.staleness == 0 else 0

    @property
    def local_devices(self) -> tuple[torch.device, ...]:
        return (self.device,)

    def check_variable(self, name: str, trainable: bool) -> None:
        raise ConfigurationError(
            f"variable {name!r}: parameter servers hold the parameters of prepared models; make it an nn.Parameter of "
            "a model, or create it outside of the scope, where it is this worker's own"
        )

    @property
    def task(self) -> TaskId:
        """This worker."""
        return self._runtime.task

    def _prepare(self, objects: Sequence[Any], preparation: Preparation) -> Sequence[Any]:
        fresh = {id(item): item for item in objects if id(item) not in self._known}
        check_prepared([*fresh.values()], preparation)
        models = [item for item in fresh.values() if isinstance(item, torch.nn.Module)]
        optimizers = [item for item in fresh.values() if isinstance(item, torch.optim.Optimizer)]
        check_asked(self._runtime, preparation, optimizers)
        for model in models:
            move_original(model, self.device, optimizers)
        preparation.compile(models)
        watch = BackwardWatch(self._runtime.meter)

        def on_backward() -> None:
            watch()
            refuse_divided(preparation)
            self._tracker.backward()

        # An optimizer may come later, with a model whose parameters were frozen.
        named = [item for item in objects if isinstance(item, torch.nn.Module)] if optimizers else models
        for push in self._groups.create(named, optimizers, preparation, on_backward):
            self.prepared.add_optimizer(push.optimizer, parameters_of(push.optimizer), fixed=True)
            self._attach(push)
        for model in models:
            self.prepared.add_model(model)
            chief, ordinal = self.servers.chief, len(self._missed)
            self._missed.append(LostBuffers(model, chief, f"{self.task}", ordinal))
        for item in fresh.values():
            if isinstance(item, LRScheduler):
                self._pace(item)
        self._known.update(fresh)
        return objects

    def _prepare_metric(self, metric: Any) -> None:
        from stratagem.strategy.prepared_metric import prepare_metric
        from stratagem.strategy.ps.metrics import CountedMetric

        made: list[Any] = [*prepare_metric(metric, self, lambda one, _: CountedMetric(one, self, self.servers.chief))]
        self._metrics += made

    def _pace(self, scheduler: LRScheduler) -> None:
        push = push_of(scheduler, self._groups.pushes)

        def is_in_loop() -> bool:
            return not self.servers.num_datasets or any(units.is_read for units in self._units.values())

        chief, ordinal = self.servers.chief, len(self._missed)
        if self.staleness > 0:
            self._missed.append(follow(scheduler, push, is_in_loop, chief, ordinal))
        else:
            self._missed.append(keep_up(scheduler, push, is_in_loop, lambda: self._newest[0], chief, ordinal))

    def _attach(self, push: GradientPush) -> None:
        def commit() -> None:
            self._runtime.meter.computes(measures.OPTIMIZER)
            self._commit(push)
            self._runtime.meter.computes(measures.SCRIPT, after=measures.OPTIMIZER)

        step_by(push.optimizer, commit)
        warn_of_unprepared(push)

    def _commit(self, push: GradientPush) -> None:
        if self._is_undone or self._runs_undone:
            return
        try:
            update = self._tracker.step()
            is_last = update.ordinal + 1 >= self._tracker.steps_per_unit  # of its batch, as those before had them
            pushed = push.push(update, self._step_slice(push, update.units), reads_ahead=is_last)
        except RolledBack:
            self._roll_back()
            return
        if not pushed:
            return
        self._accept(self._tracker.stepped())
        if not update.units:
            self._runtime.meter.step_done(0)
            if self._may_forget and self._runtime.cluster.num_workers > 1 and self.is_lead:
                warn_of_own_batches(f"{self._runtime.cluster.num_workers} workers")
            self._may_forget = False

    def _step_slice(self, push: GradientPush, units: Sequence[Unit]) -> StepSlice | None:
        if self.staleness > 0 and (self.servers.num_datasets or self.staleness == math.inf):
            return None
        if not units:
            raise ConfigurationError(
                f"staleness {self.staleness:g} needs to know which batch a step belongs to: iterate over "
                "strategy.distribute_dataset(loader), and make the last update inside of the loop (what is left "
                "after it has no batch): enumerate() and len() of the dataset tell which batch is the last"
            )
        assert self._lease is not None, "a unit has a lease"
        if self._weight is None and push.mixes_shares():
            raise ConfigurationError(
                "at staleness 0 an update has one weight, but this worker's share differs between its batches (the "
                "last batch is smaller, or a worker was lost), and .grad has the gradients of several: make an update "
                "of each, with zero_grad() before its backward(), also where an epoch ends before an update is "
                "complete, or use drop_last=True; a job that lost a worker resumes from its last checkpoint when it is "
                "restarted"
            )
        weight = float(self._lease.num_examples) if self._weight is None else self._weight
        return StepSlice(self._lease.step, self._lease.slices, weight, self._weight is not None)

    def _begin(self, lease: Lease | None, batch: Any) -> None:
        if self.staleness > 0 or not self._tracker.has_waiting:
            self._weight = None
        self._is_undone = False
        if lease is None:
            self._undone.clear()
        open_units = self._tracker.open_units
        if self._batches:
            known = {*open_units, *self._tracker.left_early}
            self._batches = {key: old for key, old in self._batches.items() if old[1] in known}
        if lease is not None:
            gap = max(0, lease.step - self._newest[1] - 1) if self._newest[1] else 0
            for missed in self._missed:
                missed(gap)
            self._newest = lease.unit.dataset, lease.step
            self._lease = lease
            for push in self._groups.pushes if self.staleness == 0 else ():
                push.weigh(self._units[lease.unit.dataset].share(lease))
            self._batches[id(batch)] = batch, lease.unit

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls ``fn`` once. A batch of a distributed dataset among the arguments says which unit the steps belong to,
        also when the script took further batches since."""
        for argument in (*args, *kwargs.values()):
            batch, unit = self._batches.get(id(argument), (None, None))
            if unit is not None and batch is argument:
                self._accept(self._tracker.focus(unit))
            self._runs_undone |= any(old is argument for old in self._undone)
        self._groups.reads.within(lambda: [*tensors((args, kwargs))])
        try:
            return run_alone(self, fn, args, kwargs)
        finally:
            self._groups.reads.within(None)
            self._runs_undone = False

    def _accept(self, closed: Sequence[Unit]) -> None:
        self._groups.closes.add(closed)
        for unit in closed:
            if (client := self._runtime.leases.get(unit.dataset)) is not None:
                client.accept(unit)

    def _roll_back(self) -> None:
        """All ps went back to a checkpoint: drop what belongs to the past that is gone, take their weights."""
        self._tracker.abandon()
        self._is_undone, self._undone = True, [batch for batch, _ in self._batches.values()]
        self._batches.clear()
        for lease in self._runtime.leases.values():
            lease.roll_back()
        self._groups.closes.clear()
        self._groups.roll_back()
        logger.warning("the parameter servers rolled back to a checkpoint; the interrupted step will be repeated")

    def _distribute(self, source: Any, batch_size: int | None, options: DistributeOptions | None) -> DistributedDataset:
        loader = leasable(source, batch_size, options)
        plan = plan_of(loader, self.num_replicas_in_sync, self.staleness)
        self.servers.num_datasets += 1
        self._may_forget = False
        seed = self._runtime.chief.open_dataset(self.servers.num_datasets, plan)
        check_contents(self._runtime, self.servers.num_datasets, loader.dataset)
        plan = dataclasses.replace(plan, seed=seed)
        client = LeaseClient(self._runtime.chief, plan, 2 if self.staleness == math.inf else 1)
        self._runtime.leases[self.servers.num_datasets] = client
        units = LeasedUnits(
            plan,
            self.servers.num_datasets,
            client,
            self._runtime,
            self._groups,
            self._tracker,
            self._accept,
            self._end_epoch,
            self._attach_again,
            self._begin,
            lambda: [*self.servers.listeners, *self._metrics],
        )
        self._units[self.servers.num_datasets] = units
        return DistributedDataset(loader, plan, self.servers.num_datasets, units, self.device)

    @checked
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]], options: DistributeOptions | None = None
    ) -> SplitDataset:
        """See :meth:`Strategy.distribute_datasets_from_function`. Each worker iterates over its own pipeline, because
        the chief cannot lease its batches: if a worker dies, no other worker trains on its part.

        Raises:
            ConfigurationError: not asynchronous; otherwise steps belong to batches that the chief has leased.
        """
        if self.staleness != math.inf:
            raise ConfigurationError(
                f"at staleness {self.staleness:g} a step belongs to a batch that the chief leases, and the chief "
                "cannot lease what a function makes on each worker: give distribute_dataset a DataLoader over a "
                "map-style dataset, or train asynchronously (staleness=math.inf)"
            )
        self._may_forget = False
        context = InputContext(self._runtime.cluster.num_workers, self.task.index)
        placement, listener = InputPlacement((self.device,)), OwnBatches(self._runtime)
        return distribute_from_function(
            lambda _: dataset_fn(context), placement=placement, options=options, listener=listener
        )

    def _end_epoch(self) -> None:
        """Takes the newest weights; of steps at the end without a slice for this worker, schedulers hear by them."""
        self._pull_all()
        for missed in self._missed:
            missed(0)

    def _pull_all(self) -> None:
        """Takes the newest weights, of ps that come back as well."""
        with self._runtime.meter.exposed("the newest weights"):
            self._groups.refresh(self._attach_again)

    def _attach_again(self) -> None:
        """A ps has come back: takes what it holds, and gives it what it has no values of."""
        if self.staleness == 0:
            self._roll_back()
        else:
            self._groups.reconnect()

    def set_weight(self, weight: float) -> None:
        super().set_weight(weight)
        if self._weight not in (None, weight) and (self._tracker.has_gradients or self._tracker.has_waiting):
            raise ConfigurationError(
                f"an update has one weight on parameter servers, and its losses were divided by {self._weight:g} and "
                f"by {weight:g} (set_weight). In fit, where weights of examples or classes, or ignored targets, do "
                "this: leave out accumulate_steps, and give a larger batch_size. In a loop of your own: use one "
                'denominator, or prepare(gradients="sum") and divide each loss by a number that is the same on every '
                "worker, or make an update of each batch"
            )
        self._weight = weight

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for push in self._groups.pushes:
                stack.enter_context(push.staging.paused())
            yield
