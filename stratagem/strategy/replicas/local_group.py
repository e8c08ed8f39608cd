"""The replicas of one process as ranks of a group, alone or with those of other workers, and their meeting point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.strategy.replicas.cross_device_ops import CrossDeviceOps
from stratagem.strategy.replicas.replica_threads import Doing, ReplicaThreads
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.group import Group, Tag

T = TypeVar("T")


class LocalGroup(Group):
    """Implements :class:`stratagem.worker.ring.group.Group` for one of several replicas.

    All replicas of the process meet, and the last to come does the work: reduces by the cross-device ops, and, if
    there are other workers, carries the result once between the workers. Ranks are numbered worker by worker. Tensors
    may be on the CPU or on GPUs, there with what the calling thread has queued on its current streams.

    A replica's thread lets go of the turn while it waits here. Every method may be called in another thread, on
    behalf of the replica, as a communicator does.
    """

    def __init__(self, meeting: Meeting, local: int, ops: CrossDeviceOps, workers: Communicator | None) -> None:
        self.meeting = meeting
        self.local = local
        """Number of the replica in its process."""
        self.rank = meeting.replica_threads.first_replica + local
        self.size = meeting.size * (1 if workers is None else workers.size)
        self.name = f"{meeting.size} replicas"
        if workers is not None:
            self.name += f" and {workers.group.name}"
        self._ops = ops
        self._workers = workers

    @classmethod
    def make(
        cls, replica_threads: ReplicaThreads, ops: CrossDeviceOps, workers: Communicator | None = None
    ) -> list[LocalGroup]:
        """The groups of all replicas of this process, in their order. Collective among workers. ``replica_threads``:
        whose ``first_replica`` is this worker's rank times its size; ``workers``: collectives between workers; None:
        there is one. Raises ConfigurationError: workers with different numbers of replicas."""
        if workers is not None:
            counts = [int(count) for count in workers.all_gather(torch.tensor([replica_threads.size]))]
            if any(count != replica_threads.size for count in counts):
                raise ConfigurationError(
                    f"every worker needs the same number of replicas, but worker {workers.rank} has "
                    f"{replica_threads.size} and all have, in the order of their indices, {counts}"
                )
            assert replica_threads.first_replica == workers.rank * replica_threads.size
        meeting = Meeting(replica_threads)
        return [cls(meeting, local, ops, workers) for local in range(replica_threads.size)]

    @property
    def timeout_s(self) -> float:
        return self.meeting.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.meeting.timeout_s = seconds

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, op: ReduceOp, tag: Tag) -> None:
        def conclude(sources: list[torch.Tensor]) -> list[torch.Tensor]:
            totals = self._ops.all_reduce(op, sources)
            if self._workers is None:
                return totals
            total = self._workers.all_reduce(totals[0], op)
            return [total.to(each.device) for each in totals]

        out.copy_(self._exchange(tag, [source], source, conclude))

    def all_gather(self, source: torch.Tensor, outs: Sequence[torch.Tensor], tag: Tag) -> None:
        lengths = [out.numel() for out in outs]

        def conclude(sources: list[torch.Tensor]) -> list[list[torch.Tensor]]:
            if self._workers is None:
                parts = [each.detach().clone() for each in sources]
            else:
                gathered = self._workers.all_gather(_joined(sources))
                cuts = zip(gathered, self._by_worker(lengths), strict=True)
                parts = [part for flat, its in cuts for part in flat.split(its)]
            return [parts] * len(sources)

        for out, part in zip(outs, self._exchange(tag, [source], source, conclude), strict=True):
            out.copy_(part)

    def broadcast(self, buffer: torch.Tensor, root: int, tag: Tag) -> None:
        worker, local = divmod(root, self.meeting.size)

        def conclude(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
            value = buffers[local].detach().clone()
            if self._workers is not None:
                self._workers.broadcast(value, worker)
            return [value] * len(buffers)

        value = self._exchange(tag, [buffer], buffer, conclude)
        if self.rank != root:
            buffer.copy_(value)

    def all_to_all(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], tag: Tag) -> None:
        def conclude(offers: list[tuple[Sequence[torch.Tensor], list[int]]]) -> list[list[torch.Tensor]]:
            if self._workers is None:
                return [[theirs[to].detach().clone() for theirs, _ in offers] for to in range(len(offers))]
            by_worker = [self._by_worker(theirs) for theirs, _ in offers]
            parcels = [_joined([part for parts in by_worker for part in parts[to]]) for to in range(self._workers.size)]
            received: list[list[torch.Tensor]] = [[] for _ in offers]
            for worker, parcel in enumerate(self._workers.all_to_all(parcels)):
                lengths = [self._by_worker(its)[worker] for _, its in offers]
                places = [(to, lengths[to][sender]) for sender in range(len(offers)) for to in range(len(offers))]
                pieces = parcel.split([length for _, length in places])
                for (to, _), piece in zip(places, pieces, strict=True):
                    received[to].append(piece)
            return received

        lengths = [out.numel() for out in outs]
        for out, part in zip(outs, self._exchange(tag, sources, (sources, lengths), conclude), strict=True):
            out.copy_(part)

    def barrier(self, tag: Tag) -> None:
        def conclude(_: list[Any]) -> list[None]:
            if self._workers is not None:
                self._workers.barrier()
            return [None] * self.meeting.size

        self._exchange(tag, [], None, conclude)

    def waiting_on(self) -> int | None:
        """See :meth:`Group.waiting_on`; of another worker, its first replica."""
        if (local := self.meeting.waiting_on(self.local)) is not None:
            return self.meeting.replica_threads.first_replica + local
        if self._workers is None or not self.meeting.is_concluding:
            return None
        worker = self._workers.group.waiting_on()
        return None if worker is None else worker * self.meeting.size

    def close(self, reason: str) -> None:
        """See :meth:`Group.close`. Breaks the group of every replica of the process."""
        self.meeting.close(self.local, reason)

    def _exchange(
        self, tag: Tag, tensors: Sequence[torch.Tensor], value: Any, conclude: Callable[[list[Any]], Sequence[Any]]
    ) -> Any:
        """:meth:`Meeting.exchange` of a value that refers to ``tensors``."""

        def concluded(values: list[Any]) -> Sequence[Any]:
            try:
                return conclude(values)
            except CollectiveError as error:  # it names a worker
                rank = None if error.rank is None else error.rank * self.meeting.size
                raise CollectiveError(str(error), rank) from None
            finally:
                _wait_for(self.meeting.replica_threads.devices if any(tensor.is_cuda for tensor in tensors) else ())

        _wait_for({tensor.device for tensor in tensors})
        return self.meeting.exchange(self.local, tag, value, concluded)

    def _by_worker(self, of_ranks: Sequence[T]) -> list[Sequence[T]]:
        """What belongs to all ranks, cut into what belongs to each worker's."""
        step = self.meeting.size
        return [of_ranks[start : start + step] for start in range(0, self.size, step)]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().to(tensors[0].device) for tensor in tensors])


def _wait_for(devices: Iterable[torch.device]) -> None:
    """Other threads may read what this one has computed on GPUs: their streams do not wait for its."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


class Offer(NamedTuple):
    tag: Tag
    value: Any


class Meeting:
    """Where the replicas of one process meet for a collective: the last to come does the work, all leave with a result.

    One place for all collectives of the replicas, one after the other. Guarded by the condition of their threads.

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

        What a value refers to may be changed again when this returns; so a result must not share its memory. A
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
            f"{self._where(local)}, but {self._where(other)}: every replica has to call the same collectives in the "
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
