"""Finds what cannot be copied for another replica, before anything is changed.

Each check raises a ConfigurationError, which names what it found and says what to do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from stratagem.errors import ConfigurationError


def check_shapes(module: nn.Module) -> None:
    """Refuses a model whose lazy layers have no weights yet, or that has no values."""
    for path, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and is_lazy(tensor):
                raise ConfigurationError(
                    f"{_named(path, name)} of {_kind(module)} has no shape yet; call the model once on a batch before "
                    "strategy.prepare, so that its lazy layers get their shapes"
                )
            if tensor is not None and tensor.is_meta and type(tensor) in (nn.Parameter, torch.Tensor):  # no table
                raise ConfigurationError(
                    f"{_named(path, name)} of {_kind(module)} is on the meta device, without values; give it some "
                    'before strategy.prepare: module.to_empty(device="cpu"), and a state dict or reset_parameters()'
                )


def check_dense(module: nn.Module, tensors: Iterable[tuple[str, Any]]) -> None:
    """Refuses a model of which one of ``tensors`` (with their names), which other processes are sent, is sparse."""
    for name, tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided:
            raise ConfigurationError(
                f"{name} of {_kind(module)} is {tensor.layout}, which cannot be sent to other processes; keep it as a "
                "plain attribute, which each process makes itself (self.adjacency = adjacency, no register_buffer), or "
                "its indices and values as two dense tensors"
            )


def check_module(module: nn.Module) -> None:
    """Refuses a model of which a copy would not be the same model."""
    check_shapes(module)
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"{path or 'the model'} is a ScriptModule, whose internals torch does not expose, so one process "
                "cannot have several replicas of it: train the module that it was made from, and pass that to "
                "torch.jit.script or trace after training; to train faster, prepare(torch_compile=True)"
            )
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


def check_layers(modules: Iterable[nn.Module]) -> None:
    """Refuses layers that would silently go by the examples of one replica, which others do not have."""
    for path, part in (named for module in modules for named in module.named_modules()):
        if isinstance(part, nn.SyncBatchNorm):
            raise ConfigurationError(
                f"{path or 'the model'} is an nn.SyncBatchNorm, which knows only the replicas of torch.distributed, so "
                "each here would keep to its own examples: leave out convert_sync_batchnorm, and pass "
                "sync_batchnorm=True to prepare (not on parameter servers, where BatchNorm stays with each worker)"
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ConfigurationError(
                f"max_norm={part.max_norm:g} of {path or _kind(part)} makes forward change the weights according to "
                "the examples of one replica or worker: leave it out, and scale the rows (of a bag, before they are "
                f"pooled): x / (x.norm({part.norm_type:g}, dim=-1, keepdim=True) / {part.max_norm:g}).clamp(min=1)"
            )


def check_memory(modules: Iterable[nn.Module]) -> None:
    """Refuses parameters of which one has elements of another one: copied, each has its own."""
    named = {id(one): (name, one) for module in modules for name, one in module.named_parameters()}
    plain = [pair for pair in named.values() if type(pair[1]) is nn.Parameter and pair[1].numel()]
    plain.sort(key=lambda pair: pair[1].data_ptr())
    last, end = 0, 0
    """Of those before: the one that reaches farthest, and where it ends."""
    for index, (name, one) in enumerate(plain):
        if one.data_ptr() < end and _have_common(plain[last][1], one):
            raise ConfigurationError(
                f"{plain[last][0]} and {name} are two parameters that share memory, which copies of them do not: make "
                "them one (decoder.weight = encoder.weight; for a transpose, torch.nn.functional.linear(x, "
                "encoder.weight.t()) in forward), or clone() one"
            )
        stop = one.data_ptr() + _extent(one) * one.element_size()
        if stop > end:
            last, end = index, stop


def _have_common(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share an element, and not only the space between their elements."""
    addresses = [
        torch.arange(_extent(tensor)).as_strided(tensor.shape, tensor.stride()) * tensor.element_size()
        + tensor.data_ptr()
        for tensor in (one, other)
    ]
    return bool(torch.isin(*addresses).any())


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def recomputed(module: nn.Module) -> frozenset[str]:
    """Attributes of one module that it computes anew in each forward, and that torch keeps as plain tensors."""
    hooks = module._forward_pre_hooks.values()
    names = {hook.name for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)}
    return frozenset(names | {hook._tensor_name for hook in hooks if isinstance(hook, BasePruningMethod)})


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
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


def check_made(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that torch cannot give hooks."""
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ConfigurationError(
            f"the __init__ of {_kind(optimizer)} does not call that of torch.optim.Optimizer: start it with "
            "super().__init__(params, defaults). An optimizer that wraps another one can also be built after prepare, "
            "around what prepare returns"
        )


def check_optimizer(optimizer: torch.optim.Optimizer, is_known: Callable[[torch.Tensor], bool]) -> None:
    """Refuses an optimizer whose copies would not train the copies of the models. ``is_known``: whether a tensor has
    copies on the other replicas."""
    check_parameters(optimizer, is_known)
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ConfigurationError(
            f"{_kind(optimizer)} has a step of its own as an attribute, which cannot be copied for another replica; "
            "make it a method of a subclass, or use register_step_pre_hook and register_step_post_hook"
        )


def check_parameters(optimizer: torch.optim.Optimizer, is_known: Callable[[torch.Tensor], bool]) -> None:
    """Refuses an optimizer that would change what no model computes with. ``is_known``: whether a tensor is a parameter
    of a prepared model, or a variable of the strategy."""
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", [""] * len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            if not is_known(parameter):
                raise ConfigurationError(
                    f"group {index} of {_kind(optimizer)} has a tensor of {list(parameter.shape)} "
                    f"{f'({name}) ' if name else ''}that no prepared model has; prepare the model with its optimizer "
                    "or before it, and make a standalone tensor an nn.Parameter of a module that is prepared too "
                    "(nn.ParameterList([…]) is one), or the value() of an sg.Variable(trainable=True)"
                )


def _culprit(module: nn.Module) -> str:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name != "_modules" and not _can_be_copied(value):
                items = value.items() if isinstance(value, Mapping) else ()
                inner = next((str(key) for key, item in items if not _can_be_copied(item)), name)
                return f"{_named(path, inner)} of {_kind(module)}"
    return _kind(module)


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
