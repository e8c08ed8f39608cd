"""The prepared objects of a process with several replicas (docs/protocol.md 16 and 18)."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from stratagem.errors import ConfigurationError
from stratagem.strategy.replicas.copies import Copies, Settings, move_original, settings_of
from stratagem.strategy.replicas.copyable import check_memory, check_module, check_optimizer
from stratagem.strategy.replicas.mirrored import (
    Meet,
    MirroredModule,
    MirroredOptimizer,
    MirroredScaler,
    MirroredScheduler,
    OnlyReplica,
    copies_of,
    current,
    foreign,
    mirrored,
    original,
    watch_schedulers,
)
from stratagem.strategy.replicas.outside_changes import ModelChanges, OptimizerChanges

logger = logging.getLogger(__name__)


class Mirrors:
    """Models, optimizers, schedulers and GradScalers, with a copy of each on every replica.

    Replica 0 has the user's own objects. Outside of replicas there is only replica 0: the others get what was changed
    in it when they run again. Two calls tell where that is: :meth:`synchronize` before replicas run, :meth:`record`
    after. Around what runs outside of replicas while they wait for it (a merge call) it is the other way round.

    Inside, each replica has its own. The settings of optimizers are those of replica 0 in every step, so that all
    replicas have to make the same steps. ``which``: the local replica that asks; None: the code outside of replicas;
    ``keep``: puts into a memo of ``copy.deepcopy`` what is not to be copied, and what stands for it on a replica;
    ``is_pending``: whether ``no_sync`` has left a gradient of a replica's parameter that is its own.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        which: Callable[[], int | None],
        *,
        meet: Meet,
        keep: Callable[[int, dict[int, Any]], None] = lambda replica, memo: None,
        is_pending: Callable[[nn.Parameter], bool] = lambda parameter: False,
    ) -> None:
        watch_schedulers()
        self.which = which
        self.devices = tuple(devices)
        self.meet = meet
        self._is_pending = is_pending
        self._copies = [
            Copies(device, self.devices[0], functools.partial(keep, replica))
            for replica, device in enumerate(self.devices[1:], start=1)
        ]
        self._touched = False
        self._changes: list[ModelChanges | OptimizerChanges] = []
        self.unusable: dict[int, str] = {}
        """See :class:`stratagem.strategy.replicas.mirrored.Home`."""
        self._num_optimizers = 0
        self._has_warned = False
        self._scalers: list[list[torch.amp.GradScaler]] = []
        self._is_recorded = True
        """False: replicas have what :meth:`record` has not seen to its end."""
        self._all: dict[int, Any] = {}
        """Proxies, by identity of the original, in the order of preparation."""

    def copies_of(self, item: Any) -> Sequence[Any]:
        """What an object that was added is on each replica."""
        return copies_of(self._all[id(original(item))])

    def modules(self) -> Iterator[nn.Module]:
        """Those of all models, on all replicas."""
        every = (copies_of(proxy) for proxy in self._all.values())
        yield from (part for copies in every for one in copies if isinstance(one, nn.Module) for part in one.modules())

    def add(self, objects: Sequence[Any]) -> list[Any]:
        """Mirrors more objects, which may share parameters with those that were given before.

        Call :meth:`record` when everything that belongs to one replica alone has been attached to its objects. Returns
        the proxies of ``objects``, in their order. One that was given before, or is a proxy, is not copied again.
        Raises ConfigurationError: something cannot be copied, or one of ``objects`` needs another that is not prepared.
        """
        self.synchronize()
        wanted = [original(item) for item in objects]
        fresh = list({id(item): item for item in wanted if id(item) not in self._all}.values())
        models = [item for item in fresh if isinstance(item, nn.Module)]
        optimizers = [item for item in fresh if isinstance(item, torch.optim.Optimizer)]
        self._check(fresh, models, optimizers)
        copies = {id(item): [item] for item in fresh}
        with self._opened():
            for its in self._copies:
                for model in models:
                    copies[id(model)].append(its.of_module(model))
                for optimizer in optimizers:
                    copies[id(optimizer)].append(self._copy_optimizer(its, optimizer))
                for item in fresh:
                    if isinstance(item, torch.amp.GradScaler):
                        copies[id(item)].append(its.of_scaler(item))
        for model in models:
            move_original(model, self.devices[0], optimizers)
        made: dict[int, Any] = {}
        for item in (*models, *optimizers, *fresh):  # optimizers before their schedulers, whatever the order
            if id(item) not in made:
                made[id(item)] = self._install(item, copies[id(item)], made)
        self._all.update((id(item), made[id(item)]) for item in fresh)
        self.record()
        return [self._all[id(item)] for item in wanted]

    def synchronize(self) -> None:
        """Carries to the other replicas what was changed outside of them; a ConfigurationError where that cannot be."""
        if not self._is_recorded:  # an interrupt came before its end
            self.record()
        fully, self._touched = self._touched, False
        try:
            with self._opened():
                for changes in self._changes:
                    changes.spread(fully)
            models = (each for each in self._changes if isinstance(each, ModelChanges))
            self.unusable = {id(each.original): each.unusable for each in models if each.unusable}
            if fully:
                for first, *others in self._scalers:
                    for scaler in others:
                        scaler.load_state_dict(first.state_dict())
                        if not first._per_optimizer_states:  # as after its update()
                            scaler._per_optimizer_states.clear()
        except BaseException:
            self._touched = fully
            raise

    def record(self) -> None:
        """What replicas have now is their own: no change to be carried."""
        self._is_recorded = False
        for changes in self._changes:
            changes.record()
        self._is_recorded = True

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.synchronize()
        try:
            yield
        finally:
            self.record()

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Around what runs outside of replicas, in the middle of their run."""
        self.record()
        yield
        self.synchronize()

    def touch(self) -> None:
        self._touched = True

    def begin_anew(self) -> None:
        """A step has failed: of the next one nothing is unscaled yet, whichever replica had come how far."""
        self.touch()
        for first, *_ in self._scalers:
            first._per_optimizer_states.clear()

    # -- adding ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for its in self._copies:
                stack.enter_context(its.opened())
            yield

    def _check(
        self, fresh: Sequence[Any], models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        for model in models:
            check_module(model)
        check_memory(models)
        coming = {id(parameter) for model in models for parameter in model.parameters()}
        with self._opened():
            for optimizer in optimizers:
                check_optimizer(
                    optimizer, lambda p: id(p) in coming or all(its.of(p) is not None for its in self._copies[:1])
                )
        for item in fresh:
            if isinstance(item, LRScheduler):
                optimizer = original(item.optimizer)
                if id(optimizer) not in self._all and not any(optimizer is one for one in optimizers):
                    raise ConfigurationError(
                        f"{type(item).__name__} changes the settings of an optimizer that is not prepared; prepare the "
                        "optimizer with it or before it"
                    )

    def _install(self, item: Any, copies: list[Any], others: Mapping[int, Any]) -> Any:
        """Makes the proxy of an original that has been copied; ``others`` were made before it in the same call."""
        if isinstance(item, nn.Module):
            for replica, model in enumerate(copies):
                for part in (model, *model.children()):
                    part.register_forward_pre_hook(OnlyReplica(replica, self.which), prepend=True)
            self._changes.append(ModelChanges(copies, self._copies, self.devices[0], self._is_pending))
            return mirrored(MirroredModule, copies, self)
        if isinstance(item, torch.optim.Optimizer):
            self._num_optimizers += 1
            name = f"step() of {type(item).__name__} {self._num_optimizers - 1}"
            return self._install_optimizer(name, copies)
        if isinstance(item, torch.amp.GradScaler):
            if item.is_enabled():  # else it has no state
                self._scalers.append(copies)
            return mirrored(MirroredScaler, copies, self, largest=self._largest, optimizer_of=self._own)
        optimizer = {**self._all, **others}[id(original(item.optimizer))]
        return mirrored(MirroredScheduler, [item] * len(self.devices), self, optimizer=optimizer)

    def _copy_optimizer(self, copies: Copies, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return copies.of_optimizer(optimizer)

    def _install_optimizer(self, name: str, copies: list[Any]) -> Any:
        """Makes the proxy of an optimizer; ``name`` is that of its step, for messages."""
        for replica, optimizer in enumerate(copies):
            optimizer.register_step_pre_hook(functools.partial(self._before_step, name, replica))
        self._changes.append(OptimizerChanges(copies, self._copies))
        return mirrored(MirroredOptimizer, copies, self)

    # -- inside of replicas ------------------------------------------------------------------------------------

    def _before_step(self, name: str, replica: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Gives a replica's optimizer the settings that replica 0 has in this very step."""
        if (here := self.which()) is None:
            self.touch()
            return
        if here != replica:
            raise foreign(f"stepped the {type(optimizer).__name__}", here, replica)
        mine = [] if replica else [snapshot(settings_of(group)) for group in optimizer.param_groups]
        all_settings: list[Settings] = self.meet(name, mine, lambda offers: [offers[0]] * len(offers))
        if replica:
            for settings, group in zip(all_settings, optimizer.param_groups, strict=True):
                if setting := self._copies[replica - 1].set_otherwise(settings, group):
                    self._warn(f"{name}: {otherwise(setting, settings.get(setting), group.get(setting), replica)}")
                self._copies[replica - 1].take_settings(settings, group)

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s. An object that is not prepared (a step counter, say) is shared by all replicas and called by "
                "each: call it outside of strategy.run, or use a torch scheduler",
                what,
            )

    def _largest(self, found: torch.Tensor) -> torch.Tensor:
        def decide(offers: list[torch.Tensor]) -> list[torch.Tensor]:
            return [torch.stack([offer.to(offers[0].device) for offer in offers]).amax(0)] * len(offers)

        largest: torch.Tensor = self.meet("step() of a GradScaler", found, decide)
        return largest

    def _own(self, optimizer: Any) -> torch.optim.Optimizer:
        proxy = self._all.get(id(original(optimizer)))
        own: torch.optim.Optimizer = original(optimizer) if proxy is None else current(proxy)
        return own


def snapshot(settings: Settings) -> Settings:
    """As they are now: a scheduler may write to their tensors."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in settings.items()}


def otherwise(setting: str, counts: Any, other: Any, replica: int) -> str:
    return (
        f"a step set {setting} to {counts!r} on replica 0, whose value is used, and to {other!r} on replica {replica}"
    )
