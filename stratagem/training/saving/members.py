"""Who takes part in saving and restoring: one process, or the workers of a synchronous job, of which rank 0 acts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from stratagem.checkpoint.tree import EncodedState, Json
from stratagem.errors import CheckpointError, CollectiveError
from stratagem.worker.ring.agreement import broadcast_json, broadcast_tensors
from stratagem.worker.ring.communicator import Communicator

BEAT_S = 1.0
"""While rank 0 is busy it says so this often: the others wait in a collective, which has a time-out."""


class FirstLostError(CollectiveError):
    """Rank 0 is lost, and what it was at; those who are left are in a ring of their own."""


@dataclasses.dataclass(eq=False, repr=False)
class CheckpointMembers:
    """The processes that save and restore together; all make the same calls in the same order."""

    _communicator: Communicator | None
    """Between them; None: this process is alone."""

    @property
    def _ring(self) -> Communicator | None:
        """None: this process is alone now; a newcomer to a ring is, until it joins."""
        return self._communicator if self._communicator is not None and self._communicator.size > 1 else None

    @property
    def rank(self) -> int:
        return 0 if self._ring is None else self._ring.rank

    @property
    def size(self) -> int:
        return 1 if self._ring is None else self._ring.size

    @property
    def first(self) -> str:
        """Rank 0, by name, where it may be lost; else empty."""
        healing = None if self._communicator is None else self._communicator.healing
        return "" if healing is None else healing.members[0]

    def from_first(self, work: Callable[[], Json], first: str | None = None) -> Json:
        """Runs ``work`` on rank 0 alone; everybody gets what it returns. ``first``: rank 0 as it was, if it was to have
        something ready for that. CheckpointError: it failed; on rank 0 the error itself. FirstLostError: rank 0 is
        lost, on all others."""
        first = self.first if first is None else first
        self._check(first)
        if self._ring is None:
            return work()
        if self._ring.rank:
            while "busy" in (news := self._tell(self._ring, first, None)):
                continue
            if "error" in news:
                raise CheckpointError(news["error"])
            return news["result"]
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as executor:
            future = executor.submit(work)
            while not wait([future], BEAT_S).done:
                self._tell(self._ring, first, {"busy": True})
        error = future.exception()
        if error is not None:
            self._tell(self._ring, first, {"error": str(error)})
            raise error
        self._tell(self._ring, first, {"result": future.result()})
        return future.result()

    def states_from_first(self, read: Callable[[], dict[str, EncodedState]]) -> dict[str, EncodedState]:
        """As :meth:`from_first`, for encoded states; the tensors travel too, so that only rank 0 needs the files."""
        if self._ring is None:
            return read()
        states: dict[str, EncodedState] = {}

        def read_here() -> Json:
            states.update(read())
            return {name: state.tree for name, state in states.items()}

        for name, tree in self.from_first(read_here).items():
            own = states.get(name, EncodedState(tree, {}))
            states[name] = EncodedState(tree, broadcast_tensors(self._ring, own.tensors))
        return states

    def _tell(self, ring: Communicator, first: str, news: dict[str, Json] | None) -> dict[str, Json]:
        """Rank 0's news, on every rank."""

        def tell() -> dict[str, Json]:
            self._check(first)  # who comes after it has no news
            heard: dict[str, Json] = broadcast_json(ring, news)
            return heard

        return ring.atomic(tell)

    def _check(self, first: str) -> None:
        if self.first != first:
            raise FirstLostError(f"{first} was lost, and with it the checkpoint that it was writing; restart the job")
