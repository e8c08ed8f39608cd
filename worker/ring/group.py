"""What a group of ranks can do together. Implementations move bytes; names, order and readable errors are above them.

Implementations: :mod:`stratagem.worker.ring.host_group` (shared memory), :mod:`stratagem.worker.ring.ring_group` (ring
over lanes), :mod:`stratagem.worker.ring.two_level_group` (both), :mod:`stratagem.worker.ring.torch_group` (NCCL).
"""

from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.rpc.codec import can_travel
from stratagem.worker.ring.schedule import cut

HOST = torch.device("cpu")

REDUCE: Mapping[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
"""What makes one tensor of two. Of float16 and bfloat16 torch computes it in float32 and rounds once."""


def check_reducible(dtype: torch.dtype, op: ReduceOp) -> None:
    """Called before any rank waits for another one. Raises ConfigurationError: there is no such reduction."""
    if op is ReduceOp.MEAN and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigurationError(f"the mean of {dtype} is not of that dtype: reduce with SUM and divide")
    if op not in (ReduceOp.SUM, ReduceOp.MEAN) if dtype.is_complex else not can_travel(dtype):
        way_out = "its parts, torch.view_as_real" if dtype.is_complex else "int64 or float32, with .to()"
        raise ConfigurationError(f"{op.name} of {dtype} over replicas is not supported: reduce {way_out}")


class OutOfStepError(CollectiveError):
    """A rank is stalled, or in another collective: other connections would not help. ``ordinal``: of the first
    collective in which the two are known to differ; 0: not known."""

    def __init__(self, message: str, rank: int | None = None, ordinal: int = 0) -> None:
        super().__init__(message, rank)
        self.ordinal = ordinal


class LateError(OutOfStepError):
    """A rank that is reached over a network sent or took nothing within the timeout."""


class Tag(NamedTuple):
    """Which collective a message belongs to (docs/protocol.md 19). Ranks at different tags must not mix."""

    ordinal: int
    """Collectives of this generation so far; starts at 1 and grows by 1 with each."""
    fingerprint: int
    """32 bits over kind, op, dtype, size and step: with equal ordinals, others mean another collective."""


@dataclasses.dataclass(frozen=True)
class Arena:
    """Memory in which this group reduces without copying. Both tensors are flat uint8 of the same length."""

    source: torch.Tensor
    """The rank's own contribution; the group only reads it, unless it is the result too."""
    result: torch.Tensor
    """Where reduced values appear."""
    free: Callable[[], None] = lambda: None
    """The group lets go of it, whose memory goes with the last tensor in it. Every rank calls it, or none."""

    @classmethod
    def of(cls, make: Callable[[], torch.Tensor], in_place: bool) -> Arena:
        """One of memory that ``make`` gives: once, or twice to keep sources apart from results."""
        source = make()
        return cls(source, source if in_place else make())


class Breakable(abc.ABC):
    """Something that an error ends for good. The first error counts."""

    def __init__(self) -> None:
        self._error: CollectiveError | None = None
        self._breaking = threading.Lock()

    def check(self) -> None:
        """Raises the error that broke it, if one did."""
        if self._error is not None:
            raise self._error

    def break_off(self, error: CollectiveError) -> CollectiveError:
        """Breaks it; returns the first error of all, which everything raises from now on."""
        with self._breaking:
            if self._error is not None:
                return self._error
            self._error = error
        self._end(error)
        return error

    def close(self, reason: str) -> None:
        self.break_off(CollectiveError(reason))

    @abc.abstractmethod
    def _end(self, error: CollectiveError) -> None:
        """Closes what it stands on: whoever waits there wakes."""


class Group(Protocol):
    """Ranks 0 … size-1 that run the same collectives in the same order. Every method is collective and blocks.

    Tensors are flat, contiguous and of one dtype; the caller has checked that. A method returns when its outputs are
    complete and its inputs may be changed. Sums of float16 and bfloat16 are formed in float32 and rounded once
    for each hop. Every rank ends with identical bits. Not thread-safe: one caller at a time. A method that has a body
    is as a group has it that can do no better.

    Raises (every method):
        CollectiveError: a peer is gone, stands still longer than the group's timeout, sent something else than what the
            tag says, or :meth:`close` was called. ``error.rank`` names the peer where it is known. The group is broken
            from then on: every later call raises the same error.
    """

    name: str
    """For the log line: "shm", "ring over tcp", …"""
    rank: int
    size: int
    timeout_s: float
    """Seconds that a peer may stand still in a collective. May be set between two."""
    device: torch.device = HOST
    """Where tensors of a collective may lie; those of the CPU always may."""

    def arena(self, num_bytes: int, tag: Tag, in_place: bool = False) -> Arena:
        """Memory for all_reduce, kept until it is freed or the group closes: a source and a result inside it, at equal
        offsets, are reduced without copying. Any other tensors work too, and cost copies where the group needs some.
        ``in_place``: source and result are the same memory, half as much. Here it is each rank's own."""
        self.barrier(tag)
        return Arena.of(lambda: torch.zeros(num_bytes, dtype=torch.uint8), in_place)

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, op: ReduceOp, tag: Tag) -> None:
        """``out[:] = op over ranks of source``; ``source`` is left as it is unless it is ``out``.

        ``op`` is SUM, MIN, MAX or PRODUCT: the caller turns MEAN into SUM and a division.
        """

    def reduce_scatter(self, source: torch.Tensor, out: torch.Tensor, op: ReduceOp, tag: Tag) -> None:
        """``out`` = this rank's slice (:func:`stratagem.worker.ring.schedule.cut`) of the reduction of ``source``.

        Here by an all-reduce, of which every rank keeps its slice.
        """
        total = torch.empty_like(source)
        self.all_reduce(source, total, op, tag)
        start, stop = cut(source.numel(), self.size)[self.rank]
        out.copy_(total[start:stop])

    def all_gather(self, source: torch.Tensor, outs: Sequence[torch.Tensor], tag: Tag) -> None:
        """``outs[r]`` = rank r's ``source``; the lengths may differ and are known, and may be 0."""

    def broadcast(self, buffer: torch.Tensor, root: int, tag: Tag) -> None:
        """``buffer`` = rank root's ``buffer``."""

    def all_to_all(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], tag: Tag) -> None:
        """``outs[r]`` = what rank r holds at ``sources[this rank]``; the lengths may differ and are known."""

    def barrier(self, tag: Tag) -> None:
        """Returns when every rank has called it."""

    def waiting_on(self) -> int | None:
        """The rank this one waits for at this moment; None: none, or there is no telling. Called from other threads."""
        return None

    def close(self, reason: str) -> None:
        """Frees sockets, threads and memory; a call that waits in another thread raises ``CollectiveError(reason)``."""


