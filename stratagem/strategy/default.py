"""The strategy outside of any scope: a pass-through, unless a script or a job sets another."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import placement_from_environment
from stratagem.strategy.base import Strategy
from stratagem.strategy.current import current_strategy, has_current_strategy, pass_through, set_strategy
from stratagem.strategy.prepared import Preparation
from stratagem.strategy.replicas.context import run_alone
from stratagem.worker.gradient_guard import guard, skipped
from stratagem.worker.runtime import active_runtime
from stratagem.worker.script_runner import awaits_strategy
from stratagem.worker.step_meter import active_meter


class DefaultStrategy(Strategy):
    """The pass-through that :func:`get_strategy` gives outside any scope: one replica, nothing changed."""

    places_models = False

    def _prepare(self, objects: Sequence[Any], preparation: Preparation) -> Sequence[Any]:
        models = [item for item in objects if isinstance(item, torch.nn.Module)]
        preparation.compile(models)
        for item in objects:
            if isinstance(item, torch.optim.Optimizer):
                guard(item, preparation, functools.partial(skipped, models, None))
        return objects

    def _prepare_metric(self, metric: Any) -> None:
        from stratagem.strategy.prepared_metric import prepare_metric  # loads torchmetrics

        prepare_metric(metric, self)

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return run_alone(self, fn, args, kwargs)


pass_through(DefaultStrategy())


def get_strategy() -> Strategy:
    """The strategy of the open scope, or outside any scope the default. The default is the argument of
    :func:`set_strategy`; else, in a task of a job, the job's strategy, created here; else the pass-through."""
    if isinstance(current_strategy(), DefaultStrategy) and awaits_strategy():
        from stratagem.strategy.environment import strategy_from_environment

        set_strategy(strategy_from_environment())
    return current_strategy()


def has_strategy() -> bool:
    """Whether a scope is open, or a default exists; see :func:`get_strategy`."""
    return has_current_strategy() or not isinstance(get_strategy(), DefaultStrategy)


def is_lead() -> bool:
    """Whether this process does what only one process may do. True for a process that trains alone, and for an
    evaluator. Until the script has created a strategy, the lead is worker 0 of the environment's cluster."""
    if (runtime := active_runtime()) is not None:
        return runtime.is_lead()
    placement = placement_from_environment(os.environ) if active_meter() is None else None
    task = None if placement is None else placement.task
    return task is None or task.type == "evaluator" or task == TaskId("worker", 0)
