"""A prepared optimizer whose parameters are in one place, while several replicas compute with copies of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from stratagem.data.nested import CopiedAsDict
from stratagem.errors import ConfigurationError
from stratagem.strategy.replicas.mirrored import Meet, current
from stratagem.strategy.replicas.mirrored_stepping import MirroredOptimizer


class CentralOptimizer(MirroredOptimizer):
    """Stands for the only optimizer (see :class:`Mirrored`): in a step all replicas meet, and it is stepped once."""

    __slots__ = ("_mirrored_copies_of", "_mirrored_meet", "_mirrored_name", "_mirrored_step_once")

    _mirrored_copies_of: Callable[[nn.Parameter], Sequence[nn.Parameter]]
    """From a parameter to its copy on each replica."""
    _mirrored_step_once: Callable[[], None]
    _mirrored_meet: Meet
    _mirrored_name: str
    """Of its step, for messages."""

    @property
    def param_groups(self) -> Any:
        """The groups; in a replica, with its own copies of the parameters, and the settings of all."""
        replica = self._mirrored_home.which()
        groups: list[dict[str, Any]] = current(self).param_groups
        if replica is None:
            return groups
        return [CentralGroup(group, lambda p: self._mirrored_copies_of(p)[replica - 1]) for group in groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the replica's own copies of the parameters; of all, when called outside of replicas."""
        replica = self._mirrored_home.which()
        for group in current(self).param_groups:
            for parameter in group["params"]:
                copies = self._mirrored_copies_of(parameter)
                for one in (parameter, *copies) if replica is None else (copies[replica - 1],):
                    if set_to_none or one.grad is None:
                        one.grad = None
                    else:
                        one.grad.zero_()

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
            pairs = [(p, self._mirrored_copies_of(p)) for group in optimizer.param_groups for p in group["params"]]
            for parameter, copies in pairs:
                gradient = copies[0].grad  # after backward all have the same
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
            self._mirrored_step_once()
            for parameter, copies in pairs:
                spread(parameter, copies)
            return [None] * len(offers)

        return self._mirrored_meet(self._mirrored_name, None, decide)


class CentralGroup(CopiedAsDict):
    """A parameter group as one replica sees it: settings are those of all, parameters the copies that it has."""

    def __init__(self, group: dict[str, Any], copy_of: Callable[[nn.Parameter], nn.Parameter]) -> None:
        self.data = group  # itself: what is set here is set for all
        self._copy_of = copy_of

    def __getitem__(self, name: str) -> Any:
        value = self.data[name]
        return list(map(self._copy_of, value)) if name == "params" else value

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "params":
            raise ConfigurationError("the parameters of a prepared optimizer stay what they were when it was prepared")
        self.data[name] = value


@torch.no_grad()
def spread(parameter: nn.Parameter, copies: Sequence[nn.Parameter]) -> None:
    """Gives copies the value of a parameter that was written to. A copy on its device is the same memory."""
    for copy in copies:
        if copy.data_ptr() == parameter.data_ptr():
            torch.autograd.graph.increment_version(copy)  # it changed too: a graph that needs the old value is stale
        else:
            copy.copy_(parameter, non_blocking=True)