_ROUNDING = (ReduceOp.SUM, ReduceOp.PRODUCT)


def empty(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory that can be written in every mode and under every default device."""
    with torch.inference_mode(False):
        return torch.empty(num_elements, dtype=dtype, device="cpu")


class Reduction:
    """Reduces the same range of every rank's tensor, in rank order: equal bits wherever it is done.

    float16 and bfloat16 are rounded once: torch adds and multiplies two of them in float32 and rounds; for more than
    two the intermediate values stay in float32 here. ``op``: SUM, MIN, MAX or PRODUCT; ``max_elements``: the longest
    range of one call.
    """

    def __init__(self, op: ReduceOp, dtype: torch.dtype, num_sources: int, max_elements: int) -> None:
        self._function = REDUCE[op]
        self.wide = dtype in (torch.float16, torch.bfloat16) and op in _ROUNDING and num_sources > 2
        """Whether intermediate values are kept in float32, apart from every tensor of the caller."""
        if self.wide:
            self._total = empty(max_elements, torch.float32)
            self._next = empty(max_elements, torch.float32)

    def __call__(self, sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """``into`` = the reduction. It may be one of the first two sources, and any of them where :attr:`wide`."""
        function = self._function
        if len(sources) == 1:
            into.copy_(sources[0])
        elif self.wide:
            num_elements = into.numel()
            total, following = self._total[:num_elements], self._next[:num_elements]
            total.copy_(sources[0])
            for source in sources[1:]:
                following.copy_(source)
                function(total, following, out=total)
            into.copy_(total)
        else:
            function(sources[0], sources[1], out=into)
            for source in sources[2:]:
                function(into, source, out=into)
