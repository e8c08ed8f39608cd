"""The interface of every strategy to a training script."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from stratagem.arguments import check_call, checked, is_metric, known_arguments, uncompiled
from stratagem.cluster.communication import ReduceOp
from stratagem.data.options import DistributeOptions, InputContext
from stratagem.data.values import PerReplica, ValueContext, local_values
from stratagem.errors import ConfigurationError
from stratagem.strategy.cross_replica import CrossReplica
from stratagem.strategy.prepared import Preparation, Prepared
from stratagem.strategy.ps.servers import Servers
from stratagem.strategy.replicas.copyable import check_made, check_parameters
from stratagem.strategy.replicas.mirrored import original
from stratagem.strategy.scope import Scope
from stratagem.tensorflow_names import WithWaysOut
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.step_meter import StepMeter


class Strategy(WithWaysOut):
    """How a training script is distributed over devices and processes; its attributes say what it can do."""

    places_models = True
    """Whether models compute on :attr:`local_devices`; else wherever the script has put them."""
    servers: Servers | None = None
    """The parameter servers that hold the variables; None: each process holds them itself."""
    communicator: Communicator | None = None
    """Collectives among the workers; each must make the same calls in the same order. None: they do not run in step."""
    holds_tables = False
    """Whether tables (``sg.nn.Embedding``) built in its scope live elsewhere, and workers ask for their rows."""
    prepared: Prepared | None = None
    """Everything that was prepared; None: anything may train in :meth:`run`."""
    _cross_replica = CrossReplica()
    _meter: StepMeter | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """TensorFlow's ``experimental_`` names are those without it: ``experimental_distribute_dataset``, …"""
            plain = name.removeprefix("experimental_")
            if plain != name and hasattr(type(self), plain):
                return getattr(self, plain)
            super().__getattr__(name)

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients go into one update."""
        return 1

    @property
    def local_devices(self) -> tuple[torch.device, ...]:
        """Devices of the replicas of this process, one each."""
        return (torch.device("cpu"),)

    @property
    def first_replica_id(self) -> int:
        """Index of the first replica of this process among those in sync."""
        return 0 if self.communicator is None else self.communicator.rank * len(self.local_devices)

    def has_examples(self, replica: int) -> bool:
        """Whether a local replica has any examples of the current step's batch."""
        return True

    @property
    def parameter_device(self) -> torch.device | None:
        """Device of the only copy of variables; None: each replica has its own."""
        return None

    def check_variable(self, name: str, trainable: bool) -> None:
        """Called for each :class:`Variable` that is about to be created in the scope.

        Raises:
            ConfigurationError: the strategy cannot hold it.
        """

    @property
    def is_lead(self) -> bool:
        """Whether this process does what only one process may do: progress bar, summaries, export."""
        return True

    @property
    def wire(self) -> dict[str, str]:
        """How gradients travel between processes: ``lane`` and ``wire_dtype``; empty when they do not."""
        return {}

    def scope(self) -> Scope[Self]:
        """Makes this strategy the current one. Objects created inside train once they are passed to :meth:`prepare`.

        Raises:
            ConfigurationError: another strategy's scope is open, or a thread that did not enter the scope leaves it.
        """
        return Scope(self)

    @checked
    def prepare(
        self,
        *objects: Any,
        gradients: Literal["mean", "sum"] = "mean",
        clip_norm: float | None = None,
        nan: Literal["error", "skip"] = "error",
        sync_batchnorm: bool = False,
        torch_compile: bool | str | Mapping[str, Any] | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> Any:
        """Connects models, optimizers and schedulers to the strategy, in place.

        Args:
            objects: ``nn.Module``, ``torch.optim.Optimizer`` and scheduler objects; metrics of torchmetrics, which are
                updated in the step, and computed and reset outside it for all replicas of all workers.
            gradients: "mean": each loss is a mean over the examples of its batch; replicas are weighted by their share
                of the global batch. "sum": losses add up examples, or divide by the global batch; gradients are added.
                If a worker on parameter servers at staleness 0 dies in a step, its examples are trained in a later
                step: a mean is taken over the others, a sum adds the others unchanged.
            clip_norm: largest global norm of an optimizer's gradient, over all replicas and ps; None: no clipping.
            nan: "error": a NaN or Inf in a gradient raises ``NonFiniteGradientError``; "skip": the update is skipped
                and counted. What the forward pass wrote into buffers (``running_mean`` of a BatchNorm) stays, as in
                torch; a warning names those that have NaN.
            sync_batchnorm: BatchNorm layers normalise over the batches of all replicas in sync, so that the result
                equals one process on the joined batch; only in training, like torch's ``SyncBatchNorm`` (in ``eval()``
                a layer without running statistics uses each replica's own examples).
            torch_compile: True, a mode ("max-autotune"), or arguments of ``torch.compile`` (``{"dynamic": True}``):
                each replica's models are compiled. Shares of uneven batches have other sizes, and each size is compiled
                anew unless ``dynamic``.
            memory_format: ``torch.channels_last``: weights of shape (out, in, height, width) are stored with the
                channels last, and so are the outputs of convolutions with them, which many CPUs and GPUs compute
                faster; values and shapes stay the same. ``torch.channels_last_3d``: the same for 3-d convolutions.
                None: as in the model. XLA chooses for itself.

        Returns:
            the prepared object, or the tuple of them in the given order.

        Raises:
            ConfigurationError: an object is none of these, an argument is out of range, or an optimizer has a
                parameter that no prepared model has.
            UnsupportedOptimizerError: the strategy cannot run the optimizer.
        """
        kinds = torch.nn.Module | torch.optim.Optimizer | LRScheduler | torch.amp.GradScaler
        for item in objects:
            if not isinstance(item, kinds):
                raise ConfigurationError(
                    "prepare expects models, optimizers, schedulers, metrics and GradScalers, got "
                    f"{type(item).__name__}; loaders go to distribute_dataset"
                )
        preparation = Preparation(gradients, clip_norm, nan, sync_batchnorm, torch_compile, memory_format)
        others = [item for item in objects if not is_metric(item)]
        with preparation.begun([original(item) for item in others], self._preparations):
            for item in others:
                if isinstance(item, torch.nn.Module):
                    preparation.lay_out(item)
                elif isinstance(item, torch.optim.Optimizer):
                    check_made(item)
            rest = iter(self._prepare(others, preparation) if others else ())
            self._check_parameters([original(item) for item in others], preparation)
        for metric in filter(is_metric, objects):
            self._prepare_metric(metric)
        prepared = [item if is_metric(item) else next(rest) for item in objects]
        return prepared[0] if len(objects) == 1 else tuple(prepared)

    def _prepare_metric(self, metric: Any) -> None:
        """Connects a metric or a collection of torchmetrics to the strategy, in place."""
        raise NotImplementedError

    def _check_parameters(self, objects: Sequence[Any], preparation: Preparation) -> None:
        """Makes sure, once all is in its place, that optimizers change what prepared models compute with."""
        for item in (each for each in objects if isinstance(each, torch.nn.Module | torch.optim.Optimizer)):
            self._preparations.setdefault(item, preparation)
        models = (item for item in self._preparations if isinstance(item, torch.nn.Module))
        known = {id(parameter) for model in models for parameter in model.parameters()}
        known.update(id(tensor) for variable in self.variables() for tensor in variable.tensors)
        for item in objects:
            if isinstance(item, torch.optim.Optimizer):
                check_parameters(item, lambda parameter: id(parameter) in known)

    @functools.cached_property
    def _preparations(self) -> weakref.WeakKeyDictionary[Any, Preparation]:
        """What the first ``prepare`` of each was asked for."""
        return weakref.WeakKeyDictionary()

    @functools.cached_property
    def _variables(self) -> weakref.WeakKeyDictionary[Any, None]:
        return weakref.WeakKeyDictionary()

    def keep_variable(self, variable: Any) -> None:
        """Called by a variable that was created in this strategy's scope."""
        self._variables[variable] = None

    def variables(self) -> list[Any]:
        """The variables that still exist, in the order of their creation."""
        return [one for each in self._variables.keyrefs() if (one := each()) is not None]

    def _prepare(self, objects: Sequence[Any], preparation: Preparation) -> Sequence[Any]:
        """What a strategy does with what it was given. Returns what the script uses in its stead, in the same order."""
        raise NotImplementedError

    @known_arguments
    def distribute_dataset(
        self,
        source: DataLoader[Any] | Dataset[Any] | Iterable[Any],
        *,
        batch_size: int | None = None,
        options: DistributeOptions | None = None,
    ) -> Any:
        """This task's part of a source of GLOBAL batches; iterate over it once per epoch. On parameter servers the
        chief leases batches (except of an iterable): each example is accepted exactly once per epoch, whatever dies.

        Args:
            source: a DataLoader, an iterable of batches (tensors, arrays, in tuples, lists, dicts, dataclasses), or,
                with ``batch_size``, a Dataset.
            batch_size: examples in a global batch of a Dataset.
            options: which part each worker gets, and how it reaches the devices.

        Raises:
            ConfigurationError: the source cannot be distributed; says why, and what can be done.
        """
        return self._distribute(source, batch_size, options)

    def _distribute(self, source: Any, batch_size: int | None, options: DistributeOptions | None) -> Any:
        raise ConfigurationError("distribute_dataset needs a strategy: build one, or enter its scope")

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]], options: DistributeOptions | None = None
    ) -> Any:
        """This task's batches, each for ONE replica, from the result of ``dataset_fn``, which is called once, here.

        Args:
            dataset_fn: receives its :class:`InputContext`; it batches per replica and shards by ``num_input_pipelines``
                and ``input_pipeline_id`` itself.
            options: how batches reach the devices.
        """
        raise ConfigurationError("distribute_datasets_from_function needs a strategy: build one, or enter its scope")

    @checked
    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """A :class:`PerReplica` of the results of ``value_fn``, called once for each local replica."""
        numbers = range(self.first_replica_id, self.first_replica_id + len(self.local_devices))
        return PerReplica(tuple(value_fn(ValueContext(number, self.num_replicas_in_sync)) for number in numbers))

    @known_arguments
    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls ``fn`` once for each local replica, in replica context.

        Each :class:`PerReplica` among the arguments (a distributed batch, say), or among the parts of one that stands
        in place of ``args``, is replaced by the value of the replica.

        Returns:
            a :class:`PerReplica` of what ``fn`` returned.

        Raises:
            ConfigurationError: an unprepared optimizer steps, or an unprepared model built in the scope gets gradients.
            CollectiveError: the replicas do not make the same calls.
        """
        args = tuple(args) if isinstance(args, PerReplica) else args
        check_call(fn, args, kwargs)
        is_alone = self.servers is None and self.num_replicas_in_sync == 1
        if self.prepared is not None:
            self.prepared.is_alone = is_alone
        result = self._run(fn if is_alone and self.communicator is None else uncompiled(fn), args, kwargs or {})
        if self.prepared is not None and (self.servers is None or (self._meter is not None and self._meter.in_step)):
            self.prepared.look_at_loss(result, self._preparations.values())
        return result

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def interrupted(self) -> contextlib.AbstractContextManager[None]:
        """Around code that runs outside replicas in the middle of :meth:`run` (``merge_call`` enters it)."""
        return contextlib.nullcontext()

    @checked
    def load_once(self, load: Callable[[], object]) -> None:
        """Loads other weights after :meth:`prepare`; every worker calls it, at the same place in the script.

        On parameter servers only the lead's ``load`` is used: values that it loads into models and optimizers, or
        changes in place, go to the ps, and no worker trains until they have them. Elsewhere each worker calls ``load``.

        Args:
            load: for example ``lambda: model.load_state_dict(torch.load(path))``.

        Raises:
            ClusterTimeoutError: the lead does not arrive.
        """
        if self.servers is None:
            load()
        else:
            self.servers.load_once(load, call="load_once()")

    def barrier(self) -> None:
        """Returns when every worker has called it, so that each sees what the others wrote before. For a worker that
        restarts later, a barrier that the others have passed counts as passed.

        Raises:
            ClusterTimeoutError, ConfigurationError: on parameter servers, another worker does not arrive, or loads.
            CollectiveError: in a ring, another worker does not arrive, or is in another collective.
        """
        if self.servers is not None:
            self.servers.load_once(None, call="barrier()")
        elif self.communicator is not None:
            self.communicator.barrier()

    @checked
    def reduce(self, op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Reduces a value over all replicas in sync; with ``axis=0`` over the batch as well. Every worker must call it.

        On parameter servers it covers this worker's replica.

        Args:
            op: the member or its name; MEAN with an axis divides by the number of elements along it, over all replicas.
            value: a :class:`PerReplica` of tensors, numbers, or dicts, lists and tuples of them; a variable is what
                it is on each replica.
            axis: None or 0.

        Returns:
            a tensor without gradient, or a structure of them. The mean of integers has torch's default dtype.
        """
        return self._cross_replica.reduce(ReduceOp(op), value, axis)

    def reduce_mean(self, value: Any) -> Any:
        """The mean of per-replica means, weighted by the replicas' shares and detached: use it for the loss to print.

        Replicas without examples are ignored. A share is a number of examples, or the value that the step passed to
        ``set_weight``; a plain value (of a step called without ``run``) has the share of the newest batch. Every worker
        must call it. On parameter servers it is the mean of this worker's part alone."""
        mean = self._cross_replica.reduce_mean(value)
        if self._meter is not None and isinstance(mean, torch.Tensor) and mean.numel() == 1:
            self._meter.newest_loss = mean
        return mean

    @checked
    def gather(self, value: Any, axis: int) -> Any:
        """The concatenation of all replicas' tensors along ``axis``, in replica order. Every worker must call it.

        Args:
            value: a :class:`PerReplica` of tensors, or of structures of them; lengths along the axis may differ.
            axis: axis of the tensors, which are at least one-dimensional.
        """
        return self._cross_replica.gather(value, axis)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The local replicas' values; of a variable too."""
        return local_values(value)

    @checked
    def set_weight(self, weight: float) -> None:
        """Sets, in a step before backward, the loss's denominator if it is not the number of examples."""
        if not 0 <= weight < math.inf:
            raise ConfigurationError(f"expected a finite weight of at least 0, got {weight!r}")
        if self.prepared is not None:
            self.prepared.is_weighted = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates; nothing is sent."""
        yield

    @contextlib.contextmanager
    def averaged_buffers(self, *models: torch.nn.Module) -> Iterator[None]:
        """Inside, the buffers of models (statistics of BatchNorm) are the same on every replica; after it each has its
        own again. Use it for saving and evaluating. Floats are averages, weighted by the examples each replica has
        seen, integers the maximum (docs/protocol.md 21). Every worker must enter it."""
        yield

    def random_states(self) -> dict[str, torch.Tensor]:
        """States of the replicas' own random streams by name, without the process's, for checkpoints; not in a step."""
        return {}

    @checked
    def set_random_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Restores the replicas' streams from :meth:`random_states`; ignores streams of other replicas."""

    def close(self) -> None:
        """Ends the threads of local replicas; nothing can run after it. A script that ends need not call it."""

    @checked
    def on_membership_change(self, callback: Callable[[int, int], None]) -> None:
        """Calls ``callback(before, now)`` when ``num_replicas_in_sync`` has changed because a ring lost or admitted a
        worker (``--min-workers``). All workers call it before the same step, the first with the new number, for
        example to scale the learning rate. The global batch keeps its size."""

    @checked
    def report(self, **metrics: float) -> None:
        """Sets named numbers for the progress display and ``--summary``; a status holds the first 32 KiB of them."""
        if self._meter is not None:
            self._meter.metrics.update({name: float(value) for name, value in metrics.items()})

    @property
    def exposed_communication(self) -> float:
        """Fraction of the last steps' time spent waiting for communication, 0 to 1."""
        return 0.0 if self._meter is None else self._meter.exposed_fraction
