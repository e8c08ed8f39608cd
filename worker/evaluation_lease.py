"""Units of evaluation data leased to this worker, and the report of what was counted on them."""

from __future__ import annotations

import collections

from stratagem.cluster.units import Plan
from stratagem.rpc.generated import chief_pb2
from stratagem.worker.chief_client import ChiefClient

AHEAD = 2  # units acquired at once


class EvaluationLease:
    """Acquires the units of one pass over evaluation data.

    Args:
        chief: the chief.
        group: names the evaluation, the same on every worker.
        ordinal: of the pass.
        plan: how the data are cut.
    """

    def __init__(self, chief: ChiefClient, group: str, ordinal: int, plan: Plan) -> None:
        self._chief = chief
        self._name = chief_pb2.TallyName(group=group, ordinal=ordinal)
        self._plan = plan
        self._ready: collections.deque[int] = collections.deque()
        self._held: set[int] = set()
        self._deltas: dict[int, bytes] = {}
        self.attempt = 0
        """Units of others do not count; grows when the weights have changed."""

    def next(self, wait: bool) -> int | None:
        """The next unit; None when all are counted, or (without ``wait``) when there is none right now."""
        if not self._ready:
            reply = self._ask(AHEAD, wait)
            if reply.attempt != self.attempt:
                self.attempt = reply.attempt
                self._held.clear()
            self._held.update(reply.units)
            self._ready.extend(reply.units)
        return self._ready.popleft() if self._ready else None

    def holds(self, index: int, attempt: int) -> bool:
        """Whether a unit acquired in an attempt is still leased to this worker."""
        return attempt == self.attempt and index in self._held

    def counted(self, index: int, data: bytes) -> None:
        """What was counted on a unit; the chief hears of it with the next call."""
        self._held.discard(index)
        self._deltas[index] = data

    def leave(self) -> None:
        """Gives back what was not counted."""
        self._ready.clear()
        self._held.clear()
        self._ask(0, wait=False, leave=True)

    def _ask(self, want: int, wait: bool, leave: bool = False) -> chief_pb2.NextEvaluationUnitsReply:
        reply = self._chief.next_evaluation_units(
            chief_pb2.NextEvaluationUnitsRequest(
                evaluation=self._name,
                num_examples=self._plan.num_examples,
                batch_size=self._plan.batch_size,
                drop_last=self._plan.drop_last,
                deltas=[chief_pb2.UnitDelta(index=index, data=data) for index, data in self._deltas.items()],
                attempt=self.attempt,
                held=sorted(self._held),
                want=want,
                wait=wait,
                leave=leave,
            )
        )
        self._deltas.clear()
        return reply
