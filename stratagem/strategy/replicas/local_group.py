"""The replicas of one process as ranks of a group, alone or with those of other workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.strategy.replicas.cross_device_ops import CrossDeviceOps
from stratagem.strategy.replicas.meeting import Meeting
from stratagem.strategy.replicas.replica_threads import ReplicaThreads
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
        """The groups of all replicas of this process, in their order. Collective among workers.

        Args:
            replica_threads: whose ``first_replica`` is this worker's rank times its size.
            workers: collectives between workers; None: there is one.

        Raises:
            ConfigurationError: workers with different numbers of replicas.
        """
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
