"""Counting under parameter servers: each unit by itself, because any worker may die, and all of them in the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stratagem.cluster.units import MAX_STATE_BYTES
from stratagem.errors import ConfigurationError
from stratagem.strategy.metric_states import from_bytes, to_bytes
from stratagem.training.fit.running_metrics import RunningMetrics, StepResult
from stratagem.worker.chief_client import ChiefClient


@dataclasses.dataclass(eq=False, repr=False)
class UnitCounts:
    """What is counted on units, as it travels with their acceptance, and what comes of it."""

    _chief: ChiefClient
    _running: RunningMetrics
    """Of this object alone."""

    def begin(self) -> None:
        self._running.reset()

    def add(self, results: Sequence[StepResult]) -> None:
        """Counts a step of the unit: one result for each local replica."""
        self._running.add(results)

    def collect(self) -> bytes:
        """What was counted since the unit began.

        Raises:
            ConfigurationError: it is too large to travel.
        """
        (states,) = self._running.states()  # a worker of parameter servers has one replica
        data = to_bytes(states)
        if len(data) > MAX_STATE_BYTES:
            raise ConfigurationError(
                f"the metrics keep {len(data)} bytes of one batch, and {MAX_STATE_BYTES} can travel to the chief: use "
                "smaller batches, or metrics that keep sums and not every output (thresholds= of torchmetrics)"
            )
        return data

    def result(self, group: str, ordinal: int) -> dict[str, float] | None:
        """Loss and metrics over all units of a topic, the same on every worker; None if there are none."""
        found = self._chief.states(group, ordinal)
        if isinstance(found, dict):
            return found
        if not found:
            return None
        self._running.reset()
        self._running.add_states([from_bytes(data) for data in found])
        logs = self._running.result()
        self._running.reset()
        return self._chief.record_logs(group, ordinal, logs)
