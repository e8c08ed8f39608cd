"""A prepared metric of torchmetrics: it is updated by each replica in its step, and read for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torchmetrics

from stratagem.data.nested import to_device
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.strategy.metric_states import States, states_of_all
from stratagem.strategy.replicas.context import replica_of
from stratagem.strategy.torchmetrics_states import empty_copy, merged, states_of


class PreparedMetric:
    """What a strategy's replicas count, each in an empty copy of the user's metric. Where several workers run in step,
    every worker computes."""

    def __init__(self, metric: torchmetrics.Metric, strategy: Strategy) -> None:
        self.name = type(metric).__name__
        self.strategy = strategy
        self._copies = [empty_copy(metric, device) for device in strategy.local_devices]

    def own(self) -> torchmetrics.Metric | None:
        """The metric of the replica that asks, outside of replicas that of the first; None: its batch is empty."""
        if (context := replica_of(self.strategy)) is None:
            return self._copies[0]
        replica = context.replica_id_in_sync_group - self.strategy.first_replica_id
        return self._copies[replica] if self.strategy.has_examples(replica) else None

    def compute(self) -> Any:
        """The value over all replicas of all workers since the last reset."""
        self._check_outside("compute")
        return self._computed(states_of_all(self.strategy, [states_of(own) for own in self._copies]))

    def reset(self) -> None:
        self._check_outside("reset")
        for own in self._copies:
            own.reset()

    def _computed(self, parts: Sequence[States]) -> Any:
        return to_device(merged(self._copies[0], parts).compute(), self._copies[0].device)

    def _check_outside(self, verb: str) -> None:
        if replica_of(self.strategy) is not None:
            raise ConfigurationError(
                f"{self.name}.{verb}() of a prepared metric is about all replicas: call it outside of strategy.run, on "
                "every worker; in a step there is update()"
            )


def install(metric: torchmetrics.Metric, prepared: PreparedMetric) -> None:
    """Makes a metric the name of a prepared one, in place. Copies and pickles of it are plain metrics."""
    kind: Any = type(metric)

    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        own = prepared.own()
        if own is not None:
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
    already is left as it is. ``make``: what counts in its stead.

    Raises:
        ConfigurationError: another strategy has it.
    """
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
