"""Numbers that all workers of a script say at the same place in it, and the largest, which they go by. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stratagem.cluster.incarnation import Incarnation
from stratagem.cluster.units import Topic


class Agreements:
    """What was said, and what was decided (``decided``: by earlier incarnations of the chief), which never changes."""

    def __init__(self, decided: dict[Topic, int]) -> None:
        self._decided = decided
        self._said: dict[Topic, dict[Incarnation, int]] = {}
        self._members: dict[str, set[Incarnation]] = {}
        self._left: dict[str, set[Incarnation]] = {}

    def say(self, incarnation: Incarnation, topic: Topic, value: int) -> None:
        """``incarnation`` says a number; from now on it takes part in the group."""
        self._members.setdefault(topic.group, set()).add(incarnation)
        self._left.get(topic.group, set()).discard(incarnation)
        if topic not in self._decided:
            self._said.setdefault(topic, {})[incarnation] = value

    def decided(self, topic: Topic) -> int | None:
        return self._decided.get(topic)

    def leave(self, incarnation: Incarnation, group: str) -> None:
        """``incarnation`` takes part in a group no more, unless it says something again."""
        self._left.setdefault(group, set()).add(incarnation)

    def has_left(self, incarnation: Incarnation, group: str) -> bool:
        return incarnation in self._left.get(group, ())

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
        self._said.pop(topic, None)

    def clear(self) -> None:
        self._said.clear()
        self._members.clear()
        self._left.clear()
