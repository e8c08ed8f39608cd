"""The replicas of one process as threads: each runs its step, they meet on the way, and they end together."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch

from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.strategy.replicas.thread_modes import ThreadModes
from stratagem.strategy.replicas.turn_lock import CALLER, TurnLock
from stratagem.strategy.replicas.wake_ups import SelectiveCondition

T = TypeVar("T")

_Jobs = queue.SimpleQueue[Callable[[], None] | None]


class Doing(enum.Enum):
    """What a replica does in a run."""

    RUNNING = "runs"
    """Or waits for its turn."""
    WAITING = "waits"
    """Inside :meth:`ReplicaThreads.waiting`: for a collective."""
    MEETING = "has reached a synchronization point"
    ENDED = "has ended its step"


@dataclasses.dataclass
class _Offer:
    what: str
    value: Any
    decide: Callable[[list[Any]], Sequence[Any]]


class _Run:
    """One call of :meth:`ReplicaThreads.run`, guarded by their condition."""

    def __init__(self, size: int) -> None:
        self.caller = threading.get_ident()
        self.doing = [Doing.RUNNING] * size
        self.num_meetings = [0] * size
        """Begun by each replica."""
        self.num_met = 0
        self.offers: list[_Offer | None] = [None] * size
        self.results: list[Any] = [None] * size
        """Of a meeting, then of the run."""
        self.errors: list[tuple[int | None, BaseException]] = []
        """In the order in which they came; None: raised by the caller's thread."""
        self.reason = ""
        """Why all have to end."""

    @property
    def is_over(self) -> bool:
        return self.doing.count(Doing.ENDED) == len(self.doing)

    @property
    def wants_caller(self) -> bool:
        """Whether all have come to a meeting, or will never."""
        if self.reason or Doing.MEETING not in self.doing:
            return False
        return Doing.ENDED in self.doing or self.doing.count(Doing.MEETING) == len(self.doing)


@dataclasses.dataclass(frozen=True)
class _ThreadReplica:
    """Which replica a thread is."""

    replica_threads: ReplicaThreads
    run: _Run
    replica: int
    thread: int


RUN_INSIDE_RUN = (
    "strategy.run inside strategy.run: a replica's step cannot start all replicas; call the function itself. "
    "PreemptionCheckpointHandler.run is a strategy.run too: give it the step of a replica"
)
_thread_replica: contextvars.ContextVar[_ThreadReplica | None] = contextvars.ContextVar("thread_replica", default=None)


def current_replica() -> int | None:
    """The local number of the replica whose step the calling thread runs; None: of no replica."""
    thread_replica = _thread_replica.get()
    return None if thread_replica is None else thread_replica.replica


