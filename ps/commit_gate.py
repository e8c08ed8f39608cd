"""Holds commits for a checkpoint. A state machine: the time is passed in, nothing waits in here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from stratagem.cluster.units import Unit, Update
from stratagem.errors import ProtocolError

MAX_HOLD_S = 300.0
"""Longest hold; whoever needs more prolongs it."""


@dataclasses.dataclass
class _Hold:
    token: int
    until: float
    admitted: set[tuple[Unit, int]]


class CommitGate:
    """Whether commits may pass, and how many are inside."""

    def __init__(self) -> None:
        self._hold: _Hold | None = None
        self.is_paused = False
        """For the moment in which the store is copied, or once its ps ends: nobody passes."""
        self.num_inside = 0
        """Commits that passed and have not finished."""

    def hold(self, token: int, now: float, hold_s: float) -> None:
        """Closes the gate for ``hold_s`` seconds; the same token prolongs its own hold. A larger token takes its place:
        the chief that had the smaller one is dead, or its release was lost. ProtocolError: a hold with a larger token
        is on, or that is no time to hold commits for."""
        if not 0 <= hold_s <= MAX_HOLD_S:
            raise ProtocolError(f"commits can be held for 0 to {MAX_HOLD_S:.0f} seconds at a time, got {hold_s}")
        if self.is_held(now) and self._hold is not None and self._hold.token > token:
            raise ProtocolError(f"commits are held under token {self._hold.token}, which is newer than {token}")
        admitted = self._hold.admitted if self._hold is not None and self._hold.token == token else set()
        self._hold = _Hold(token, now + hold_s, admitted)

    def is_held(self, now: float) -> bool:
        """Whether the gate is closed. A hold that ran out is over."""
        if self._hold is not None and now >= self._hold.until:
            self._hold = None
        return self._hold is not None

    def admit(self, token: int, updates: Iterable[Update], now: float) -> None:
        """Lets updates through the hold: those that contain one of the named (unit, ordinal) pairs. Errors as
        :meth:`check_token`."""
        self.check_token(token, now)
        assert self._hold is not None
        self._hold.admitted |= {(unit, update.ordinal) for update in updates for unit in update.units}

    def check_token(self, token: int, now: float) -> None:
        """Raises ``ProtocolError`` unless the hold is on, under this token."""
        if not self.is_held(now) or self._hold is None or self._hold.token != token:
            came = self._hold.token if self._hold is not None else "none"
            raise ProtocolError(f"expected a hold on commits under token {token}, found {came}; it may have expired")

    def release(self, token: int) -> None:
        """Opens the gate, if it is this token that holds it."""
        if self._hold is not None and self._hold.token == token:
            self._hold = None

    def lets_through(self, update: Update | None, now: float) -> bool:
        """Whether a commit may pass; None is a change that belongs to no update."""
        if self.is_paused:
            return False
        if self._hold is None or not self.is_held(now):
            return True
        return update is not None and any((unit, update.ordinal) in self._hold.admitted for unit in update.units)
