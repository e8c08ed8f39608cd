"""The replicas of this process as a strategy sees them: one in the calling thread, or several in threads."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from stratagem.errors import CollectiveError
from stratagem.measuring import measures
from stratagem.strategy.base import Strategy
from stratagem.strategy.replicas.context import ReplicaContext
from stratagem.strategy.replicas.copies import move_original
from stratagem.strategy.replicas.cross_device_ops import CrossDeviceOps
from stratagem.strategy.replicas.local_group import LocalGroup
from stratagem.strategy.replicas.mirrored import taken_outside
from stratagem.strategy.replicas.mirrors import Mirrors
from stratagem.strategy.replicas.replica_threads import ReplicaThreads, current_replica
from stratagem.strategy.replicas.unprepared import UnpreparedWrites
from stratagem.strategy.replicas.variable import keep_variables
from stratagem.worker.gradient_guard import parameters_of
from stratagem.worker.reduction.same_bits import have_same_gradients
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

    def check_caller(self) -> None:
        if (replica := current_replica()) not in (None, self._local):
            raise taken_outside(f"local replica {replica}", "a parameter", f"replica {self._local}")

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
        communicator.restarts += 1
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


class LocalReplicas:
    """One replica a device. This one has one, in the calling thread; objects are changed in place."""

    communicators: Sequence[Communicator]
    """Of each replica, with all replicas of all workers; empty where there is one in all."""
    meter: StepMeter
    """What a replica measures its waiting with."""

    def __init__(self, strategy: Strategy, devices: Sequence[torch.device], meter: StepMeter) -> None:
        self.devices = tuple(devices)
        self.communicators = () if strategy.communicator is None else (strategy.communicator,)
        self.meter = meter
        self._contexts = [ReplicaContext(strategy)]

    def which(self) -> int | None:
        """The local replica that asks; None: the code outside of replicas."""
        return 0

    def add(self, objects: Sequence[Any]) -> list[Any]:
        """Places objects on the devices. Returns what the script uses in their stead, in their order."""
        optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
        for item in objects:
            if isinstance(item, torch.nn.Module):
                move_original(item, self.devices[0], optimizers)
        return list(objects)

    def on_replica(self, item: Any, replica: int) -> Any:
        """What an object that was added is on one replica."""
        return item

    def stepping(self, optimizer: torch.optim.Optimizer, replica: int) -> torch.optim.Optimizer | None:
        """The optimizer that steps on a replica for one that was added; None: another replica's does it for all."""
        own: torch.optim.Optimizer = self.on_replica(optimizer, replica)
        return own

    def parameters_of(self, optimizer: torch.optim.Optimizer, replica: int) -> list[torch.nn.Parameter]:
        """The parameters of an optimizer that was added, as they are on one replica."""
        return parameters_of(self.on_replica(optimizer, replica))

    def have_same_gradients(self, optimizer: torch.optim.Optimizer, replica: int) -> bool:
        """Whether the parameters of an optimizer that was added have the same gradients on all replicas, each of which
        has to ask in its step. A step outside of replicas is one for all."""
        return self.which() is None or have_same_gradients(
            self.parameters_of(optimizer, replica), self.communicators[replica]
        )

    def run(self, work: Sequence[Callable[[], T]], uses: Sequence[Any]) -> list[T]:
        """Runs one callable a replica, in its context: a step of the script; ``uses``: its function and arguments."""
        return [self._contexts[0].call(work[0])]

    def together(self, work: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
        """Has each replica do ``work``, which may make collectives, with its own of each of the ``arguments``; what it
        changes is each replica's own."""
        return list(map(work, *arguments))

    def interrupted(self) -> contextlib.AbstractContextManager[None]:
        """Around what runs outside of replicas in the middle of :meth:`run`."""
        return contextlib.nullcontext()

    def random_states(self) -> dict[str, torch.Tensor]:
        """See :meth:`Strategy.random_states`; of a replica that draws from the process's own generators none."""
        return {}

    def set_random_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """See :meth:`Strategy.set_random_states`."""

    def close(self) -> None:
        """Ends the replicas' threads."""


class SeveralReplicas(LocalReplicas):
    """Replicas with a thread, and copies of all objects, for each."""

    def __init__(
        self,
        strategy: Strategy,
        devices: Sequence[torch.device],
        ops: CrossDeviceOps,
        meter: StepMeter,
        is_pending: Callable[[torch.nn.Parameter], bool],
    ) -> None:
        self._is_pending = is_pending
        workers = strategy.communicator
        self.replica_threads = ReplicaThreads(devices, 0 if workers is None else workers.rank * len(devices))
        super().__init__(strategy, devices, WaitingMeter(meter, self.replica_threads))
        self._own = [ReplicaCommunicator(group) for group in LocalGroup.make(self.replica_threads, ops, workers)]
        self.communicators = self._own
        self._contexts = [
            ReplicaContext(strategy, self.replica_threads, replica, ops, own) for replica, own in enumerate(self._own)
        ]
        self._mirrors = self._make_mirrors(functools.partial(keep_variables, strategy))
        self._unprepared_writes = UnpreparedWrites(self._mirrors.modules)

    def _make_mirrors(self, keep: Callable[[int, dict[int, Any]], None]) -> Mirrors:
        return Mirrors(self.devices, self.which, meet=self.replica_threads.meet, keep=keep, is_pending=self._is_pending)

    def which(self) -> int | None:
        return current_replica()

    def add(self, objects: Sequence[Any]) -> list[Any]:
        return self._mirrors.add(objects)

    def on_replica(self, item: Any, replica: int) -> Any:
        return self._mirrors.copies_of(item)[replica]

    def run(self, work: Sequence[Callable[[], T]], uses: Sequence[Any]) -> list[T]:
        """See :meth:`LocalReplicas.run`. After an error the replicas go on with what replica 0 has; with other workers
        only if those had it too."""
        self.replica_threads.check_open()
        with self._mirrors.running():
            work = self._unprepared_writes.watched(work, uses)
            try:
                return self.replica_threads.run(
                    [functools.partial(context.call, one) for context, one in zip(self._contexts, work, strict=True)]
                )
            except BaseException:
                reopen(self._own)
                self._mirrors.begin_anew()
                raise

    def together(self, work: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
        with self._mirrors.running():
            return self.replica_threads.run([functools.partial(work, *its) for its in zip(*arguments, strict=True)])

    def interrupted(self) -> contextlib.AbstractContextManager[None]:
        return self._mirrors.interrupted()

    def random_states(self) -> dict[str, torch.Tensor]:
        return self.replica_threads.turn_lock.states()

    def set_random_states(self, states: Mapping[str, torch.Tensor]) -> None:
        self.replica_threads.turn_lock.set_states(states)

    def close(self) -> None:
        for own in self._own:
            own.close()
        self.replica_threads.close()
