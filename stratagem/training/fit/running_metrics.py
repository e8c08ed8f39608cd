"""What an epoch or an evaluation has counted so far: the loss and the metrics, one count for each local replica."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from stratagem.data.nested import CopiedAsDict
from stratagem.errors import ConfigurationError
from stratagem.strategy.base import Strategy
from stratagem.strategy.metric_states import Losses, States, bytes_of_unit, from_bytes, states_of_all
from stratagem.training.metrics import Metric
from stratagem.worker.chief_client import ChiefClient

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives back on one replica. Tensors are detached and stay on its device."""

    num_examples: int
    outputs: Any = None
    targets: Any = None
    loss: torch.Tensor | None = None
    weight: float = 0.0
    """What the loss was divided by."""


class _Count:
    """Of one replica."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics = metrics

    def reset(self) -> None:
        self.total: torch.Tensor | None = None
        self.weight = 0.0
        for metric in self.metrics.values():
            metric.reset()

    def add(self, result: StepResult) -> None:
        if result.loss is not None:
            part = result.loss.double() * result.weight
            self.total = part if self.total is None else self.total.add_(part)
            self.weight += result.weight
        for metric in self.metrics.values():
            metric.update(result.outputs, result.targets)

    def states(self) -> States:
        # Nothing counted is no number; examples that all have the weight 0 have the loss 0, as in Keras.
        total = torch.tensor(math.nan, dtype=torch.float64) if self.total is None else self.total
        found: States = {"loss/total": total, "loss/weight": torch.tensor(self.weight, dtype=torch.float64)}
        for name, metric in self.metrics.items():
            found.update((f"{name}/{key}", value) for key, value in metric.states().items())
        return found


class RunningMetrics:
    """Counts steps, by a set of metrics for each local replica, all alike. Nothing waits for a device until somebody
    reads."""

    def __init__(self, strategy: Strategy, metrics: Sequence[Mapping[str, Metric]]) -> None:
        self._strategy = strategy
        self._counts = [_Count(each) for each in metrics]
        self._losses = Losses(strategy)
        self.reset()

    def reset(self) -> None:
        self._losses.reset()
        for count in self._counts:
            count.reset()
        self._earlier: list[States] = []
        self.num_examples = self.num_steps = 0
        """Of the local replicas."""

    @torch.no_grad()
    def add(self, results: Sequence[StepResult]) -> None:
        """Counts a step: one result for each local replica."""
        self.num_steps += 1
        for count, result in zip(self._counts, results, strict=True):
            if result.num_examples:
                self.num_examples += result.num_examples
                count.add(result)

    def states(self) -> list[States]:
        """What was counted, by all replicas of all workers where they run in step; then every worker has to ask."""
        return [*states_of_all(self._strategy, [count.states() for count in self._counts]), *self._earlier]

    def add_states(self, states: Sequence[States]) -> None:
        """Counts what was counted before, by whom it may be. On every worker the same."""
        self._earlier += states

    def result(self) -> dict[str, float]:
        """Loss and metrics of all workers where they run in step; then every worker has to ask. A warning where a
        worker was lost, and with it what it had counted."""
        states = self.states()
        if (lost := self._losses.of_all(self.num_examples)).who:
            what = "fewer" if self._earlier else lost.num_left
            logger.warning(
                "The loss and metrics are those of %s examples: what %s had counted was lost with it", what, lost.who
            )
        return self._computed(states)

    def whole_result(self) -> dict[str, float] | None:
        """As :meth:`result`, of an evaluation; None, on all workers, where one was lost: all is to be counted again."""
        states = self.states()
        if (lost := self._losses.of_all()).who:
            logger.warning("An evaluation starts over: what %s had counted was lost with it", lost.who)
        return None if lost.is_any else self._computed(states)

    def logs(self) -> Logs:
        """Loss and metrics of the local replicas, computed when they are read; NaN of a metric that cannot be computed
        of so few examples."""
        return Logs(lambda: self._computed([*(count.states() for count in self._counts), *self._earlier], False))

    def _computed(self, parts: Sequence[States], is_whole: bool = True) -> dict[str, float]:
        losses = [[float(cast(torch.Tensor, part[f"loss/{key}"])) for key in ("total", "weight")] for part in parts]
        counted = [(total, weight) for total, weight in losses if weight or not math.isnan(total)]
        weight = sum(weight for _, weight in counted) or 1.0
        found = {"loss": sum(total for total, _ in counted) / weight if counted else math.nan}
        for name, metric in self._counts[0].metrics.items():
            own = [_of(part, f"{name}/") for part in parts]
            if not all(own):
                raise ConfigurationError(
                    f"another worker, or this epoch before an interruption, does not count {name!r}: compile the model "
                    "the same on every worker, and do not change that until the epoch is over"
                )
            try:
                values = metric.compute(own)
            except Exception as error:  # of torchmetrics, say: R2 needs two examples
                if is_whole or isinstance(error, ConfigurationError):
                    raise
                values = {"": math.nan}
            found.update((name + suffix, value) for suffix, value in values.items())
        return found


@dataclasses.dataclass(eq=False, repr=False)
class UnitCounts:
    """What is counted on units under parameter servers, each by itself because any worker may die: as it travels with
    their acceptance, and what comes of all of them."""

    _chief: ChiefClient
    running: RunningMetrics
    """Of this object alone: reset as a unit begins, and told of its steps."""

    def collect(self) -> bytes:
        """What was counted since the unit began. ConfigurationError: it is too large to travel."""
        (states,) = self.running.states()  # a worker of parameter servers has one replica
        return bytes_of_unit(states, "the metrics keep")

    def result(self, group: str, ordinal: int) -> dict[str, float] | None:
        """Loss and metrics over all units of a topic, the same on every worker; None if there are none."""
        found = self._chief.states(group, ordinal)
        if isinstance(found, dict):
            return found
        if not found:
            return None
        self.running.reset()
        states = [from_bytes(data) for data in found]
        if more := {key for each in states for key in each}.difference(*self.running.states()):
            raise ConfigurationError(
                f"another worker counts {min(more).rpartition('/')[0]!r}, but this one does not: compile the model the "
                "same on every worker"
            )
        self.running.add_states(states)
        logs = self.running.result()
        self.running.reset()
        return self._chief.record_logs(group, ordinal, logs)


def _of(states: States, prefix: str) -> States:
    """On the CPU, because replicas count on different devices."""
    return {
        name.removeprefix(prefix): [part.cpu() for part in value] if isinstance(value, list) else value.cpu()
        for name, value in states.items()
        if name.startswith(prefix)
    }


class Logs(CopiedAsDict):
    """Numbers that are computed when the first of them is read, because that waits for the device.

    They are of the moment of that reading: ``dict(logs)`` keeps them.
    """

    def __init__(self, compute: Callable[[], dict[str, float]]) -> None:
        self._compute = compute

    @functools.cached_property
    def data(self) -> dict[str, float]:  # type: ignore[override]
        return self._compute()
