"""A group whose ranks are threads of one process: what reducers are tested with. No bytes move, all else is as real."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.group import HOST, Arena, Tag
from stratagem.worker.ring.schedule import cut

T = TypeVar("T")
TIMEOUT_S = 40.0  # of one meeting; a test in which a rank is missing fails by it


class Meeting:
    """Where the ranks of one group meet. Once all have come, all go on, even if one closes the group right after."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.offers: list[tuple[str, Tag, Sequence[torch.Tensor]]] = [("", Tag(0, 0), ())] * size
        self._changed = threading.Condition()
        self._num_here = 0
        self._num_met = 0
        self._closed = ""

    def meet(self) -> None:
        """Returns when all ranks are here."""
        with self._changed:
            met = self._num_met
            self._num_here += 1
            if self._num_here == self.size and not self._closed:
                self._num_here = 0
                self._num_met += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_met != met or bool(self._closed), TIMEOUT_S)
            if self._num_met == met:
                raise CollectiveError(self._closed or f"a rank did not come within {TIMEOUT_S} s")

    def close(self, reason: str) -> None:
        """Whoever waits, or comes later, gets an error with the first reason."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()


class ThreadGroup:
    """One rank of a group of threads.

    Args:
        meeting: shared by all ranks.
        fail_at: ordinals of collectives in which this rank breaks the group; those that did are in ``failed_at``.
    """

    name = "threads"
    timeout_s = 60.0

    device = HOST

    def __init__(self, meeting: Meeting, rank: int, fail_at: Sequence[int] = ()) -> None:
        self.rank, self.size = rank, meeting.size
        self.sent_bytes = 0
        """What a ring would have sent."""
        self.calls: Counter[str] = Counter()
        self.fail_at, self.failed_at = set(fail_at), set[int]()
        self._meeting = meeting
        self._error: CollectiveError | None = None

    def arena(self, num_bytes: int, tag: Tag, in_place: bool = False) -> Arena:
        self._exchange("arena", tag, [torch.tensor([num_bytes])], lambda offers: None)
        # Memory that was used before: whoever needs zeros has to write them.
        return Arena.of(lambda: torch.full((num_bytes,), 0x7F, dtype=torch.uint8), in_place)

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, op: ReduceOp, tag: Tag) -> None:
        total = self._exchange("all_reduce", tag, [source], lambda offers: reduced([one[0] for one in offers], op))
        out.copy_(total)
        self.sent_bytes += 2 * (self.size - 1) * source.nbytes // self.size

    def reduce_scatter(self, source: torch.Tensor, out: torch.Tensor, op: ReduceOp, tag: Tag) -> None:
        total = self._exchange("reduce_scatter", tag, [source], lambda offers: reduced([one[0] for one in offers], op))
        start, stop = cut(source.numel(), self.size)[self.rank]
        out.copy_(total[start:stop])
        self.sent_bytes += (self.size - 1) * source.nbytes // self.size

    def all_gather(self, source: torch.Tensor, outs: Sequence[torch.Tensor], tag: Tag) -> None:
        parts = self._exchange("all_gather", tag, [source], lambda offers: [one[0].clone() for one in offers])
        for out, part in zip(outs, parts, strict=True):
            out.copy_(part)
        self.sent_bytes += (self.size - 1) * source.nbytes

    def broadcast(self, buffer: torch.Tensor, root: int, tag: Tag) -> None:
        buffer.copy_(self._exchange("broadcast", tag, [buffer], lambda offers: offers[root][0].clone()))
        self.sent_bytes += buffer.nbytes if self.rank == root else 0

    def all_to_all(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], tag: Tag) -> None:
        parts = self._exchange("all_to_all", tag, sources, lambda offers: [one[self.rank].clone() for one in offers])
        for out, part in zip(outs, parts, strict=True):
            out.copy_(part)
        self.sent_bytes += sum(source.nbytes for rank, source in enumerate(sources) if rank != self.rank)

    def barrier(self, tag: Tag) -> None:
        self._exchange("barrier", tag, [], lambda offers: None)

    def waiting_on(self) -> int | None:
        return None

    def close(self, reason: str) -> None:
        self._meeting.close(reason)

    def _exchange(
        self, kind: str, tag: Tag, mine: Sequence[torch.Tensor], compute: Callable[[list[Sequence[torch.Tensor]]], T]
    ) -> T:
        """Shows ``mine`` to all, computes from what all show, and lets nobody go before all have computed."""
        if self._error is not None:
            raise self._error
        try:
            if tag.ordinal in self.fail_at:
                self.failed_at.add(tag.ordinal)
                self.close(f"rank {self.rank} broke collective {tag.ordinal}")
            self.calls[kind] += 1
            self._meeting.offers[self.rank] = (kind, tag, mine)
            self._meeting.meet()
            offers = list(self._meeting.offers)
            for rank, (its_kind, its_tag, _) in enumerate(offers):
                if (its_kind, its_tag) != offers[0][:2]:
                    self.close(f"rank 0 is at {offers[0][:2]}, rank {rank} at {(its_kind, its_tag)}")
            result = compute([tensors for _, _, tensors in offers])
            self._meeting.meet()
            return result
        except CollectiveError as error:
            self._error = error
            raise


def reduced(tensors: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Reduces in rank order; halves are summed in float32 and rounded once."""
    half = tensors[0].dtype in (torch.float16, torch.bfloat16)
    total = tensors[0].float() if half else tensors[0].clone()
    for tensor in tensors[1:]:
        if op is ReduceOp.SUM:
            total += tensor
        elif op is ReduceOp.PRODUCT:
            total *= tensor
        else:
            total = (torch.minimum if op is ReduceOp.MIN else torch.maximum)(total, tensor.to(total.dtype))
    return total.to(tensors[0].dtype)


def run_ranks(size: int, work: Callable[[Communicator], T], fail_at: dict[int, Sequence[int]] | None = None) -> list[T]:
    """Runs ``work`` on ``size`` ranks at once; raises the first error of the lowest rank that has one.

    Args:
        fail_at: by rank, the collectives that it breaks.
    """
    results, errors = run_ranks_with_errors(size, work, fail_at)
    for error in errors:
        if error is not None:
            raise error
    return cast(list[T], results)


def run_ranks_with_errors(
    size: int, work: Callable[[Communicator], T], fail_at: dict[int, Sequence[int]] | None = None
) -> tuple[list[T | None], list[BaseException | None]]:
    """The result or the error of each rank."""
    meeting = Meeting(size)
    groups = [ThreadGroup(meeting, rank, (fail_at or {}).get(rank, ())) for rank in range(size)]
    results: list[T | None] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        communicator = Communicator(groups[rank], explain=lambda error, position: error)
        try:
            results[rank] = work(communicator)
        except BaseException as error:
            errors[rank] = error
            groups[rank].close(f"rank {rank} ended with {error!r}")
        finally:
            finished.wait(TIMEOUT_S)
            communicator.close()

    finished = threading.Barrier(size)  # a communicator that closes breaks the meeting
    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        expected = group.fail_at
        assert group.failed_at == expected, f"rank {group.rank} was to fail at {expected}, did at {group.failed_at}"
    return results, errors
