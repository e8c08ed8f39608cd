"""What workers under parameter servers count and decide together, through their chief."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from stratagem.worker.chief_client import ChiefClient


class SharedCounts:
    """MetricStates and agreements of the job. A name is a group and a number in it, the same on every worker.

    Args:
        chief: keeps them.
    """

    def __init__(self, chief: ChiefClient) -> None:
        self._chief = chief
        self._num_groups: collections.Counter[str] = collections.Counter()

    def new_group(self, kind: str) -> str:
        """A group that every worker gets who asks in the same order: "fit 1", "fit 2", …"""
        self._num_groups[kind] += 1
        return f"{kind} {self._num_groups[kind]}"

    def logs(self, group: str, ordinal: int) -> dict[str, float] | None:
        """What came of a topic; None while nobody has said it."""
        reply = self._chief.get_metric_states(group, ordinal, only_logs=True)
        return {log.name: log.value for log in reply.logs} if reply.closed else None

    def states(self, group: str, ordinal: int) -> list[bytes] | dict[str, float]:
        """What all workers have counted, unit by unit, or what came of it if somebody has said that."""
        found: list[bytes] = []
        while True:
            reply = self._chief.get_metric_states(group, ordinal, len(found))
            if reply.closed:
                return {log.name: log.value for log in reply.logs}
            found += reply.states
            if not reply.num_left:
                return found

    def record(self, group: str, ordinal: int, logs: Mapping[str, float]) -> dict[str, float]:
        """Says what came of a topic. Returns what stands: what the first worker said."""
        return self._chief.record_logs(group, ordinal, logs)

    def agree(self, group: str, ordinal: int, value: int) -> int:
        """Says a number and waits until every worker that takes part has said one: the largest is decided, for good.

        Args:
            group: of the question.
            ordinal: of the question.
            value: at least 0.
        """
        return self._chief.agree(group, ordinal, value)

    def leave(self, group: str) -> None:
        """Nobody need wait for this worker in a group any more, unless it says another number."""
        self._chief.leave_group(group)
