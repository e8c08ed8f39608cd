"""Several replicas that compute with one copy of the variables, in one place."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from stratagem.data.nested import CopiedAsDict
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.strategy.replicas.copies import Copies
from stratagem.strategy.replicas.cross_device_ops import CrossDeviceOps
from stratagem.strategy.replicas.local_replicas import SeveralReplicas
from stratagem.strategy.replicas.mirrored import (
    Mirrored,
    MirroredOptimizer,
    current,
    foreign,
    mirrored,
    original,
    taken_outside,
)
from stratagem.strategy.replicas.mirrors import Mirrors, otherwise, snapshot
from stratagem.strategy.replicas.outside_changes import gradient_of
from stratagem.strategy.replicas.replica_threads import current_replica
from stratagem.worker.gradient_guard import parameters_of
from stratagem.worker.reduction.same_bits import checksums
from stratagem.worker.step_meter import StepMeter

logger = logging.getLogger(__name__)


class CentralReplicas(SeveralReplicas):
    """Implements :class:`LocalReplicas`: the user's objects stay in one place; replicas have copies of models alone."""

    _mirrors: CentralMirrors

    def __init__(
        self,
        strategy: Strategy,
        devices: Sequence[torch.device],
        parameter_device: torch.device,
        ops: CrossDeviceOps,
        meter: StepMeter,
        is_pending: Callable[[nn.Parameter], bool],
        num_seen: Callable[[], Sequence[int]],
    ) -> None:
        self._parameter_device = parameter_device
        self._num_seen = num_seen
        super().__init__(strategy, devices, ops, meter, is_pending)

    def _make_mirrors(self, keep: Callable[[int, dict[int, Any]], None]) -> CentralMirrors:
        return CentralMirrors(
            (self._parameter_device, *self.devices),
            lambda: None if (replica := current_replica()) is None else replica + 1,
            meet=self.replica_threads.meet,
            keep=lambda replica, memo: keep(replica - 1, memo),
            is_pending=self._is_pending,
            num_seen=self._num_seen,
        )

    def on_replica(self, item: Any, replica: int) -> Any:
        return self._mirrors.copies_of(item)[replica + 1]

    def stepping(self, optimizer: torch.optim.Optimizer, replica: int) -> torch.optim.Optimizer | None:
        return optimizer if replica == 0 else None

    def parameters_of(self, optimizer: torch.optim.Optimizer, replica: int) -> list[nn.Parameter]:
        return [self._mirrors.twins_of(parameter)[replica] for parameter in parameters_of(optimizer)]

    def have_same_gradients(self, optimizer: torch.optim.Optimizer, replica: int) -> bool:
        return len({checksums(self.parameters_of(optimizer, each)) for each in range(len(self.devices))}) == 1


