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
        self._left: dict[str, set[Life]] = {}

    def say(self, life: Life, topic: TallyName, value: int) -> None:
        """``life`` says a number; from now on it takes part in the group."""
        self._members.setdefault(topic.group, set()).add(life)
        self._left.get(topic.group, set()).discard(life)
        if topic not in self._decided:
            self._said.setdefault(topic, {})[life] = value

    def decided(self, topic: TallyName) -> int | None:
        """What was decided."""
        return self._decided.get(topic)

    def leave(self, life: Life, group: str) -> None:
        """``life`` takes part in a group no more, unless it says something again."""
        self._left.setdefault(group, set()).add(life)

    def has_left(self, life: Life, group: str) -> bool:
        """Whether ``life`` takes part in a group no more."""
        return life in self._left.get(group, ())

    def waits_for(self, topic: TallyName, live: Sequence[Life], founders: Collection[Life]) -> list[Life]:
        """Live workers that take part and have not said their number.

        Args:
            topic: what about.
            live: live workers.
            founders: workers that were there from the start take part before they have said anything.
        """
        said = self._said.get(topic, {})
        members = {*founders, *self._members.get(topic.group, set())}
        return [life for life in live if life in members and life not in said and not self.has_left(life, topic.group)]

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
        self._left.clear()
