"""The common part of strategies whose replicas run in step, each with the whole model."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from stratagem.arguments import checked
from stratagem.data.values import PerReplica, part_of_replica
from stratagem.errors import ConfigurationError, StratagemError
from stratagem.strategy.cross_replica import CrossReplica
from stratagem.strategy.loss_scaling import refuse_divided, share_loss
from stratagem.strategy.model_parts import (
    all_parameters,
    copies_of_buffers,
    restore_buffers,
    sparse_embeddings,
)
from stratagem.strategy.newcomers import Newcomers
from stratagem.strategy.prepared import Preparation, Prepared
from stratagem.strategy.replicas.context import watch_torch
from stratagem.strategy.replicas.copyable import check_dense, check_layers, check_shapes
from stratagem.strategy.replicas.cross_device_ops import CrossDeviceOps, cross_device_ops_of, names_of
from stratagem.strategy.replicas.local_replicas import LocalReplicas, SeveralReplicas
from stratagem.strategy.replicas.mirrored import drop_checks, foreign, original
from stratagem.strategy.step_shares import StepShares
from stratagem.strategy.synchronous_input import SynchronousInput
from stratagem.worker.gradient_guard import guard, parameters_of, skipped
from stratagem.worker.reduction.backward import BackwardReducer, BackwardWatch, check_own, follow
from stratagem.worker.reduction.batch_norm import SyncBatchNorm, average_by_examples, convert_batch_norm
from stratagem.worker.reduction.compression import GradientCompression
from stratagem.worker.reduction.gradient_layout import BUCKET_BYTES
from stratagem.worker.reduction.gradient_weight import Weight
from stratagem.worker.reduction.reducer import GradientReducer
from stratagem.worker.reduction.same_bits import SameBits
from stratagem.worker.ring.agreement import agree, same_everywhere
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.step_meter import StepMeter

logger = logging.getLogger(__name__)


class SynchronousStrategy(SynchronousInput):
    """Each replica has the model, and after ``backward()`` the gradient of the global batch.

    Args:
        workers: collectives with other workers; None: there are none.
        ops: reduces between local replicas; None: the default for the devices.
        bucket_bytes: limit of a bucket of gradients.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        meter: StepMeter,
        *,
        workers: Communicator | None = None,
        ops: CrossDeviceOps | type[CrossDeviceOps] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        compression: GradientCompression | None = None,
        seed: int | None = None,
    ) -> None:
        self._meter: StepMeter = meter
        watch_torch()
        self.prepared: Prepared = Prepared()
        self.communicator = workers
        self._ops = cross_device_ops_of(ops, devices)
        self._local: LocalReplicas = self._make_replicas(tuple(devices))
        self._has_stepped = False
        self._shares = StepShares(len(devices), self._num_sharing)
        self._membership_callbacks = []
        if workers is not None and workers.healing is not None:
            self._newcomers = Newcomers(
                workers,
                workers.healing,
                lambda: [*self._known.values(), *self.variables()],
                self._shares,
                self._meter,
                lambda: any(each.has_pending for own in self._reducers for each in own),
            )
        self._cross_replica = CrossReplica(len(devices), self._ops, workers, lambda: self._shares.of_result)
        self._bucket_bytes = bucket_bytes
        self._compression = compression
        self._known: MutableMapping[int, Any] = {} if self._local.communicators else weakref.WeakValueDictionary()
        """What has been prepared, by identity. One replica keeps nothing that the script has dropped."""
        self._watch = BackwardWatch(meter)
        self._seen_before: dict[int, Sequence[int]] = {}
        """By model: examples that each local replica was given before it was prepared."""
        self._attached: list[set[int]] = [set() for _ in devices]
        """Of each replica: the parameters that have a reducer."""
        self._reducers: list[list[BackwardReducer[Any]]] = [[] for _ in devices]
        self._num_datasets, self._seed = 0, seed
        logger.info("%s on %s", type(self).__name__, ", ".join(map(str, names_of(devices))))

    def _make_replicas(self, devices: tuple[torch.device, ...]) -> LocalReplicas:
        if len(devices) == 1:
            return LocalReplicas(self, devices, self._meter)
        return SeveralReplicas(self, devices, self._ops, self._meter, self._is_pending)

    @property
    def num_replicas_in_sync(self) -> int:
        return len(self._local.devices) * (1 if self.communicator is None else self.communicator.told_size)

    @property
    def local_devices(self) -> tuple[torch.device, ...]:
        return self._local.devices

    def _is_pending(self, parameter: nn.Parameter) -> bool:
        """Whether ``no_sync`` has left replicas a gradient of their own of a replica's parameter."""
        return any(reducer.is_pending(parameter) for reducers in self._reducers for reducer in reducers)

    def has_examples(self, replica: int) -> bool:
        return not self._shares.is_empty(replica)

    # -- preparing ---------------------------------------------------------------------------------------------

    def _prepare(self, objects: Sequence[Any], preparation: Preparation) -> Sequence[Any]:
        fresh = [item for item in map(original, objects) if id(item) not in self._known]
        models = [item for item in fresh if isinstance(item, nn.Module)]
        optimizers = [item for item in fresh if isinstance(item, torch.optim.Optimizer)]
        check_own(optimizers, self._reducers[0])
        self._before_placing(models)
        if self._local.communicators:
            check_layers(models)
        if self.communicator is not None:
            for model in models:
                check_shapes(model)
                check_dense(model, (*model.named_parameters(), *model.named_buffers()))
            agree(self.communicator, models, optimizers, f"{preparation.alike}, compression {self._compression}")
        prepared = self._local.add(objects)
        self._remember(models, [(optimizer, parameters_of(optimizer)) for optimizer in optimizers])
        self._known.update((id(item), item) for item in fresh)
        self._seen_before.update((id(model), self._shares.num_seen) for model in models if self._local.communicators)
        attach = functools.partial(self._attach, models, optimizers, preparation)
        self._local.together(attach, range(len(self._local.devices)))
        return prepared

    def _remember(
        self,
        models: Sequence[nn.Module],
        optimizers: Iterable[tuple[torch.optim.Optimizer, Sequence[nn.Parameter]]],
        replica: int = 0,
    ) -> None:
        for model in models:
            self.prepared.add_model(model)
        for optimizer, group in optimizers:
            self.prepared.add_optimizer(optimizer, group, replica=replica)

    def _prepare_metric(self, metric: Any) -> None:
        from stratagem.strategy.prepared_metric import prepare_metric  # loads torchmetrics

        prepare_metric(metric, self)

    def _before_placing(self, models: Sequence[nn.Module]) -> None:
        """Looks at models before they are prepared."""

    def _attach(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        preparation: Preparation,
        replica: int,
    ) -> None:
        models = [self._local.on_replica(model, replica) for model in models]
        groups = [self._local.parameters_of(optimizer, replica) for optimizer in optimizers]
        copies = [self._local.on_replica(optimizer, replica) for optimizer in optimizers]
        self._remember(models, zip(copies, groups, strict=True), replica)
        reducer: BackwardReducer[Any] | None = None
        if self._local.communicators:
            weight = functools.partial(self._weight, replica, preparation)
            if preparation.sync_batchnorm:
                for model in models:
                    convert_batch_norm(model, self._local.communicators[replica], weight, self._is_apart)
            reducer = self._make_reducer(replica, models, groups, weight, early=not preparation.sync_batchnorm)
            self._reducers[replica].append(reducer)
        else:
            self._watch.watch(all_parameters(models, groups))
        if preparation.torch_compile:
            for model in models:
                drop_checks(model)
            preparation.compile(models)
        for optimizer, group in zip(optimizers, groups, strict=True):
            if (own := self._local.stepping(optimizer, replica)) is None:
                continue
            if reducer is not None:  # before the guard, from which a skipped update has its gradients back
                are_same = functools.partial(self._local.have_same_gradients, optimizer, replica)
                follow(own, group, [each for each in self._reducers[replica] if each.reduces(group)], are_same)
            counting = None if replica else self._meter  # all skip it
            guard(own, preparation, functools.partial(skipped, models, counting), self._local.meter)
            if reducer is not None and isinstance(own, torch.optim.LBFGS):
                share_loss(own, self._local.communicators[replica], weight)
            if not replica:
                own.register_step_post_hook(self._stepped)

    def _make_reducer(
        self,
        replica: int,
        models: Sequence[nn.Module],
        groups: Sequence[Sequence[nn.Parameter]],
        weight: Callable[[], Weight],
        early: bool,
    ) -> BackwardReducer[Any]:
        """Makes what reduces the gradients of one replica's models and of the parameters of its optimizers."""
        parameters = self._fresh(replica, all_parameters(models, groups))
        names = {id(part): name for model in models for name, part in model.named_parameters()}
        labels = [names.get(id(part), f"parameter {index}") for index, part in enumerate(parameters)]
        # The other replicas of this worker take over the settings that its first one has.
        settings = functools.partial(self._optimizers, {id(part) for part in parameters} if not replica else set())
        tables = [table.weight for _, table in sparse_embeddings(models)]
        same_bits = SameBits(parameters, labels, self._label(replica), settings)
        return GradientReducer(
            parameters,
            self._local.communicators[replica],
            meter=self._local.meter,
            weight=weight,
            bucket_bytes=self._bucket_bytes,
            compression=self._compression,
            keep_sources=self._local.communicators[replica].healing is not None,
            sparse=[weight for weight in tables if isinstance(weight, nn.Parameter)],
            groups=groups,
            early=early,
            same_bits=same_bits,
        )

    def _label(self, replica: int) -> str:
        """Who a local replica is, for people."""
        return f"replica {self.first_replica_id + replica}"

    def _optimizers(self, parameters: set[int]) -> list[torch.optim.Optimizer]:
        """Those that have some of ``parameters`` (identities), as the first in one of their groups."""
        found = (item for item in self._known.values() if isinstance(item, torch.optim.Optimizer))
        return [
            one
            for one in found
            if any(id(part) in parameters for group in one.param_groups for part in group["params"][:1])
        ]

    def _fresh(self, replica: int, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        fresh = [parameter for parameter in parameters if id(parameter) not in self._attached[replica]]
        self._attached[replica].update(map(id, fresh))
        return fresh

    def _weight(self, replica: int, preparation: Preparation) -> Weight:
        here = self._local.which()
        if here is not None and here != replica:
            raise foreign("called backward() on a loss", here, replica)
        if here is None and not self.prepared.is_running:  # threads of autograd are nobody's either
            raise ConfigurationError(
                f"backward() outside of strategy.run waits for {len(self.local_devices)} replicas, of which only one "
                "is here: put the step in a function and call strategy.run(train_step, args=(batch,))"
            )
        refuse_divided(preparation)
        if self._newcomers is not None and self._newcomers.is_new:
            raise ConfigurationError(
                "this worker is a newcomer to a running ring and joins it at the first batch of a distributed dataset: "
                "a backward() before that would have no effect. Take batches from distribute_dataset"
            )
        return self._shares.weight(replica, preparation.gradients)

    def _is_apart(self) -> bool:
        return self._shares.is_over and not self.prepared.is_running

    def _stepped(self, *_: Any) -> None:
        """An optimizer has made a step; inside of :meth:`run` the replicas are still on their way."""
        self._has_stepped = True
        self._shares.is_adding = False
        if self._newcomers is not None:
            self._newcomers.has_stepped = True
        if not self.prepared.is_running:
            self._count_step()

    def _count_step(self) -> None:
        """Where no dataset counts the steps of the loop, one in which an optimizer made its step is one of the job."""
        if self._has_stepped and not self._shares.are_told:
            self._meter.step_done(0)
            self._made_own_step()
            for communicator in self._communicators():
                communicator.step += 1
            self._look_at_members()
        self._has_stepped = False

    # -- steps -------------------------------------------------------------------------------------------------

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A replica whose share of the batch is empty gets a batch of size 0; its gradient counts as zeros, and the
        buffers of its modules are what they were."""
        if self.communicator is not None and self._drawn_in not in (None, threading.current_thread()):
            raise ConfigurationError(
                "strategy.run in a different thread from the one that takes the batches: on a ring both run "
                "collectives, and their order would differ between workers. Take batches in the thread that trains; to "
                "read them ahead, give the DataLoader num_workers"
            )
        self._shares.start_run(args, kwargs)
        replicas = range(len(self._local.devices))
        work = [functools.partial(self._step, replica, fn, args, kwargs) for replica in replicas]
        try:
            with self.prepared:
                return PerReplica(tuple(self._local.run(work, (fn, args, kwargs))), self._shares.of_result)
        finally:
            self._count_step()

    def _step(self, replica: int, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for reducer in self._reducers[replica]:
            reducer.refresh()
        args, kwargs = part_of_replica(list(args), replica), part_of_replica(dict(kwargs), replica)
        if not self._shares.is_empty(replica):
            return fn(*args, **kwargs)
        with self._buffers_kept(replica):
            try:
                return fn(*args, **kwargs)
            except StratagemError:
                raise
            except Exception as error:
                raise ConfigurationError(
                    f"{getattr(fn, '__name__', 'the step function')} failed on a batch of size 0 ({error}): the last "
                    f"global batch is too small for {self.num_replicas_in_sync} replicas. Use "
                    'DataLoader(drop_last=True), distribute_dataset(..., options=sg.DistributeOptions(on_empty="skip"))'
                    ", or a step that takes size 0 (flatten(1) instead of view(batch, -1))"
                ) from error

    @contextlib.contextmanager
    def _buffers_kept(self, replica: int) -> Iterator[None]:
        # Statistics that all replicas form together must be the same on all, whatever a replica's own share; and so
        # must be what counts averages of weights.
        models = self._everywhere(item for item in self._known.values() if isinstance(item, nn.Module))[replica]
        modules = [part for model in models for part in model.modules()]
        kept = copies_of_buffers(part for part in modules if not isinstance(part, SyncBatchNorm | AveragedModel))
        try:
            yield
        finally:
            restore_buffers(kept)

    def interrupted(self) -> contextlib.AbstractContextManager[None]:
        return self._local.interrupted()

    def set_weight(self, weight: float) -> None:
        super().set_weight(weight)
        if (replica := self._local.which()) is None:
            raise ConfigurationError("set_weight says how much a replica counts in a step: call it inside strategy.run")
        self._shares.set_weight(replica, weight)
        self._shares.check_sum()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._shares.is_adding = not self._local.communicators
        self._shares.check_sum()
        replica = self._local.which()
        chosen = [of for number, of in enumerate(self._reducers) if replica is None or number == replica]
        with contextlib.ExitStack() as stack:
            for reducer in (reducer for reducers in chosen for reducer in reducers):
                stack.enter_context(reducer.no_sync())
            yield

    @contextlib.contextmanager
    def averaged_buffers(self, *models: nn.Module) -> Iterator[None]:
        if not self._local.communicators or not models:
            yield
            return
        everywhere = self._everywhere(models)
        parts_of = [[part for model in own for part in model.modules()] for own in everywhere]
        # Together: replicas first get what was changed outside of them (loaded, say), which is to be kept.
        kept = self._local.together(copies_of_buffers, parts_of)
        start = [0] * len(self.local_devices)
        before = [self._seen_before.get(id(original(model)), start) for model in models]
        seen = [[now - then[replica] for then in before] for replica, now in enumerate(self._shares.num_seen)]
        self._local.together(average_by_examples, everywhere, seen, self._local.communicators)
        try:
            yield
        finally:
            self._local.together(restore_buffers, kept)

    def random_states(self) -> dict[str, torch.Tensor]:
        return self._local.random_states()

    @checked
    def set_random_states(self, states: Mapping[str, torch.Tensor]) -> None:
        self._local.set_random_states(states)

    def close(self) -> None:
        self._local.close()

    def replicas_agree(self, *modules: nn.Module) -> bool:
        """Whether all replicas of all workers have the same bits in every parameter; every worker must call it."""
        if not self._local.communicators:
            return True
        return all(self._local.together(same_everywhere, self._local.communicators, self._everywhere(modules)))

    def _everywhere(self, modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
        """Each local replica's own of them."""
        originals = [original(module) for module in modules]
        return [[self._local.on_replica(one, r) for one in originals] for r in range(len(self.local_devices))]