class CentralMirrors(Mirrors):
    """The first of the copies is no replica's: it is the user's object, in the one place, and replicas come after it.
    The examples that each replica was given since a model was prepared are how much its buffers count in an average."""

    def __init__(self, *args: Any, num_seen: Callable[[], Sequence[int]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_seen = num_seen
        self._models: list[tuple[Sequence[nn.Module], Sequence[int]]] = []
        self._settings: list[OwnSettings] = []
        self._versions: list[list[int]] = []
        self._gradients: list[tuple[torch.Tensor | None, int]] = []
        self._has_warned_of_writes = False

    def add(self, objects: Sequence[Any]) -> list[Any]:
        """See :meth:`Mirrors.add`; a ConfigurationError also for a GradScaler."""
        for item in objects:
            if isinstance(original(item), torch.amp.GradScaler):
                raise ConfigurationError(
                    "a GradScaler needs an optimizer per replica, but here all replicas share one: use "
                    "MirroredStrategy, or bfloat16 autocast, which needs no scaling"
                )
        return super().add(objects)

    def synchronize(self) -> None:
        super().synchronize()
        for settings in self._settings:
            settings.spread()
        self.note_weights()

    def note_weights(self) -> None:
        """Replicas have the weights that they should have."""
        self._versions = [[copy._version for copy in copies] for _, _, *copies in self._weights()]
        for _, parameter, *_ in self._weights():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.data  # with a version that is not that of replica 0's gradient
        self._gradients = [gradient_of(parameter) for _, parameter, *_ in self._weights()]

    def check_gradients(self) -> None:
        """ConfigurationError: a step has changed gradients where no replica has its own."""
        for (_, parameter, *_), (gradient, version) in zip(self._weights(), self._gradients, strict=False):
            now, now_version = gradient_of(parameter)
            if now is not gradient or now_version != version:
                raise taken_outside("the step", "the gradient of a parameter", "all replicas")

    def look_at_weights(self) -> None:
        """Warns of weights that a step has written to itself."""
        for (name, parameter, *copies), before in zip(self._weights(), self._versions, strict=False):
            written = sum(copy._version != version for copy, version in zip(copies, before, strict=True))
            if written > (copies[0].device == parameter.device) and not self._has_warned_of_writes:
                self._has_warned_of_writes = True
                logger.warning(
                    "%s was written to in a step, by %d replicas: in memory that they share it happens once per "
                    "replica, on other devices the next update undoes it. Do it once, outside of strategy.run, or use "
                    "MirroredStrategy. An idempotent change, such as a clamp, is safe where they share memory",
                    name,
                    written,
                )

    def _weights(self) -> Iterator[tuple[Any, ...]]:
        """Name, the parameter, and its copy on each replica."""
        for models, _ in self._usable():
            names = (name for name, _ in models[0].named_parameters())
            yield from zip(names, *(model.parameters() for model in models), strict=True)

    def _usable(self) -> list[tuple[Sequence[nn.Module], Sequence[int]]]:
        return [each for each in self._models if id(each[0][0]) not in self.unusable]

    def record(self) -> None:
        """See :meth:`Mirrors.record`. The user's models get the gradients and the averages of buffers."""
        self.look_at_weights()
        for (central, *replicas), before in self._usable():
            weights = [now - then for now, then in zip(self._num_seen(), before, strict=True)]
            for parameter, *copies in zip(*(model.parameters() for model in (central, *replicas)), strict=True):
                gradient = copies[0].grad
                if gradient is None or gradient.device == parameter.device:
                    parameter.grad = gradient
            for own, *parts in zip(*(model.modules() for model in (central, *replicas)), strict=True):
                for name in parts[0]._buffers:  # which forward may have given another tensor
                    copies = [part._buffers[name] for part in parts]
                    own._buffers[name] = _averaged(own._buffers.get(name), copies, weights, self.devices[0])
        super().record()

    def twins_of(self, parameter: nn.Parameter) -> Sequence[nn.Parameter]:
        """The copy of a parameter on each replica."""
        return [its.of(parameter) for its in self._copies]

    def _copy_optimizer(self, copies: Copies, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def _install_optimizer(self, name: str, copies: list[Any]) -> Any:
        optimizer: torch.optim.Optimizer = copies[0]

        def refuse_in_replica(*_: Any) -> None:
            if (here := self.which()) is not None:
                raise foreign(f"stepped the {type(optimizer).__name__}", here - 1, None)

        optimizer.register_step_pre_hook(refuse_in_replica)
        settings = OwnSettings(optimizer, len(self._copies) - 1)
        self._settings.append(settings)
        return mirrored(CentralOptimizer, copies, self, name=name, settings=settings)

    def _install(self, item: Any, copies: list[Any], others: Any) -> Any:
        if isinstance(item, nn.Module):
            self._models.append((copies, tuple(self._num_seen())))
            for parameter, *twins in zip(*(model.parameters() for model in copies), strict=True):
                if parameter.requires_grad:
                    parameter.register_hook(self._refuse_in_replica)
                for twin in twins:
                    if twin.device == parameter.device:
                        twin.data = parameter.data
        return super()._install(item, copies, others)

    def _refuse_in_replica(self, _: torch.Tensor) -> None:
        if (here := self.which()) is not None:
            raise taken_outside(f"local replica {here - 1}", "a parameter", "all replicas")


class CentralOptimizer(MirroredOptimizer):
    """Stands for the only optimizer (see :class:`Mirrored`): in a step all replicas meet, and it is stepped once."""

    __slots__ = ("_mirrored_name", "_mirrored_settings")

    _mirrored_home: CentralMirrors
    _mirrored_name: str
    """Of its step, for messages."""
    _mirrored_settings: OwnSettings

    @property
    def param_groups(self) -> Any:
        """The groups; in a replica, with its own copies of the parameters."""
        if (replica := self._mirrored_home.which()) is None:
            return current(self).param_groups
        groups = self._mirrored_settings.groups_of(replica - 1)
        return [CentralGroup(group, lambda p: self._mirrored_home.twins_of(p)[replica - 1]) for group in groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the replica's own copies of the parameters; of all, when called outside of replicas."""
        replica = self._mirrored_home.which()
        for group in current(self).param_groups:
            for parameter in group["params"]:
                copies = self._mirrored_home.twins_of(parameter)
                for one in (parameter, *copies) if replica is None else (copies[replica - 1],):
                    if set_to_none or one.grad is None:
                        one.grad = None
                    else:
                        one.grad.zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Outside of replicas; a ConfigurationError in one, which has copies of the parameters."""
        if self._mirrored_home.which() is not None:
            raise ConfigurationError(
                "add_param_group in a step: all replicas share the optimizer, and each would add a group of its own "
                "copies. Call it outside of strategy.run"
            )
        Mirrored.__getattr__(self, "add_param_group")(param_group)

    def _mirrored_own_step(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = current(self)
        if self._mirrored_home.which() is None:
            self._mirrored_home.touch()
            return optimizer.step(*args, **kwargs)
        if args or any(value is not None for value in kwargs.values()):
            raise ConfigurationError(
                "optimizer.step(closure) cannot run where all replicas share one optimizer: each would have its own "
                "closure"
            )

        def decide(offers: list[Any]) -> list[None]:
            for what in self._mirrored_settings.set_otherwise():
                self._mirrored_home._warn(f"{self._mirrored_name}: {what}")
            self._mirrored_home.look_at_weights()
            self._mirrored_home.check_gradients()
            pairs = [(parameter, self._mirrored_home.twins_of(parameter)) for parameter in parameters_of(optimizer)]
            for parameter, copies in pairs:
                gradient = copies[0].grad  # after backward all have the same
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
            before = [None if (gradient := parameter.grad) is None else gradient._version for parameter, _ in pairs]
            optimizer.step()  # outside of replicas, which wait for it
            for (parameter, copies), version in zip(pairs, before, strict=True):
                spread(parameter, copies)
                if parameter.grad is not None and parameter.grad._version != version:  # clipped
                    for other in (copy.grad for copy in copies if copy.grad is not parameter.grad):
                        if other is not None:
                            other.copy_(parameter.grad)
            self._mirrored_settings.spread()
            self._mirrored_home.note_weights()
            return [None] * len(offers)

        return self._mirrored_home.meet(self._mirrored_name, None, decide)


class OwnSettings:
    """The groups of the only optimizer as replicas see them. What replica 0 sets counts. Another one sees what was set
    when they began to run or made their last step, and what it has set itself, as if it had an optimizer of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, num_others: int) -> None:
        self._optimizer = optimizer
        self._num_others = num_others
        self.spread()

    def spread(self) -> None:
        """Gives the other replicas what is set now."""
        taken = list(map(snapshot, self._optimizer.param_groups))
        self._others = [[collections.ChainMap({}, group) for group in taken] for _ in range(self._num_others)]

    def groups_of(self, replica: int) -> Sequence[Any]:
        return self._others[replica - 1] if replica else self._optimizer.param_groups

    def set_otherwise(self) -> Iterator[str]:
        """In words: what another replica has set to another value than replica 0; not of tensors."""
        for replica, groups in enumerate(self._others, start=1):
            for own, group in zip(groups, self._optimizer.param_groups, strict=False):  # a step may have added one
                for name, value in own.maps[0].items():
                    counts = group.get(name)
                    if not isinstance(value, torch.Tensor) and not isinstance(counts, torch.Tensor) and value != counts:
                        yield otherwise(name, counts, value, replica)


class CentralGroup(CopiedAsDict):
    """A parameter group as one replica sees it: parameters are the copies that it has."""

    def __init__(self, group: Any, copy_of: Callable[[nn.Parameter], nn.Parameter]) -> None:
        self.data = group  # itself: what is set here is set there
        self._copy_of = copy_of

    def __getitem__(self, name: str) -> Any:
        value = self.data[name]
        return list(map(self._copy_of, value)) if name == "params" else value

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "params":
            raise ConfigurationError("the parameters of an optimizer are fixed once it is prepared")
        self.data[name] = value


@torch.no_grad()
def spread(parameter: nn.Parameter, copies: Sequence[nn.Parameter]) -> None:
    """Gives copies the value of a parameter that was written to. A copy on its device is the same memory."""
    for copy in copies:
        if copy.data_ptr() == parameter.data_ptr():
            torch.autograd.graph.increment_version(copy)  # it changed too: a graph that needs the old value is stale
        else:
            copy.copy_(parameter, non_blocking=True)


@torch.no_grad()
def _averaged(
    buffer: torch.Tensor | None, copies: Sequence[torch.Tensor | None], weights: Sequence[int], device: torch.device
) -> torch.Tensor | None:
    """Floats become averages, integers the maximum (docs/protocol.md 21): of what is of one kind with the first copy,
    in ``buffer`` if that is too."""
    if (first := copies[0]) is None:
        return None
    kind = first.shape, first.dtype
    there = [one is not None and (one.shape, one.dtype) == kind for one in (buffer, *copies)]
    if buffer is None or not there[0]:
        buffer = torch.empty_like(first, device=device)
    pairs = zip(copies, weights, there[1:], strict=True)
    alike = [(copy.to(device), weight) for copy, weight, fits in pairs if copy is not None and fits]
    if not buffer.is_floating_point():
        here = [copy for copy, _ in alike]
        return buffer.copy_(torch.stack(here).amax(0) if not buffer.is_complex() else here[0])
    total = sum(weight for _, weight in alike)
    counted = [(copy, weight / total) for copy, weight in alike if weight] if total else []
    mean = sum((copy * part for copy, part in counted), torch.zeros_like(buffer)) if counted else alike[0][0]
    return buffer.copy_(mean)
