"""The collectives of a replica, as between processes; the others get their turn while it waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from stratagem.errors import CollectiveError
from stratagem.measuring import measures
from stratagem.strategy.replicas.local_group import LocalGroup
from stratagem.strategy.replicas.replica_threads import ReplicaThreads
from stratagem.worker.ring.communicator import Communicator, Position
from stratagem.worker.ring.group import Tag
from stratagem.worker.step_meter import StepMeter, WaitingOn

T = TypeVar("T")


class ReplicaCommunicator(Communicator):
    """A communicator for one of several replicas, with a thread of its own.

    A replica that waits for the result of :meth:`submit` must do so inside ``replica_threads.waiting()``, or in
    :meth:`WaitingMeter.exposed`; a collective called directly sees to that itself.
    """

    def __init__(self, group: LocalGroup) -> None:
        super().__init__(group, _explain)
        self._meeting, self._local = group.meeting, group.local
        self._meeting.positions[self._local] = lambda: str(self.position)

    @property
    def is_alone(self) -> bool:
        """Outside of steps, where no other replica comes."""
        with self._meeting.replica_threads.changed:
            return self._meeting.replica_threads.doing(self._local) is None

    def submit(self, work: Callable[[], T], is_awaited: bool = False) -> Future[T]:
        self._meeting.changed_queue(self._local, 1)
        try:
            future = super().submit(work)
        except BaseException:
            self._meeting.changed_queue(self._local, -1)
            raise
        future.add_done_callback(lambda _: self._meeting.changed_queue(self._local, -1))
        return future

    def collective(self, what: str, run: Callable[[Tag], T]) -> T:
        with self._meeting.replica_threads.waiting():
            return super().collective(what, run)


def reopen(communicators: Sequence[ReplicaCommunicator]) -> None:
    """Makes the communicators of all replicas of a process work again after a step in which one replica failed.

    What was still queued fails first. The replicas may have come to different points of that step, so that their
    weights and optimizers may differ. Other workers have to do the same, or their next collective is an error.
    """
    for communicator in communicators:
        communicator.submit(lambda: None).result()
    communicators[0]._meeting.reopen()
    ordinal = max(communicator.position.ordinal for communicator in communicators)
    for communicator in communicators:
        communicator._error = None
        communicator.position = Position(ordinal, communicator.step, "restarted after an error")


class WaitingMeter(StepMeter):
    """What reducers of several replicas, which share it, measure with: while one waits, the others have their turn.

    Only :meth:`exposed` and :meth:`computes` work. The time of the first counts where all replicas wait: as long as one
    computes, communication is hidden behind that. The second is for those that have their turn: a reducer waits at the
    end of a backward, and meanwhile another replica begins its step, or ends its own wait.
    """

    def __init__(self, meter: StepMeter, replica_threads: ReplicaThreads) -> None:
        # Not the constructor of StepMeter, which would make this one the active meter of the process.
        self._meter = meter
        self._replica_threads = replica_threads
        self._counting = threading.Lock()
        self._num_inside = 0
        self._all_wait = contextlib.ExitStack()

    @contextlib.contextmanager
    def exposed(
        self, waiting_on: WaitingOn, step: int = 0, phase: str = measures.WAIT, peer: str = ""
    ) -> Iterator[None]:
        self._meter.computes(measures.FORWARD, after=measures.BACKWARD)
        with self._replica_threads.waiting():
            with self._counting:
                self._num_inside += 1
                if self._num_inside == self._replica_threads.size:
                    self._all_wait.enter_context(self._meter.exposed(waiting_on, step, phase, peer))
            try:
                yield
            finally:
                with self._counting:
                    self._num_inside -= 1
                    self._all_wait.close()
        self._meter.computes(measures.BACKWARD)

    def computes(self, phase: str, after: str = "") -> None:
        self._meter.computes(phase, after)


def _explain(error: CollectiveError, position: Position) -> CollectiveError:
    return CollectiveError(f"aborted at {position}: {error}", error.rank)
