"""Whether the script of a task takes part in its job: one that makes no strategy trains alone, in each task."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stratagem.errors import ConfigurationError
from stratagem.worker.step_meter import active_meter

_process: int | None = None
_has_stepped = False


def begin(num_replicas: int) -> None:
    """A task's script is about to run in this process.

    In a job of several replicas the first step of an optimizer is an error as long as there is neither a strategy nor
    a process group of ``torch.distributed``.
    """
    global _process
    _process = os.getpid()
    if num_replicas > 1:

        def check(*_: Any) -> None:
            if awaits_strategy() and not uses_torch_distributed():
                raise ConfigurationError(trains_alone(num_replicas, "and trains"))

        register_optimizer_step_pre_hook(check)
    register_optimizer_step_post_hook(_note)


def _note(*_: Any) -> None:
    global _has_stepped
    _has_stepped = True


def has_stepped() -> bool:
    """Whether an optimizer of the script has made a step, wherever it was applied."""
    return _has_stepped


def awaits_strategy() -> bool:
    """Whether this process runs the script of a task, and there has been no strategy in it so far."""
    return _process == os.getpid() and active_meter() is None


def uses_torch_distributed() -> bool:
    """Whether the script has made a process group, which it may have destroyed again: its ranks train together."""
    return dist.is_available() and (dist.is_initialized() or c10d._default_pg_init_method is not None)


def trains_alone(num_replicas: int, what: str) -> str:
    """What a script is told that has made no strategy in a job of several replicas."""
    return (
        f"this job has {num_replicas} replicas, but its script has made no strategy {what}: each task would train a "
        "model of its own. Write `strategy = sg.strategy_from_environment()`, `strategy.prepare(model, optimizer)` and "
        "`strategy.run(step, args=(batch,))`, or train with sg.Model, which finds the job's strategy by itself"
    )
