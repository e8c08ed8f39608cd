"""Where the replicas of one process meet for a collective: the last to come does the work, all leave with a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from stratagem.errors import CollectiveError
from stratagem.strategy.replicas.replica_threads import Doing, ReplicaThreads
from stratagem.worker.ring.group import Tag


class Offer(NamedTuple):
    tag: Tag
    value: Any


class Meeting:
    """One place for all collectives of the replicas, one after the other. Guarded by the condition of their threads.

    A replica that cannot come any more (it has ended its step, or waits for the others elsewhere) is an error at once.
    One that computes is waited for, as long as that takes; while no step runs, ``timeout_s`` seconds.
    """

    def __init__(self, replica_threads: ReplicaThreads) -> None:
        self.replica_threads = replica_threads
        self.size = replica_threads.size
        self.positions: list[Callable[[], str] | None] = [None] * self.size
        """Where a replica's communicator stands, in words; None: it has none."""
        self.num_queued = [0] * self.size
        """Collectives, or parts of programs with some, that are still to come from a replica's communicator."""
        self.timeout_s = 300.0
        self._offers: list[Offer | None] = [None] * self.size
        self._results: list[Any] = [None] * self.size
        self._num_met = 0
        self.is_concluding = False
        """Whether all have come, and the results are not there yet."""
        self._errors: list[CollectiveError | None] = [None] * self.size
        replica_threads.on_abort.append(self._abort)

    def exchange(self, local: int, tag: Tag, value: Any, conclude: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """All replicas come here; ``conclude`` makes of their values one result each, in the last one's thread.

        What a value refers to may be changed again when this returns; so a result must not share its memory.

        Raises:
            CollectiveError: replicas have come with different tags, one cannot come, or the meeting is broken.
        """
        with self.replica_threads.waiting():
            with self.replica_threads.changed:
                self._raise_error(local)
                if self.replica_threads.failure:
                    self._break_all(self.replica_threads.failure)
                    self._raise_error(local)
                num_met = self._num_met
                self._offers[local] = Offer(tag, value)
                offers = [offer for offer in self._offers if offer is not None]
                self.is_concluding = is_last = len(offers) == self.size
            if is_last:
                self._conclude(local, offers, conclude)
            with self.replica_threads.changed:
                if not is_last:
                    self._wait(local, num_met)
                if self._num_met == num_met:
                    self._raise_error(local)
                result, self._results[local] = self._results[local], None
                return result

    def waiting_on(self, local: int) -> int | None:
        """The first local replica that a waiting one waits for."""
        with self.replica_threads.changed:
            if self._offers[local] is None or None not in self._offers:
                return None
            return self._offers.index(None)

    def close(self, local: int, reason: str) -> None:
        """Breaks the meeting; the first reason counts."""
        rank = self.replica_threads.first_replica + local
        errors = [
            CollectiveError(f"{self.replica_threads.name_of(local)} left: {reason}", rank) for _ in range(self.size)
        ]
        errors[local] = CollectiveError(reason)
        with self.replica_threads.changed:
            self._break(errors)

    def reopen(self) -> None:
        with self.replica_threads.changed:
            self._errors = [None] * self.size

    def changed_queue(self, local: int, change: int) -> None:
        """A replica's communicator has more, or less, to do."""
        with self.replica_threads.changed:
            self.num_queued[local] += change
            self.replica_threads.changed.notify_all()

    # -- all have come -----------------------------------------------------------------------------------------

    def _conclude(self, local: int, offers: list[Offer], conclude: Callable[[list[Any]], Sequence[Any]]) -> None:
        error: CollectiveError | None = None
        results: Sequence[Any] = ()
        try:
            if all(offer.tag == offers[0].tag for offer in offers):
                results = conclude([offer.value for offer in offers])
        except CollectiveError as raised:
            error = raised
        except BaseException as raised:
            error = CollectiveError(f"{self.replica_threads.name_of(local)} could not finish a collective: {raised!r}")
            raise
        finally:
            with self.replica_threads.changed:
                self.is_concluding = False
                if results:
                    self._results = list(results)
                    self._offers = [None] * self.size
                    self._num_met += 1
                elif error is not None:
                    self._break_all(str(error), error.rank)
                else:
                    self._break([self._mismatch(each, offers) for each in range(self.size)])
                self.replica_threads.changed.notify_all()

    def _mismatch(self, local: int, offers: list[Offer]) -> CollectiveError:
        other = next(each for each, offer in enumerate(offers) if offer.tag != offers[local].tag)
        return CollectiveError(
            f"{self._where(local)}, but {self._where(other)}: every replica has to make the same collectives in the "
            "same order",
            self.replica_threads.first_replica + other,
        )

    # -- somebody is missing -----------------------------------------------------------------------------------

    def _wait(self, local: int, num_met: int) -> None:
        """Until the result or an error is there."""

        def is_over() -> bool:
            if self._num_met != num_met:
                return True
            # While the last one works, it reads what the others brought.
            return not self.is_concluding and (self._errors[local] is not None or self._cannot_meet(local) is not None)

        # Nobody can know how long a replica computes between two collectives; outside of steps nobody computes.
        while not self.replica_threads.changed.wait_for(is_over, self.timeout_s):
            missing = next((each for each, offer in enumerate(self._offers) if offer is None), None)
            if missing is not None and self.replica_threads.doing(missing) is None:
                self._break_for(local, missing, f"did not come within {self.timeout_s:g} s")
                return
        missing = self._cannot_meet(local)
        if self._num_met == num_met and self._errors[local] is None and missing is not None:
            if self.replica_threads.failure:
                self._break_all(self.replica_threads.failure)
            else:
                doing = self.replica_threads.doing(missing)
                self._break_for(local, missing, doing.value if doing is not None else "is gone")

    def _cannot_meet(self, local: int) -> int | None:
        """A replica that will never come, as far as it depends on others; None: all may come."""
        for missing, offer in enumerate(self._offers):
            if offer is not None or self.num_queued[missing]:
                continue
            doing = self.replica_threads.doing(missing)
            if doing is Doing.ENDED:
                return missing
            # That one waits for this one, which waits for it.
            if doing is Doing.MEETING and self.replica_threads.doing(local) is Doing.WAITING:
                return missing
        return None

    def _break_for(self, local: int, missing: int, why: str) -> None:
        text = f"{self._where(local)} and waits for {self._where(missing, at=why)}"
        errors = [CollectiveError(text, self.replica_threads.first_replica + missing) for _ in range(self.size)]
        errors[missing] = CollectiveError(text, self.replica_threads.first_replica + local)
        self._break(errors)

    def _where(self, local: int, at: str = "is") -> str:
        position, offer = self.positions[local], self._offers[local]
        if position is not None:
            place = f"at {position()}"
        elif offer is not None:
            place = f"at collective {offer.tag.ordinal} (fingerprint {offer.tag.fingerprint:08x})"
        else:
            place = "in no collective"
        if offer is None and at != "is":
            return f"{self.replica_threads.name_of(local)}, which {at}; it was last {place}"
        return f"{self.replica_threads.name_of(local)} is {place}"

    # -- errors ------------------------------------------------------------------------------------------------

    def _abort(self, reason: str) -> None:
        """A replica has failed. Who has come, or is on its way, would wait for it or for its next collective."""
        has_come = any(offer is not None for offer in self._offers) and not self.is_concluding
        if has_come or any(self.num_queued):
            self._break_all(reason)

    def _break_all(self, reason: str, rank: int | None = None) -> None:
        self._break([CollectiveError(reason, rank) for _ in range(self.size)])

    def _break(self, errors: Sequence[CollectiveError]) -> None:
        self._errors = [old or new for old, new in zip(self._errors, errors, strict=True)]
        if not self.is_concluding:
            self._offers = [None] * self.size
        self.replica_threads.changed.notify_all()

    def _raise_error(self, local: int) -> None:
        if (error := self._errors[local]) is not None:
            raise error
