"""Numbers that all workers of a script say at the same place in it, and the largest, which they go by. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stratagem.chief.lives import Life
from stratagem.chief.tallies import TallyName


class Agreements:
    """What was said, and what was decided, which never changes.

    Args:
        decided: by earlier lives of the chief.
    """

    def __init__(self, decided: dict[TallyName, int]) -> None:
        self._decided = decided
        self._said: dict[TallyName, dict[Life, int]] = {}
        self._members: dict[str, set[Life]] = {}

    def say(self, life: Life, topic: TallyName, value: int) -> None:
        """``life`` says a number; from now on it takes part in the group."""
        self._members.setdefault(topic.group, set()).add(life)
        if topic not in self._decided:
            self._said.setdefault(topic, {})[life] = value

    def decided(self, topic: TallyName) -> int | None:
        """What was decided."""
        return self._decided.get(topic)

    def largest(self, group: str) -> int:
        """The largest number said in a group so far."""
        said = [value for topic, values in self._said.items() if topic.group == group for value in values.values()]
        return max([*said, *(value for topic, value in self._decided.items() if topic.group == group)], default=0)

    def waits_for(self, topic: TallyName, live: Sequence[Life], founders: Collection[Life]) -> list[Life]:
        """Live workers that take part and have not said their number.

        Args:
            topic: what about.
            live: live workers.
            founders: workers that were there from the start take part before they have said anything.
        """
        said = self._said.get(topic, {})
        members = self._members.get(topic.group, set())
        return [life for life in live if (life in founders or life in members) and life not in said]

    def outcome(self, topic: TallyName) -> int:
        """The largest number said about a topic."""
        return max(self._said.get(topic, {}).values(), default=0)

    def forget(self, topic: TallyName) -> None:
        """The topic is decided: what each said is of no interest any more."""
        self._said.pop(topic, None)

    def clear(self) -> None:
        """Forgets everything that was said."""
        self._said.clear()
        self._members.clear()
