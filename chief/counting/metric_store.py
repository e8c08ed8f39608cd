"""What workers count and decide together. One method for each verb."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.chief.chief_state import ChiefPart, ChiefState
from stratagem.chief.counting.agreements import Agreements
from stratagem.chief.counting.metric_states import Logs, MetricState, Page, encode_state
from stratagem.cluster.incarnation import Incarnation
from stratagem.cluster.units import Topic


class MetricStore(ChiefPart):
    """The chief's part in histories and in what workers decide together; the journal's history has what was counted."""

    def __init__(self, state: ChiefState) -> None:
        super().__init__(state)
        self._page_bytes = self._config.max_message_bytes // 4
        """What fits into one reply."""
        self.agreements = Agreements(self._journal.history.agreed)

    # Units of training data

    def keep(self, states: Sequence[MetricState]) -> None:
        """Keeps what was counted on units of training data that are accepted, once for each.

        Raises:
            LimitError: it is too much.
        """
        metric_states = self._journal.history.metric_states
        for state in states:
            accepted = self._lease_book.epoch(state.unit.dataset, state.unit.epoch).accepted
            if state.unit.index in accepted and not metric_states.counts(state.topic.group, state.unit):
                self.write(MetricState(metric_states.place(state.topic), state.unit, state.data))

    # What was counted, and what came of it

    async def get_metric_states(self, incarnation: Incarnation, name: Topic, first: int, only_logs: bool) -> Page:
        """Part of what was counted, or what came of it."""
        await self._admit(incarnation)
        metric_states = self._journal.history.metric_states
        return Page(logs=metric_states.logs(name)) if only_logs else metric_states.page(name, first, self._page_bytes)

    async def record_logs(self, incarnation: Incarnation, name: Topic, logs: Logs) -> Logs:
        """Says what came of a topic; returns what stands."""
        await self._admit(incarnation)
        metric_states = self._journal.history.metric_states
        if metric_states.logs(name) is None:
            self._journal.write("logs", topic=[name.group, name.ordinal], logs=logs)
        return metric_states.logs(name) or ()

    def write(self, state: MetricState) -> None:
        """Keeps a state that nobody has kept.

        Raises:
            LimitError: it is too much.
        """
        self._journal.history.metric_states.check(state)
        self._journal.write("state", durable=False, state=encode_state(state))

    # Agreements

    async def agree(self, incarnation: Incarnation, topic: Topic, value: int) -> int:
        """Says a number; returns what is decided."""
        await self._admit(incarnation)
        self.agreements.say(incarnation, topic, value)
        self._changed.notify()
        with self._waits.of(incarnation):
            while (decided := self.agreements.decided(topic)) is None:
                live = [session.incarnation for session in self._sessions.live("worker")]
                missing = self.agreements.waits_for(topic, live, self._lease_book.founders)
                if missing:
                    self._waits.note(incarnation, f"to come to {topic}", missing)
                    await self._changed.wait()
                    await self._admit(incarnation)
                else:
                    outcome = self.agreements.outcome(topic)
                    self._journal.write("agreed", topic=[topic.group, topic.ordinal], value=outcome)
                    self.agreements.forget(topic)
                    self._changed.notify()
        return decided

    def begin_anew(self) -> None:
        """The job starts again from a checkpoint, every worker from the beginning of its script."""
        self._journal.write("anew")
        self.agreements.clear()
