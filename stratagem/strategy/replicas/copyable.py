"""What cannot be copied for another replica, found before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from stratagem.errors import ConfigurationError


def check_shapes(module: nn.Module) -> None:
    """Refuses a model whose lazy layers have no weights yet.

    Raises:
        ConfigurationError: names one, and says what to do.
    """
    for path, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and is_lazy(tensor):
                raise ConfigurationError(
                    f"{_named(path, name)} of {_kind(module)} has no shape yet; call the model once on a batch before "
                    "strategy.prepare, so that its lazy layers get theirs"
                )


def check_module(module: nn.Module) -> None:
    """Refuses a model of which a copy would not be the same model.

    Raises:
        ConfigurationError: names the attribute, and says what to do.
    """
    check_shapes(module)
    for path, part in module.named_modules():
        slots = sorted({name for kind in type(part).__mro__ for name in _slots_of(kind)} - {"__dict__", "__weakref__"})
        if slots:
            raise ConfigurationError(
                f"{_kind(part)} keeps {', '.join(slots)} in __slots__, which torch loses in a copy; a model of several "
                "replicas needs plain attributes"
            )
        again = recomputed(part)
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and not value.is_leaf and name not in again:
                raise ConfigurationError(
                    f"{_named(path, name)} of {_kind(module)} is the result of a computation that needs gradients; "
                    "compute it in forward, or keep it detached"
                )


def recomputed(module: nn.Module) -> frozenset[str]:
    """Attributes of one module that it computes anew in each forward, and that torch keeps as plain tensors."""
    hooks = module._forward_pre_hooks.values()
    return frozenset(hook.name for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm))


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy.

    Raises:
        ConfigurationError: names the attribute that cannot be copied.
    """
    for part in module.modules():
        for name in recomputed(part):
            value = vars(part).get(name)
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
                memo.setdefault(id(memo), []).append(value)  # as deepcopy does, so that the address stays its own
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ConfigurationError(
            f"{_culprit(module)} cannot be copied for another replica ({error}); keep it outside of the model, or give "
            "its class a __deepcopy__"
        ) from error


def check_optimizer(optimizer: torch.optim.Optimizer, is_known: Callable[[torch.Tensor], bool]) -> None:
    """Refuses an optimizer whose copies would not train the copies of the models.

    Args:
        is_known: whether a tensor has copies on the other replicas.

    Raises:
        ConfigurationError: says what to do.
    """
    check_parameters(optimizer, is_known)
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ConfigurationError(
            f"{_kind(optimizer)} has a step of its own as an attribute, which cannot be copied for another replica; "
            "make it a method of a subclass, or use register_step_pre_hook and register_step_post_hook"
        )


def check_parameters(optimizer: torch.optim.Optimizer, is_known: Callable[[torch.Tensor], bool]) -> None:
    """Refuses an optimizer that would change what no model computes with.

    Args:
        is_known: whether a tensor is a parameter of a prepared model, or a variable of the strategy.

    Raises:
        ConfigurationError: names what is not.
    """
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", [""] * len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            if not is_known(parameter):
                raise ConfigurationError(
                    f"group {index} of {_kind(optimizer)} has a tensor of {list(parameter.shape)} "
                    f"{f'({name}) ' if name else ''}that no prepared model has; prepare the model with its optimizer "
                    "or before it, and make a tensor of its own an nn.Parameter of a module or an "
                    "sg.Variable(trainable=True)"
                )


def _culprit(module: nn.Module) -> str:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name != "_modules" and not _can_be_copied(value):
                inner = _first_bad_key(value) if isinstance(value, Mapping) else ""
                return f"{_named(path, inner or name)} of {_kind(module)}"
    return _kind(module)


def _first_bad_key(values: Mapping[Any, Any]) -> str:
    return next((str(key) for key, value in values.items() if not _can_be_copied(value)), "")


def _can_be_copied(value: Any) -> bool:
    try:
        copy.deepcopy(value)
    except Exception:
        return False
    return True


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _named(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _kind(item: Any) -> str:
    return type(item).__name__
