"""What workers count and decide together. One method for each verb."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from stratagem.chief.chief_state import ChiefPart, ChiefState
from stratagem.chief.counting.metric_states import Logs, MetricState, Page, encode_state
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Topic
from stratagem.errors import LimitError

MAX_AGREED_BYTES = 256 << 20
_ENTRY_BYTES = 256
"""What an entry of a book takes beyond its name."""


class Agreements:
    """Numbers that all workers of a script report at the same place in it; the largest is the one they follow. No I/O.

    Args:
        decided: earlier decisions, also by earlier incarnations of the chief; they never change.
        left: workers (tasks), each with a group in which it takes part no more; the journal's, which changes.
    """

    def __init__(self, decided: dict[Topic, int], left: AbstractSet[tuple[str, str]]) -> None:
        self._decided, self._left = decided, left
        self._said: dict[Topic, dict[Incarnation, int]] = {}
        self._members: dict[str, set[Incarnation]] = {}
        groups = [*(topic.group for topic in decided), *(group for _, group in left)]
        self._num_bytes = sum(_ENTRY_BYTES + len(group) for group in groups)

    def say(self, incarnation: Incarnation, topic: Topic, value: int) -> None:
        """``incarnation`` says a number; from now on it takes part in the group. LimitError: all have said too much."""
        if incarnation not in self._members.get(topic.group, ()):
            self.count(topic.group)
            self._members.setdefault(topic.group, set()).add(incarnation)
        if topic not in self._decided:
            if incarnation not in (said := self._said.get(topic, {})):
                self.count(topic.group)
            self._said[topic] = {**said, incarnation: value}

    def count(self, group: str) -> None:
        """An entry of this group is to be kept. LimitError: there is no room for it."""
        if (num_bytes := self._num_bytes + _ENTRY_BYTES + len(group)) > MAX_AGREED_BYTES:
            raise LimitError(
                f"what workers agreed on takes more than {MAX_AGREED_BYTES >> 20} MiB: call fit for more epochs, and "
                "less often"
            )
        self._num_bytes = num_bytes

    def decided(self, topic: Topic) -> int | None:
        return self._decided.get(topic)

    def has_left(self, incarnation: Incarnation, group: str) -> bool:
        """Whether ``incarnation``, which lives, takes part in a group no more."""
        return (incarnation.task, group) in self._left

    def waits_for(
        self, topic: Topic, live: Sequence[Incarnation], founders: Collection[Incarnation]
    ) -> list[Incarnation]:
        """Live workers that take part (``founders`` before they have said anything) and have not said their number."""
        said = self._said.get(topic, {})
        members = {*founders, *self._members.get(topic.group, set())}
        return [
            incarnation
            for incarnation in live
            if incarnation in members and incarnation not in said and not self.has_left(incarnation, topic.group)
        ]

    def outcome(self, topic: Topic) -> int:
        """The largest number said about a topic."""
        return max(self._said.get(topic, {}).values(), default=0)

    def forget(self, topic: Topic) -> None:
        """The topic is decided: what each said is of no interest any more."""
        num_said = len(self._said.pop(topic, {}))
        self._num_bytes -= max(0, num_said - 1) * (_ENTRY_BYTES + len(topic.group))  # the decision stays

    def clear(self) -> None:
        self._said.clear()
        self._members.clear()
        self._num_bytes = 0


class MetricStore(ChiefPart):
    """The chief's part in histories and in joint decisions of workers; the journal's history has the counts."""

    def __init__(self, state: ChiefState) -> None:
        super().__init__(state)
        self._page_bytes = self._config.max_message_bytes // 4
        """What fits into one reply."""
        self.agreements = Agreements(self._journal.history.agreed, self._journal.history.left_groups)

    # Units of training data

    def keep(self, states: Sequence[MetricState]) -> None:
        """Keeps what was counted on units of training data that are accepted, once. Errors as :meth:`write`."""
        metric_states = self._journal.history.metric_states
        for state in states:
            accepted = self._lease_book.epoch(state.unit.dataset, state.unit.epoch).accepted
            if state.unit.index in accepted and not metric_states.counts(state.topic.group, state.unit):
                self.write(MetricState(metric_states.place(state.topic), state.unit, state.data))

    # What was counted, and what came of it

    async def get_metric_states(self, incarnation: Incarnation, name: Topic, first: int, only_logs: bool) -> Page:
        await self._admit(incarnation)
        metric_states = self._journal.history.metric_states
        return Page(logs=metric_states.logs(name)) if only_logs else metric_states.page(name, first, self._page_bytes)

    async def record_logs(self, incarnation: Incarnation, name: Topic, logs: Logs) -> Logs:
        """Says what came of a topic; returns what stands. LimitError: it is too much."""
        await self._admit(incarnation)
        metric_states = self._journal.history.metric_states
        if metric_states.logs(name) is None:
            metric_states.check_logs(name, logs)
            self._journal.write("logs", topic=[name.group, name.ordinal], logs=logs)
        return metric_states.logs(name) or ()

    def write(self, state: MetricState) -> None:
        """Keeps a state that nobody has kept. LimitError: it is too much."""
        self._journal.history.metric_states.check(state)
        self._journal.write("state", durable=False, state=encode_state(state))

    # Agreements

    async def agree(self, incarnation: Incarnation, topic: Topic, value: int) -> int:
        """Says a number; returns what is decided."""
        await self._admit(incarnation)
        self.agreements.say(incarnation, topic, value)
        if self.agreements.has_left(incarnation, topic.group):
            self._journal.write("in_group", task=incarnation.task, group=topic.group)
        self._changed.notify()
        with self._waits.of(incarnation) as note:
            while (decided := self.agreements.decided(topic)) is None:
                live, founders = self._sessions.live("worker"), self._lease_book.founders
                missing = self.agreements.waits_for(topic, live, founders)
                if missing:
                    note(f"to come to {topic}", missing)
                    await self._changed.wait()
                    await self._admit(incarnation)
                else:
                    outcome = self.agreements.outcome(topic)
                    self._journal.write("agreed", topic=[topic.group, topic.ordinal], value=outcome)
                    self.agreements.forget(topic)
                    self._changed.notify()
        return decided

    def leave_group(self, incarnation: Incarnation, group: str) -> None:
        """Nobody need wait for the caller in a group any more, unless it says something there again; a chief that
        follows knows it. LimitError: too much has been said."""
        if not self.agreements.has_left(incarnation, group):
            self.agreements.count(group)
            self._journal.write("left_group", task=incarnation.task, group=group)
            self._changed.notify()

    def begin_anew(self) -> None:
        """The job starts again from a checkpoint, every worker from the beginning of its script."""
        self._journal.write("anew")
        self.agreements.clear()