class ReplicaThreads:
    """One thread for each replica of this process; they last until :meth:`close`.

    Replicas on the CPU run in turn: one has the turn, and the next one gets it when that one waits for the others or
    has ended. Each has its own stream of torch's CPU generator
    (:class:`~stratagem.strategy.replicas.turn_lock.TurnLock`), so that runs can be repeated bit for bit. Replicas on
    GPUs run all at once; what they draw on a GPU of their own is their own too, what they draw from the CPU generator
    is not. ``first_replica``: number of the first one among the replicas of all workers, for messages.
    """

    def __init__(self, devices: Sequence[torch.device], first_replica: int = 0) -> None:
        self.devices = tuple(devices)
        self.changed = SelectiveCondition()
        """Guards what replicas do. Notified when that changes; who waits for a replica waits here."""
        self.on_abort: list[Callable[[str], None]] = []
        """Called, with ``changed`` held, when a replica has failed and all others have to end."""
        self.first_replica = first_replica
        self.turn_lock = TurnLock(self.changed, [r for r, device in enumerate(devices) if device.type == "cpu"])
        """Has the streams of random numbers of the replicas that have one beside the caller's."""
        self._run: _Run | None = None
        self._one_at_a_time = threading.Lock()
        self._jobs: list[_Jobs] = [queue.SimpleQueue() for _ in devices]
        self._threads = [
            threading.Thread(target=_work_off, args=(jobs,), name=self.name_of(replica), daemon=True)
            for replica, jobs in enumerate(self._jobs)
        ]
        for thread in self._threads:
            thread.start()
        self._dismiss = weakref.finalize(self, _dismiss, self._jobs)
        # A thread that ends beside the interpreter, with what a failed backward has left in it, is torch's abort.
        self._dismiss.atexit = False

    @property
    def size(self) -> int:
        return len(self.devices)

    def name_of(self, replica: int) -> str:
        """A local replica by its number among those of all workers."""
        return f"replica {self.first_replica + replica}"

    # -- what the caller does ----------------------------------------------------------------------------------

    def run(self, work: Sequence[Callable[[], T]]) -> list[T]:
        """Runs one callable a replica, each in its replica's thread and in the caller's modes and context variables.

        The error that a replica raises ends the others as soon as they wait for anything, and is raised here, with a
        note that says which replica it was. The replica_threads can be used again; see
        :func:`~stratagem.strategy.replicas.local_replicas.reopen`. Raises ConfigurationError: inside a run, or after
        :meth:`close`; CollectiveError: the replicas do not meet: one has ended or is somewhere else; both are named.
        """
        running = self._run
        if self._own_thread_replica() is not None or (running is not None and running.caller == threading.get_ident()):
            raise ConfigurationError(RUN_INSIDE_RUN)
        with self._one_at_a_time:
            self.check_open()
            run = _Run(self.size)
            thread_modes = ThreadModes.here(self.devices)
            self.turn_lock.start()
            num_begun = 0
            try:
                with self.changed:
                    self._run = run
                for replica, one in enumerate(work):
                    play = functools.partial(self._play, run, replica, one, thread_modes)
                    self._jobs[replica].put(functools.partial(contextvars.copy_context().run, play))
                    num_begun += 1
                self._preside(run)
            except BaseException as error:  # Ctrl-C too, which comes anywhere
                self._fail(run, None, error)
                with self.changed:
                    run.doing[num_begun:] = [Doing.ENDED] * (self.size - num_begun)
                    self.turn_lock.release(CALLER)
            finally:
                try:
                    with self.changed:
                        self.changed.wait_for(lambda: run.is_over)
                    self.turn_lock.finish()
                finally:
                    self._run = None  # without the lock, before which an interrupt would leave the run the current one
        if run.errors:
            cause = self._cause(run)
            run.errors.clear()
            try:
                raise cause
            finally:
                del cause  # its traceback holds this frame
        return cast(list[T], run.results)

    def check_open(self) -> None:
        """Raises ConfigurationError after :meth:`close`."""
        if not self._dismiss.alive:
            raise ConfigurationError("the replicas have been closed; build a new strategy")

    def close(self) -> None:
        self._dismiss()
        for thread in self._threads:
            thread.join()

    def _preside(self, run: _Run) -> None:
        """Decides in meetings until all replicas have ended."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: run.is_over or run.wants_caller)
                if run.is_over:
                    return
                self._check_same_place(run)
                offers = [offer for offer in run.offers if offer is not None]
                run.offers = [None] * self.size
            self.turn_lock.take(CALLER)
            try:
                results = offers[0].decide([offer.value for offer in offers])
            except BaseException as error:
                _note(error, f"raised in {offers[0].what}, where all replicas had met")
                raise
            del offers
            with self.changed:
                run.results = list(results)
                run.doing = [Doing.RUNNING] * self.size
                run.num_met += 1
                self.turn_lock.pass_on()
                self.changed.notify_all()

    def _check_same_place(self, run: _Run) -> None:
        one = next(replica for replica, offer in enumerate(run.offers) if offer is not None)
        # One that has not come yet may come; the one to name is that which never will.
        others = sorted(range(self.size), key=lambda replica: run.doing[replica] is not Doing.ENDED)
        for other in others:
            offer = run.offers[other]
            if offer is None or offer.what != cast(_Offer, run.offers[one]).what:
                raise CollectiveError(
                    f"{self.name_of(one)} {self._doing(run, one)}, but {self.name_of(other)} "
                    f"{self._doing(run, other)}: every replica has to make the same calls in the same order",
                    self.first_replica + other,
                )

    # -- what a replica does -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around whatever waits for other replicas: the calling replica lets go of the turn, and takes it again.

        Does nothing in a thread that is no replica of these, and inside another one. Raises CollectiveError: at the
        end, when another replica has failed meanwhile.
        """
        thread_replica = self._own_thread_replica()
        if thread_replica is None or thread_replica.run.doing[thread_replica.replica] is not Doing.RUNNING:
            yield
            return
        with self.changed:
            thread_replica.run.doing[thread_replica.replica] = Doing.WAITING
            self.turn_lock.release(thread_replica.replica)
            self.changed.notify_all()
        try:
            yield
        finally:
            self._go_on(thread_replica.run, thread_replica.replica)
        self._end_if_failed(thread_replica.run)

    def meet(self, what: str, value: Any, decide: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """All replicas come here; ``decide`` runs once, in the caller's thread, while they wait. ``what``: for
        messages; replicas that come with different ones do not meet. ``decide``: from all replicas' values to one
        result each. That of the first replica is used. Raises CollectiveError: another replica is somewhere else, or
        has failed."""
        if (thread_replica := self._own_thread_replica()) is None:
            raise ConfigurationError(f"{what} outside strategy.run: only replicas can synchronize")
        run, replica = thread_replica.run, thread_replica.replica
        self._end_if_failed(run)
        with self.changed:
            num_met = run.num_met
            run.num_meetings[replica] += 1
            run.offers[replica] = _Offer(what, value, decide)
            run.doing[replica] = Doing.MEETING
            self.turn_lock.release(replica)
            self.changed.notify_all()
            self.changed.wait_for(lambda: run.num_met != num_met or bool(run.reason))
        self._go_on(run, replica)
        self._end_if_failed(run)
        result, run.results[replica] = run.results[replica], None
        return result

    def doing(self, replica: int) -> Doing | None:
        """What a local replica does; None: nothing runs. Ask with ``changed`` held."""
        run = self._run
        return None if run is None else run.doing[replica]

    @property
    def failure(self) -> str:
        """Why the replicas that still run have to end; empty: they do not."""
        run = self._run
        return "" if run is None else run.reason

    def _play(self, run: _Run, replica: int, work: Callable[[], Any], thread_modes: ThreadModes) -> None:
        _thread_replica.set(_ThreadReplica(self, run, replica, threading.get_ident()))
        result: Any = None
        try:
            self._go_on(run, replica)
            self._end_if_failed(run)
            with thread_modes.entered(self.devices[replica]):
                result = work()
        except BaseException as error:
            self._fail(run, replica, error)
        finally:
            with self.changed:
                run.results[replica] = result
                run.doing[replica] = Doing.ENDED
                self.turn_lock.release(replica)
                self.changed.notify_all()

    def _go_on(self, run: _Run, replica: int) -> None:
        with self.changed:
            run.doing[replica] = Doing.RUNNING
        self.turn_lock.take(replica)

    def _own_thread_replica(self) -> _ThreadReplica | None:
        found = _thread_replica.get()
        # A thread that the step started may have inherited the context variable.
        is_own = found is not None and found.replica_threads is self and found.thread == threading.get_ident()
        return found if is_own else None

    # -- failures ----------------------------------------------------------------------------------------------

    def _fail(self, run: _Run, replica: int | None, error: BaseException) -> None:
        with self.changed:
            run.errors.append((replica, error))
            if not run.reason:
                text = next(iter(str(error).splitlines()), "")
                who = "the caller of the replicas" if replica is None else self.name_of(replica)
                run.reason = f"{who} raised {type(error).__name__}: {text}"
                for tell in self.on_abort:
                    tell(run.reason)
                self.changed.notify_all()

    def _end_if_failed(self, run: _Run) -> None:
        if run.reason:
            raise CollectiveError(f"this replica has to stop: {run.reason}")

    def _cause(self, run: _Run) -> BaseException:
        """The first error that is not an echo of another's."""
        own = [pair for pair in run.errors if not isinstance(pair[1], CollectiveError)]
        replica, error = (own or run.errors)[0]
        if replica is not None:
            _note(error, f"raised in {self.name_of(replica)} ({self.devices[replica]})")
        return error

    def _doing(self, run: _Run, replica: int) -> str:
        offer, count = run.offers[replica], run.num_meetings[replica]
        if offer is not None:
            return f"is at synchronization point {count} of this step ({offer.what})"
        return f"{run.doing[replica].value} after {count} synchronization point{'s' * (count != 1)}"


def _work_off(jobs: _Jobs) -> None:
    """The life of a thread. It holds nothing of the replicas while it has nothing to do."""
    while (job := jobs.get()) is not None:
        job()
        del job


def _dismiss(all_jobs: Sequence[_Jobs]) -> None:
    for jobs in all_jobs:
        jobs.put(None)


def _note(error: BaseException, text: str) -> None:
    if text not in getattr(error, "__notes__", ()):  # the same object may be raised twice
        error.add_note(text)
