"""Who talks to this ps: fences, sequence windows, reply lanes, init-once tokens. Pure; the state's lock guards it."""

from __future__ import annotations

from collections.abc import Iterable

from stratagem.errors import FencedError, LimitError, SequenceError, StaleStoreError
from stratagem.ps.published import ReplyLane
from stratagem.ps.requests import Sender
from stratagem.ps.sequences import SequenceWindow

Incarnation = tuple[str, int]
"""Task and incarnation."""


MAX_SEQUENCE = 1 << 62
MAX_LIVES = 8
"""Process lives of one task that are not fenced."""


class Senders:
    """Everything kept per process life of a sender.

    Args:
        max_peers: process lives remembered at once.
    """

    def __init__(self, max_peers: int = 4096) -> None:
        self._max_peers = max_peers
        self._fenced: dict[str, int] = {}
        self._windows: dict[Incarnation, SequenceWindow] = {}
        self._lanes: dict[Incarnation, ReplyLane] = {}
        self._tokens: dict[int, Incarnation] = {}

    def check(self, sender: Sender) -> None:
        """Refuses the dead.

        Raises:
            FencedError: the process life was declared dead.
        """
        if sender.task in self._fenced and sender.incarnation <= self._fenced[sender.task]:
            raise FencedError(
                f"{sender} has been declared dead by the chief (fenced up to incarnation {self._fenced[sender.task]}); "
                "its units are with others now. Start the task again"
            )

    def fence(self, task: str, incarnation: int) -> None:
        """Refuses process lives of ``task`` up to ``incarnation`` from now on, and forgets what they had."""
        self._fenced[task] = max(incarnation, self._fenced.get(task, 0))
        error = FencedError(f"{task} (up to incarnation {incarnation}) has been declared dead by the chief")
        for life in [life for life in self._lanes if life[0] == task and life[1] <= incarnation]:
            self._lanes.pop(life).close(error)
        self._windows = {life: kept for life, kept in self._windows.items() if not _covers(task, incarnation, life)}
        self._tokens = {group: life for group, life in self._tokens.items() if not _covers(task, incarnation, life)}

    def hello(self, sender: Sender, next_sequence: int) -> int:
        """Introduces a sender. Returns the number expected next: the remembered one, else ``next_sequence``.

        Raises:
            LimitError: too many are remembered; names the limit.
            SequenceError: a number that no job reaches.
        """
        if next_sequence >= MAX_SEQUENCE:
            raise SequenceError(f"expected a next request below {MAX_SEQUENCE}, got {next_sequence}")
        window = self._windows.get(sender.life)
        if window is None:
            if len(self._windows) >= self._max_peers:
                raise LimitError(f"{len(self._windows)} process lives are remembered here, which is max_peers")
            num_lives = sum(task == sender.task for task, _ in self._windows)
            if num_lives >= MAX_LIVES:
                raise LimitError(f"{num_lives} lives of {sender.task} are remembered here; the chief fences the dead")
            window = self._windows[sender.life] = SequenceWindow(max(1, next_sequence))
        return window.next_sequence

    def window(self, sender: Sender) -> SequenceWindow:
        """The sender's sequence.

        Raises:
            StaleStoreError: the sender has not introduced itself since this ps started or restored.
        """
        window = self._windows.get(sender.life)
        if window is None:
            raise StaleStoreError(
                f"{sender} is not known since this parameter server started or went back to a checkpoint; "
                "say Hello first"
            )
        return window

    def forget_windows(self) -> None:
        """After a restore every sender must introduce itself again."""
        self._windows.clear()
        self._tokens.clear()

    def open_lane(self, sender: Sender, lane: ReplyLane) -> ReplyLane | None:
        """The newest lane of a process life is the one that is used. Returns the one it replaces."""
        replaced = self._lanes.get(sender.life)
        self._lanes[sender.life] = lane
        return replaced

    def close_lane(self, sender: Sender, lane: ReplyLane) -> bool:
        """Forgets a lane that ended. False when another has replaced it."""
        if self._lanes.get(sender.life) is not lane:
            return False
        del self._lanes[sender.life]
        return True

    def lane(self, sender: Sender) -> ReplyLane | None:
        """The lane of a process life."""
        return self._lanes.get(sender.life)

    def lanes(self) -> list[ReplyLane]:
        """All open lanes."""
        return list(self._lanes.values())

    def take_token(self, sender: Sender, groups: Iterable[int]) -> list[int]:
        """Gives the init-once tokens of ``groups`` to the sender where nobody has them. Returns those it has now."""
        return [group for group in groups if self._tokens.setdefault(group, sender.life) == sender.life]

    def token_holder(self, group: int) -> Incarnation | None:
        """Who must assign the initial values of a group."""
        return self._tokens.get(group)

    def drop_token(self, group: int) -> None:
        """The group has its values."""
        self._tokens.pop(group, None)


def _covers(task: str, incarnation: int, life: Incarnation) -> bool:
    return life[0] == task and life[1] <= incarnation
