"""The rendezvous at rank 0: nobody goes on before everybody of the generation has come."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from stratagem.errors import ConfigurationError, PeerUnavailableError

T = TypeVar("T")


class MeetingRoom(Generic[T]):
    """Rounds of meetings. A call may be repeated: what a rank said last counts until the round is complete."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._generation = 0
        self._said: dict[tuple[int, int], dict[int, T]] = {}
        self._closed = False

    def meet(self, generation: int, meeting: int, size: int, rank: int, what: T, timeout_s: float) -> list[T] | None:
        """What every rank said, in rank order; None when somebody is missing after ``timeout_s`` seconds.

        Raises:
            PeerUnavailableError: a newer generation meets already, or the room is closed.
            ConfigurationError: no such rank.
        """
        if not 0 <= rank < size:
            raise ConfigurationError(f"expected a rank below {size}, got {rank}")
        with self._changed:
            if generation < self._generation or self._closed:
                raise PeerUnavailableError(f"generation {generation} is over; generation {self._generation} meets")
            if generation > self._generation:
                self._generation = generation
                self._said = {key: said for key, said in self._said.items() if key[0] == generation}
            said = self._said.setdefault((generation, meeting), {})
            if len(said) < size:
                said[rank] = what
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(said) == size or self._closed, timeout_s)
            return [said[other] for other in range(size)] if len(said) == size else None

    def close(self) -> None:
        """Sends everybody home."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
