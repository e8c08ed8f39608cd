"""Workers that wait for each other for ever, because their scripts do not meet at the same place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stratagem.chief.chief_state import SAME_S, ChiefState
from stratagem.chief.membership.session_streams import SessionStreams
from stratagem.cluster.task import Incarnation

STANDSTILL_S = 20.0
"""So long the same workers wait for the same before the job ends with it."""


def late_for(state: ChiefState, streams: SessionStreams, task: str) -> tuple[str, list[Incarnation]]:
    """What a worker waits for on a ps, by the step that it said, and for whom; empty if for nobody."""
    step = streams.waiting_steps.get(task, 0)
    late = [one for one in state.lease_book.steps.unfinished(step) if streams.waiting_steps.get(one.task) != step]
    return f"{', '.join(one.task for one in late)} to deliver their part of step {step}" if late else "", late


class Standstill:
    """Looks for a standstill at every tick."""

    def __init__(self, state: ChiefState, streams: SessionStreams) -> None:
        self._state = state
        self._streams = streams
        self._seen: dict[Incarnation, tuple[str, float, float]] = {}
        """Who is stuck: for what it waits, since when, and when it was seen last."""

    def found(self) -> str:
        """Who waits for whom, in words, if it is to end; else empty."""
        state, now = self._state, self._state.clock()
        words: dict[Incarnation, str] = {}
        others: dict[Incarnation, Sequence[Incarnation]] = {}
        for one in state.sessions.live("worker"):
            what, whom = late_for(state, self._streams, one.task)
            if one in state.waits.others:
                words[one], others[one] = state.waits.noted[one][0], state.waits.others[one]
            elif whom:
                words[one], others[one] = what, whom
        stuck = {one: words[one] for one in _stuck(others)}
        for one, what in stuck.items():
            said, since, until = self._seen.get(one, ("", now, now))
            is_same = said == what and now - until <= SAME_S  # a call that waits long is made anew, each at its time
            self._seen[one] = what, since if is_same else now, now
        self._seen = {one: seen for one, seen in self._seen.items() if now - seen[-1] <= SAME_S}
        if not stuck or any(now - self._seen[one][1] < STANDSTILL_S for one in stuck):
            return ""
        told = "; ".join(f"{one.task} waits for {what}" for one, what in sorted(stuck.items()))
        return (
            f"workers wait for each other, and would do so forever: {told}. Every worker has to call barrier(), "
            "load_once(), restore(), evaluate() and fit(), at staleness 0 also a further prepare(), and to go through "
            "its datasets, at the same point of its script"
        )


def _stuck(others: Mapping[Incarnation, Sequence[Incarnation]]) -> list[Incarnation]:
    """Of those who wait: those who wait for themselves in the end."""
    left = dict(others)
    while free := [one for one, whom in left.items() if left.keys().isdisjoint(whom)]:
        for one in free:
            del left[one]
    return [*left]
