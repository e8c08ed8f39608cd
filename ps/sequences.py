"""Recognises resends: one sequence per (sender, server), a high-water mark and a window of 64. Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any, TypeVar

from stratagem.errors import SequenceError

Result = TypeVar("Result")
WINDOW = 64
"""Requests that may be under way at once, and results kept for resends."""


class Verdict(enum.Enum):
    NEW = "new"
    """Do it, then :meth:`SequenceWindow.finish`."""
    RUNNING = "running"
    """The same request is being done now: wait for it and ask again."""
    DONE = "done"
    """It was done; answer its result."""


@dataclasses.dataclass(frozen=True)
class SequenceDecision:
    """A verdict, and with ``DONE`` the recorded result (None when it is too old to be remembered)."""

    verdict: Verdict
    result: Any = None

    def result_as(self, kind: type[Result]) -> Result:
        """The recorded result; ``SequenceError`` where the number belongs to a request of another kind."""
        if not isinstance(self.result, kind):
            raise SequenceError("expected a resend of the same request; this number belongs to another one")
        return self.result


NEW, _RUNNING = SequenceDecision(Verdict.NEW), SequenceDecision(Verdict.RUNNING)


class SequenceWindow:
    """The requests of one incarnation of one sender.

    Requests may arrive out of order within the window. The mark is the smallest unfinished number. Numbers below the
    first one of the window (``next_sequence``) are from before a restore. Their effect is gone, so they are new, except
    for those ``done`` in the process whose store this one took over.
    """

    def __init__(self, next_sequence: int, done: Iterable[int] = ()) -> None:
        self._first = self._mark = next_sequence
        self._running: set[int] = set()
        self._results: dict[int, Any] = dict.fromkeys(done)
        self._failed: set[int] = set()

    @property
    def next_sequence(self) -> int:
        """The smallest number that has not been finished."""
        return self._mark

    @property
    def done(self) -> list[int]:
        """Requests that a resend is recognised of."""
        return list(self._results)

    def begin(self, sequence: int) -> SequenceDecision:
        """Decides about a request. SequenceError: beyond the window; names the number expected."""
        if sequence >= self._mark + WINDOW:
            raise SequenceError(
                f"expected request {self._mark} (or one of the {WINDOW} from there), got {sequence}; "
                "send Hello to agree on the number"
            )
        if sequence in self._running:
            return _RUNNING
        if sequence in self._results:
            return SequenceDecision(Verdict.DONE, self._results[sequence])
        if self._first <= sequence < self._mark and sequence not in self._failed:
            return SequenceDecision(Verdict.DONE)
        self._running.add(sequence)
        return NEW

    def finish(self, sequence: int, result: Any) -> None:
        """Records the result of a request; a resend gets it."""
        self._running.discard(sequence)
        self._failed.discard(sequence)
        self._results[sequence] = result
        self._advance(sequence)

    def fail(self, sequence: int) -> None:
        """The request changed nothing; a resend is done anew, and later requests do not wait for it."""
        self._running.discard(sequence)
        self._failed.add(sequence)
        self._advance(sequence)

    def abandon(self, sequences: Iterable[int]) -> None:
        """Requests that are not sent again: those that have not come are none that later ones wait for."""
        for sequence in sequences:
            if self._mark <= sequence < self._mark + WINDOW and sequence not in {*self._running, *self._results}:
                self.fail(sequence)

    def _advance(self, newest: int) -> None:
        before = self._mark
        while self._mark in self._results or self._mark in self._failed:
            self._mark += 1
        for number in (*range(before - WINDOW, self._mark - WINDOW), newest):
            if number < self._mark - WINDOW:
                self._results.pop(number, None)
                self._failed.discard(number)
