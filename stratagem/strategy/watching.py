"""What torch does in a replica or in a scope, told to what the strategy there has prepared."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stratagem.strategy.replicas.context import running_strategy, strategy_of_scope


@functools.cache
def watch_torch() -> None:
    """From now on strategies hear of each step of an optimizer in a replica, and of each parameter of their scope."""
    register_optimizer_step_pre_hook(_before_step)
    register_module_parameter_registration_hook(_on_parameter)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    strategy = running_strategy()
    if strategy is not None and strategy.prepared is not None:
        strategy.prepared.check_step(optimizer)


def _on_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    strategy = strategy_of_scope()
    if strategy is not None and strategy.prepared is not None:
        strategy.prepared.created(module, name)
