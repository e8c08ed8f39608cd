"""Copies of models, optimizers and GradScalers for one more replica, on its device (docs/protocol.md 16)."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
import threading
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from stratagem.errors import ConfigurationError
from stratagem.strategy.replicas.copyable import copied

GRADIENT_HOOKS = {
    "register_hook": "_backward_hooks",
    "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
}
"""Hooks of a parameter's gradient: how they are registered, and where torch keeps them."""
_converting = threading.Lock()
"""How torch converts modules is said for the whole process."""
Settings = dict[str, Any]
"""Of a parameter group: all but its parameters."""


@dataclasses.dataclass(eq=False, repr=False)
class Copies:
    """All that one replica other than the first has copies of.

    There is one memo for everything that is ever copied for the replica, so what was one object stays one: optimizers
    point to the copies of their parameters, two models share what they shared.
    """

    device: torch.device
    _home: torch.device
    """Of replica 0. Tensors that are there go to ``device``; others (step counts on the CPU) stay."""
    _keep: Callable[[dict[int, Any]], None]
    """Puts into a memo what is not to be copied, and what stands for it on this replica."""

    def __post_init__(self) -> None:
        self._memo: dict[int, Any] = {}
        self._taken: dict[int, Settings] = {}
        """Of each group that took settings over, what it has had since then, unless a step changed it."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """All copying is done inside. New tensors are ordinary ones, whatever the caller's modes.

        An error forgets what was copied inside: it may be half done.
        """
        kept: dict[int, Any] = {}
        self._keep(kept)
        self._memo.update(kept)
        num_known = len(self._memo)
        try:
            with torch.inference_mode(False), torch.no_grad():
                yield
        except BaseException:
            for key in list(self._memo)[num_known:]:
                del self._memo[key]
            raise
        finally:
            # Torch knows storages, and ``keep`` its tensors, by addresses that others may have by the next time.
            stale: list[Any] = ["torch", *kept]
            for key in stale:
                self._memo.pop(key, None)

    def of_module(self, module: nn.Module) -> nn.Module:
        """Copies a model, with gradients and hooks of its parameters."""
        twin = copied(module, self._memo).to(self.device)
        for one, other in zip(module.parameters(), twin.parameters(), strict=True):
            self._finish(one, other)
        for part in twin.modules():
            vars(part).update({name: travelled(v, self._home, self.device) for name, v in vars(part).items()})
        return twin

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Copies an optimizer whose parameters have been copied. Hooks are shared: they are told whose step it is."""
        twin: torch.optim.Optimizer = object.__new__(type(optimizer))
        self._memo[id(optimizer)] = twin
        self._memo.setdefault(id(self._memo), []).append(optimizer)  # as deepcopy does: the address stays its own
        for name, value in vars(optimizer).items():
            if name == "step":
                continue  # a scheduler's counter around the original's step
            shared = name == "state" or (name.startswith("_optimizer_") and isinstance(value, dict))
            vars(twin)[name] = copy.copy(value) if shared else copy.deepcopy(value, self._memo)
        for group in twin.param_groups:
            group.update(travelled(settings_of(group), self._home, self.device))
        self.take_state(optimizer, twin)
        return twin

    def of_scaler(self, scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
        """Copies a GradScaler. Its scale goes to the device of what it scales first."""
        return copy.deepcopy(scaler, self._memo)

    def of_value(self, value: Any) -> Any:
        """Copies anything, again if it was copied before; what is part of a model becomes part of the model's copy."""
        return travelled(self._copied_again(value), self._home, self.device)

    def of(self, item: Any) -> Any:
        """The copy of ``item`` itself; None if it has none."""
        return self._memo.get(id(item))

    def take_settings(self, settings: Settings, group: dict[str, Any]) -> None:
        """Writes the settings of replica 0's group into this replica's."""
        for name in group.keys() - settings.keys() - {"params"}:
            del group[name]
        for name, value in settings.items():
            mine = group.get(name)
            if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor) and mine.shape == value.shape:
                mine.copy_(value)  # a captured graph may read this very tensor
            elif mine is not value or name not in group:
                group[name] = self.of_value(value)
        self._taken[id(group)] = settings_of(group)

    def set_otherwise(self, settings: Settings, group: dict[str, Any]) -> str | None:
        """The name of a setting that a step has changed in this replica's group, to another value than in replica 0's.
        Those in tensors are not looked at."""
        for name, before in self._taken.get(id(group), {}).items():
            values = before, settings.get(name), group.get(name)
            if not any(isinstance(one, torch.Tensor) for one in values) and group.get(name) not in values[:2]:
                return name
        return None

    def take_state(self, one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
        """Writes a copy of the state of replica 0's optimizer into this replica's."""
        states: dict[Any, Any] = one.state
        taken: dict[Any, Any] = other.state
        taken.clear()
        moving = _with_moving_steps(one)
        for key, state in states.items():
            if isinstance(key, torch.Tensor):
                twin = self._copied_again(state)
                taken[self._memo.get(id(key), key)] = moved_state(twin, key.device, self.device, id(key) in moving)
            else:
                taken[key] = self.of_value(state)

    def _copied_again(self, value: Any) -> Any:
        return copy.deepcopy(value, ChainMap({}, self._memo))  # type: ignore[arg-type]

    def _finish(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """What ``copy.deepcopy`` leaves out of a parameter."""
        if other.grad is not None or one is other:
            return
        for name, value in one.__dict__.items():
            other.__dict__.setdefault(name, copy.deepcopy(value, self._memo))
        if one.grad is not None:
            other.grad = one.grad.detach().to(self.device, copy=True)
        if not (other.is_floating_point() or other.is_complex()):
            return
        wanted, other.requires_grad = other.requires_grad, True
        for register, name in GRADIENT_HOOKS.items():
            if not getattr(other, name):
                for hook in (getattr(one, name) or {}).values():
                    getattr(other, register)(hook)
        other.requires_grad = wanted


def settings_of(group: dict[str, Any]) -> Settings:
    return {name: value for name, value in group.items() if name != "params"}


def moved_state(state: Any, source: torch.device, target: torch.device, with_step: bool) -> Any:
    """The state of one parameter of an optimizer, moved with its parameter; ``with_step`` its step count too, which
    torch keeps on the CPU otherwise."""
    if not isinstance(state, dict):
        return travelled(state, source, target)
    return {
        name: value if name == "step" and not with_step else travelled(value, source, target)
        for name, value in state.items()
    }


def move_original(item: nn.Module, device: torch.device, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Moves a model in place, with the state that optimizers already have for its parameters; a ConfigurationError
    where a parameter cannot stay the same object, as something else holds on to its memory."""
    before = {id(parameter): parameter.device for parameter in item.parameters()}
    there = torch.empty(0, device=device)
    if all(
        one.device.type == "meta" or torch._has_compatible_shallow_copy_type(one, there) for one in item.parameters()
    ):
        item.to(device)
    else:
        _swap_parameters(item, device)
    for optimizer in optimizers:
        moving = _with_moving_steps(optimizer)
        for key, state in optimizer.state.items():
            if isinstance(key, torch.Tensor) and id(key) in before:
                optimizer.state[key] = moved_state(state, before[id(key)], device, id(key) in moving)


def _swap_parameters(item: nn.Module, device: torch.device) -> None:
    """Where ``item.to(device)`` makes new parameters (XLA), which no optimizer knows, they stay the same objects."""
    with _converting:
        swapping = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            item.to(device)
        except RuntimeError as error:
            raise ConfigurationError(
                f"{type(item).__name__} cannot be moved to {device} ({error.__cause__ or error}); call prepare before "
                "anything else refers to its parameters, such as a weak reference"
            ) from error
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swapping)


def travelled(value: Any, source: torch.device, target: torch.device) -> Any:
    """``value``, with the tensors in it that are on ``source`` on ``target``; itself, if there are none."""
    if isinstance(value, nn.Parameter) or source == target or source.type == "meta":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(target) if value.device == source else value
    if type(value) in (list, tuple):
        items = [travelled(item, source, target) for item in value]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    if type(value) in (dict, OrderedDict):
        items = [travelled(item, source, target) for item in value.values()]
        return value if all(map(operator.is_, items, value.values())) else type(value)(zip(value, items, strict=True))
    return value


def _with_moving_steps(optimizer: torch.optim.Optimizer) -> set[int]:
    groups = [group for group in optimizer.param_groups if group.get("capturable") or group.get("fused")]
    return {id(parameter) for group in groups for parameter in group["params"]}
