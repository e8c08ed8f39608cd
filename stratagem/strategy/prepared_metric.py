"""Prepared metrics of torchmetrics: each replica updates its own in the step, and they are read for all replicas.

States of a metric are taken out of it and merged by its own reductions, wherever they are: wrappers and compositions
have metrics inside.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torchmetrics

from stratagem.data.nested import map_values, to_device
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.strategy.metric_states import Losses, States, states_of_all
from stratagem.strategy.replicas.context import replica_of

logger = logging.getLogger(__name__)


class PreparedMetric:
    """What a strategy's replicas count, each in an empty copy of the user's metric. Where several workers run in step,
    every worker computes."""

    def __init__(self, metric: torchmetrics.Metric, strategy: Strategy) -> None:
        self.name = type(metric).__name__
        self.strategy = strategy
        self._copies = [empty_copy(metric, device) for device in strategy.local_devices]
        self._losses = Losses(strategy)

    def own(self) -> torchmetrics.Metric | None:
        """The metric of the replica that asks, outside of replicas that of the first; None: its batch is empty."""
        if (context := replica_of(self.strategy)) is None:
            return self._copies[0]
        replica = context.replica_id_in_sync_group - self.strategy.first_replica_id
        return self._copies[replica] if self.strategy.has_examples(replica) else None

    def compute(self) -> Any:
        """The value over all replicas of all workers since the last reset. A warning where a worker was lost, and with
        it what it had counted."""
        self._check_outside("compute")
        states = states_of_all(self.strategy, [states_of(own) for own in self._copies])
        if (lost := self._losses.of_all()).who:
            logger.warning("%s lacks what %s had counted, which was lost with it", self.name, lost.who)
        if lost.is_any:
            self._losses.reset()  # that was said
        return self._computed(states)

    def reset(self) -> None:
        self._check_outside("reset")
        self._losses.reset()
        for own in self._copies:
            own.reset()

    def _computed(self, parts: Sequence[States]) -> Any:
        return to_device(merged(self._copies[0], parts).compute(), self._copies[0].device)

    def _check_outside(self, verb: str) -> None:
        if replica_of(self.strategy) is not None:
            raise ConfigurationError(
                f"{self.name}.{verb}() of a prepared metric covers all replicas: call it outside of strategy.run, on "
                "every worker; in a step, call update()"
            )


def install(metric: torchmetrics.Metric, prepared: PreparedMetric) -> None:
    """Makes a metric the name of a prepared one, in place. Copies and pickles of it are plain metrics."""
    kind: Any = type(metric)

    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        if (own := prepared.own()) is not None:
            own.update(*args, **kwargs)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = prepared.own()
        return None if own is None else own(*args, **kwargs)

    body: dict[str, Any] = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "prepared": prepared,
        "update": update,
        "forward": forward,
        "compute": lambda self: prepared.compute(),
        "reset": lambda self: prepared.reset(),
        "__deepcopy__": lambda self, memo: copy.deepcopy(prepared._copies[0], memo),
        "__reduce_ex__": lambda self, protocol: (_itself, (prepared._copies[0],)),
    }
    for name in ("update", "compute"):
        metric.__dict__.pop(name, None)  # torchmetrics puts its own around them, for one process
    metric.__class__ = type(kind.__name__, (kind,), body)


def prepare_metric(
    metric: torchmetrics.Metric | torchmetrics.MetricCollection,
    strategy: Strategy,
    make: Callable[[torchmetrics.Metric, Strategy], PreparedMetric] = PreparedMetric,
) -> list[PreparedMetric]:
    """Connects a metric or a collection to a strategy, in place. Returns what was made for it. One that is prepared
    already is left as it is; for another strategy, it is a ConfigurationError. ``make``: what counts in its stead."""
    if isinstance(metric, torchmetrics.MetricCollection):
        metric._enable_compute_groups = False  # each of its metrics has its own states
        return [made for one in metric.values(copy_state=False) for made in prepare_metric(one, strategy, make)]
    before: PreparedMetric | None = getattr(type(metric), "prepared", None)
    if before is None:
        prepared = make(metric, strategy)
        install(metric, prepared)
        return [prepared]
    if before.strategy is not strategy:
        raise ConfigurationError(
            f"{before.name} is prepared for {type(before.strategy).__name__}; give {type(strategy).__name__} a new one"
        )
    return []


def _itself(metric: torchmetrics.Metric) -> torchmetrics.Metric:
    return metric


def empty_copy(metric: torchmetrics.Metric, device: torch.device) -> torchmetrics.Metric:
    """A copy on a device that has counted nothing."""
    twin = metric.clone().to(device)
    for part in _parts(twin).values():
        part.sync_on_compute = False  # torch.distributed, if somebody uses it, has nothing to do with it
    twin.reset()
    return twin


def states_of(metric: torchmetrics.Metric) -> States:
    found: States = {}
    for path, part in _parts(metric).items():
        for name in part._defaults:
            value = getattr(part, name)
            found[f"{path}/{name}"] = value if isinstance(value, torch.Tensor) else [*value]
        found[f"{path}/updates"] = torch.tensor(part._update_count)
    return found


def merged(metric: torchmetrics.Metric, parts: Sequence[States]) -> torchmetrics.Metric:
    """A copy of ``metric`` on the CPU that has counted what several have, whose states may be on any devices."""
    twin = metric.clone().cpu()
    if not parts:
        twin.reset()
        return twin
    for path, part in _parts(twin).items():
        for name, reduction in part._reductions.items():
            values = [map_values(states[f"{path}/{name}"], torch.Tensor.cpu) for states in parts]
            setattr(part, name, _reduced(values, reduction))
        part._update_count = sum(int(cast(torch.Tensor, states[f"{path}/updates"])) for states in parts)
        part._computed = None
    return twin


def num_updates(metric: torchmetrics.Metric) -> int:
    """How often a metric, or one inside it, was updated since it was reset."""
    return max(part._update_count for part in _parts(metric).values())


def check_counts_all(metric: torchmetrics.Metric) -> None:
    """Refuses a metric of the last few updates, by a ConfigurationError, where all are counted in whatever order."""
    for part in _parts(metric).values():
        if isinstance(part, torchmetrics.wrappers.Running):
            raise ConfigurationError(
                f"{type(part).__name__} is of the last {part.window} updates, and `fit`, `evaluate` and parameter "
                f"servers count all batches, in no particular order: pass {type(part.base_metric).__name__} itself, or "
                "update yours in a loop without `prepare`, for the batches of this worker only"
            )


def _parts(metric: torchmetrics.Metric) -> dict[str, torchmetrics.Metric]:
    """The metric and those inside it, by their paths."""
    return {path: part for path, part in metric.named_modules() if isinstance(part, torchmetrics.Metric)}


def _reduced(values: Sequence[torch.Tensor | list[torch.Tensor]], reduction: Any) -> Any:
    """One state of several replicas, as torchmetrics would have gathered it."""
    if any(isinstance(value, list) for value in values):
        rows = [row for value in values for row in (value if isinstance(value, list) else [value])]
        if reduction is None or not rows:
            return rows
        joined = reduction(rows)
        return joined if isinstance(joined, list) else [joined]
    # R2Score and others begin with one zero and find their number of outputs in the first batch, which some had not.
    stacked = torch.stack(torch.broadcast_tensors(*cast(Sequence[torch.Tensor], values)))
    return stacked if reduction is None else reduction(stacked)
