"""The senders to this ps: fences, sequence windows, reply lanes, init-once tokens. Pure; the state's lock guards it."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from stratagem.errors import FencedError, LimitError, SequenceError, StaleStoreError, StratagemError
from stratagem.ps.published import ReplyLane
from stratagem.ps.requests import Sender, is_fenced
from stratagem.ps.sequences import WINDOW, SequenceWindow

Incarnation = tuple[str, int]


MAX_SEQUENCE = 1 << 62
MAX_INCARNATIONS = 8
"""Incarnations of one task that are not fenced."""


class Senders:
    """Everything kept for each incarnation of a sender; at most ``max_peers`` are remembered."""

    def __init__(self, max_peers: int = 4096) -> None:
        self._max_peers = max_peers
        self._fenced: dict[str, int] = {}
        self._windows: dict[Incarnation, SequenceWindow] = {}
        self.lanes: dict[Incarnation, ReplyLane] = {}
        """The newest of each incarnation: the one that is used."""
        self.refused: dict[Incarnation, StratagemError] = {}
        """Why the newest lane of each ended, if something that came over it was refused."""
        self.tokens: dict[int, Incarnation] = {}
        """Who must assign the initial values of a group, until it has them."""
        self._inherited: dict[Incarnation, collections.deque[int]] = {}
        """Requests done for senders that have not introduced themselves here."""

    def check(self, sender: Sender) -> None:
        """Raises ``FencedError`` for an incarnation that was declared dead."""
        if sender.task in self._fenced and sender.incarnation <= self._fenced[sender.task]:
            raise FencedError(
                f"{sender} has been declared dead by the chief (fenced up to incarnation {self._fenced[sender.task]}); "
                "its units are with others now. Start the task again"
            )

    def fence(self, task: str, incarnation: int) -> None:
        """Refuses incarnations of ``task`` up to ``incarnation`` from now on, and forgets what they had."""
        self._fenced[task] = max(incarnation, self._fenced.get(task, 0))
        error = FencedError(f"{task} (up to incarnation {incarnation}) has been declared dead by the chief")
        for key in [key for key in self.lanes if is_fenced(key, task, incarnation)]:
            self.lanes.pop(key).close(error)
        self.refused = {key: kept for key, kept in self.refused.items() if not is_fenced(key, task, incarnation)}
        self._windows = {key: kept for key, kept in self._windows.items() if not is_fenced(key, task, incarnation)}
        self._inherited = {key: kept for key, kept in self._inherited.items() if not is_fenced(key, task, incarnation)}
        self.tokens = {group: key for group, key in self.tokens.items() if not is_fenced(key, task, incarnation)}

    def hello(self, sender: Sender, next_sequence: int, abandoned: Iterable[int] = ()) -> int:
        """Introduces a sender. Returns the number expected next: the remembered one, else ``next_sequence``.
        LimitError: too many are remembered; names the limit. SequenceError: a number that no job reaches."""
        if next_sequence >= MAX_SEQUENCE:
            raise SequenceError(f"expected a next request below {MAX_SEQUENCE}, got {next_sequence}")
        window = self._windows.get(sender.key)
        if window is None:
            if len(self._windows) >= self._max_peers:
                raise LimitError(f"{len(self._windows)} incarnations are remembered here, which is max_peers")
            num_incarnations = sum(task == sender.task for task, _ in self._windows)
            if num_incarnations >= MAX_INCARNATIONS:
                raise LimitError(
                    f"{num_incarnations} incarnations of {sender.task} are remembered here; the chief fences the dead"
                )
            window = self._windows[sender.key] = SequenceWindow(
                max(1, next_sequence), self._inherited.pop(sender.key, ())
            )
        window.abandon(abandoned)
        return window.next_sequence

    def window(self, sender: Sender) -> SequenceWindow:
        """The sender's sequence. StaleStoreError: the sender has not introduced itself since this ps started or
        restored."""
        window = self._windows.get(sender.key)
        if window is None:
            raise StaleStoreError(
                f"{sender} is not known since this parameter server started or rolled back to a checkpoint; "
                "send Hello first"
            )
        return window

    def done(self) -> tuple[Sender, ...]:
        """Requests that count as done here, of all senders: what a copy of the store has to know."""
        known = {**self._inherited, **{key: window.done for key, window in self._windows.items()}}
        return tuple(Sender(*key, number) for key, numbers in known.items() for number in numbers)

    def inherit(self, done: Iterable[Sender]) -> None:
        """Requests that were done for senders that are yet to introduce themselves here; the last ones count."""
        for sender in done:
            if sender.sequence:
                self._inherited.setdefault(sender.key, collections.deque(maxlen=WINDOW)).append(sender.sequence)

    def forget_windows(self) -> None:
        """After a restore every sender must introduce itself again."""
        self._windows.clear()
        self._inherited.clear()
        self.tokens.clear()
