"""The step of an optimizer whose variables are on parameter servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from stratagem.strategy.ps.checks import check_step


def step_by(optimizer: torch.optim.Optimizer, commit: Callable[[], None]) -> None:
    """Has ``optimizer.step()`` call ``commit``, in the place of its own step: it goes on with a copy of itself that has
    no parameters. Changes it in place."""
    idle = object.__new__(type(optimizer))
    idle.__dict__.update(optimizer.__dict__, param_groups=[])
    vars(optimizer)["_step_supports_amp_scaling"] = True  # so a GradScaler leaves the mark that is looked for

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_step(optimizer, (*args[1:], kwargs.get("closure")))  # args begin with the optimizer itself
        commit()
        return (idle, *args[1:]), kwargs

    own = optimizer.register_step_pre_hook(torch.compiler.disable(before, reason="parameter servers make the step"))

    def register(hook: Callable[..., Any]) -> RemovableHandle:
        handle = type(optimizer).register_step_pre_hook(optimizer, hook)
        hooks = optimizer._optimizer_step_pre_hooks
        hooks[own.id] = hooks.pop(own.id)  # goes to the end: what others change in .grad is part of the step
        return handle

    vars(optimizer)["register_step_pre_hook"] = register
