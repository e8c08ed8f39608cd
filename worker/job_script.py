"""Whether the script of a task takes part in its job: one that makes no strategy trains alone, in each task."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stratagem.errors import ConfigurationError
from stratagem.worker.runtime import active_runtime
from stratagem.worker.step_meter import active_meter

logger = logging.getLogger(__name__)

_process: int | None = None
_has_stepped = False


def begin(num_replicas: int, num_workers: int) -> None:
    """A task's script is about to run in this process.

    In a job of several replicas the first step of an optimizer is an error as long as there is neither a strategy nor
    a process group of ``torch.distributed``; in one of several workers it is warned of with the strategy of a process.
    """
    global _process
    _process = os.getpid()
    if num_replicas > 1:

        def check(*_: Any) -> None:
            if _has_stepped or uses_torch_distributed():
                return
            if awaits_strategy():
                raise ConfigurationError(trains_alone(num_replicas, "and trains"))
            if num_workers > 1 and active_runtime() is None:
                logger.warning(
                    "this job has %d workers, and the strategy that the script has made is of one process: each worker "
                    "trains a model of its own. `strategy = sg.strategy_from_environment()` makes the job's",
                    num_workers,
                )

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
