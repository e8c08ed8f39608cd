"""Compression of gradients: the interface, and the implementations by name."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from stratagem.cluster.spec import refuse_unknown
from stratagem.errors import ConfigurationError
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.group import Arena
from stratagem.worker.ring.schedule import cut


@dataclasses.dataclass(frozen=True)
class BucketPart:
    """One gradient inside a bucket."""

    start: int
    """In elements from the begin of the bucket."""
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FullBucket:
    """A bucket whose gradients are all here."""

    index: int
    parts: Sequence[BucketPart]
    """The gradients in it; elements between them are zeros."""
    source: torch.Tensor
    """Flat float32 in host memory, left as it is."""
    result: torch.Tensor
    """The same length; what lies between the parts is nobody's."""
    again: bool = False
    """This backward adds to the gradients of an earlier one, so it goes on from the state that left aside."""


class GradientCompression(abc.ABC):
    """Reduces float32 buckets with fewer bytes than an all-reduce. Every rank ends with identical bits.

    State is kept by bucket and changes only when the step commits (docs/protocol.md 22): what a backward computes
    stays aside until :meth:`commit`, so a backward whose gradients are dropped leaves no trace.
    """

    name: str

    def __str__(self) -> str:
        return self.name

    @abc.abstractmethod
    def reduce(self, bucket: FullBucket, communicator: Communicator) -> None:
        """Writes the sum of all ranks' sources into the bucket's result, as well as it can. The bucket is the same one
        on every rank; this is a thread of the communicator."""

    @abc.abstractmethod
    def commit(self, buckets: Iterable[int]) -> None:
        """A step was made with the newest result of these buckets."""

    @abc.abstractmethod
    def reset(self) -> None:
        """The buckets were cut again: forgets all state."""


class ErrorFeedback(GradientCompression):
    """Compression with a debt: what it leaves out of one step (the residual, on this rank alone) it adds to the next.

    Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019.
    """

    def __init__(self) -> None:
        self._committed: dict[int, Sequence[torch.Tensor]] = {}
        """By bucket: the residual, and what else a compression keeps."""
        self._aside: dict[int, Sequence[torch.Tensor]] = {}

    def kept(self, bucket: int, again: bool) -> Sequence[torch.Tensor]:
        """What a backward begins with, the residual first; empty: there is none yet. It must not be written to."""
        return self._aside[bucket] if again and bucket in self._aside else self._committed.get(bucket, ())

    def owed(self, bucket: FullBucket) -> torch.Tensor:
        """The source plus the residual, in new memory."""
        kept = self.kept(bucket.index, bucket.again)
        return bucket.source + (kept[0] if kept else torch.zeros_like(bucket.source))

    def keep(self, bucket: FullBucket, residual: torch.Tensor, *more: torch.Tensor) -> None:
        """What is left after a backward."""
        self._aside[bucket.index] = residual, *more

    def commit(self, buckets: Iterable[int]) -> None:
        for bucket in buckets:
            if bucket in self._aside:
                self._committed[bucket] = self._aside.pop(bucket)

    def reset(self) -> None:
        self._committed.clear()
        self._aside.clear()


class CastCompression(GradientCompression):
    """Reduces in another floating dtype; groups sum halves in float32.

    bfloat16 keeps the range of float32 and 8 bits of precision. float16 keeps 11 bits but ends at 65,504 and loses what
    is below 6e-8: use it with a loss scale (``torch.amp.GradScaler``).
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype
        self._arenas: dict[int, Arena] = {}

    def reduce(self, bucket: FullBucket, communicator: Communicator) -> None:
        if bucket.index not in self._arenas:
            self._arenas[bucket.index] = communicator.arena(bucket.source.numel() * self._dtype.itemsize)
        arena = self._arenas[bucket.index]
        half, total = arena.source.view(self._dtype), arena.result.view(self._dtype)
        half.copy_(bucket.source)
        communicator.all_reduce(half, out=total)
        bucket.result.copy_(total)

    def commit(self, buckets: Iterable[int]) -> None:
        """Nothing to do: nothing is owed."""

    def reset(self) -> None:
        for arena in self._arenas.values():
            arena.free()
        self._arenas.clear()


class TopKCompression(ErrorFeedback):
    """Indices and values of the elements of largest magnitude; all ranks add up all of them in rank order.

    Source: Stich, Cordonnier, Jaggi: "Sparsified SGD with Memory", 2018. ``ratio``: part of a bucket that is sent,
    above 0, at most 1. Each element sent costs 8 bytes to every other rank.
    """

    name = "topk"

    def __init__(self, ratio: float = 0.01) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise ConfigurationError(f"expected a ratio above 0 and at most 1, got {ratio!r}")
        self._ratio = ratio

    def reduce(self, bucket: FullBucket, communicator: Communicator) -> None:
        owed = self.owed(bucket)
        count = min(owed.numel(), max(1, round(owed.numel() * self._ratio)))
        chosen = owed.abs().topk(count, sorted=False).indices  # NaN counts as largest, so it is never left out
        message = torch.cat([chosen.to(torch.int32), owed[chosen].view(torch.int32)])
        owed[chosen] = 0.0
        bucket.result.zero_()
        for theirs in communicator.all_gather(message):
            indices, values = theirs.view(2, -1)
            bucket.result.index_add_(0, indices, values.view(torch.float32))
        self.keep(bucket, owed)


class PowerSGDCompression(ErrorFeedback):
    """Gradients as products of two thin matrices, with a warm start and error feedback: one power iteration a step.

    A gradient is taken as a matrix of its first dimension by the rest. Those of fewer than two dimensions, and those
    whose two factors would not be smaller than they are, travel as they are.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", 2019. There each rank's residual is its gradient minus the mean of all; here it is what this rank's
    own gradient lost. The sum over ranks is the same, so are all results, and a rank without examples owes nothing.
    ``rank``: columns of the factors; ``seed``: of their first values, equal on all ranks.
    """

    name = "powersgd"

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        super().__init__()
        if rank < 1:
            raise ConfigurationError(f"expected a rank of at least 1, got {rank}")
        self._rank = rank
        self._seed = seed

    def reduce(self, bucket: FullBucket, communicator: Communicator) -> None:
        owed = self.owed(bucket)
        low = [part for part in bucket.parts if self._pays(part.shape)]
        whole = [part for part in bucket.parts if not self._pays(part.shape)]
        matrices = [_matrix(owed, part) for part in low]
        first = [self._first(bucket.index, at, matrix.shape[1]) for at, matrix in enumerate(matrices)]
        warm = self.kept(bucket.index, bucket.again)[1:] or first
        right = [_revived(factor, fresh) for factor, fresh in zip(warm, first, strict=True)]

        lefts = [matrix @ factor for matrix, factor in zip(matrices, right, strict=True)]
        (*wholes_sum,) = _all_reduce(communicator, [_flat(owed, part) for part in whole] + lefts)
        lefts = [orthogonal(left) for left in wholes_sum[len(whole) :]]
        own = [matrix.t() @ left for matrix, left in zip(matrices, lefts, strict=True)]
        sums = _all_reduce(communicator, own)

        for part, total in zip(whole, wholes_sum, strict=False):
            _flat(bucket.result, part).copy_(total)
            _flat(owed, part).zero_()
        for part, matrix, left, mine, total in zip(low, matrices, lefts, own, sums, strict=True):
            torch.mm(left, total.t(), out=_matrix(bucket.result, part))
            matrix.sub_(left @ mine.t())
        self.keep(bucket, owed, *sums)

    def _pays(self, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2:
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        return self._rank * (rows + columns) < rows * columns

    def _first(self, bucket: int, at: int, columns: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self._seed, bucket, at)) & 0x7FFF_FFFF)
        return torch.randn(columns, self._rank, generator=generator)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """An orthonormal base of the columns, in float32; columns that depend on earlier ones become zeros.

    Gram-Schmidt in float64, done twice for each column ("twice is enough": Giraud et al., 2005). It uses no LAPACK,
    whose results depend on its threads, so equal inputs give equal bits.
    """
    base = matrix.double()
    for column in range(base.shape[1]):
        vector, before = base[:, column], base[:, :column]
        size = float(vector.norm())
        for _ in range(2):
            vector -= before @ (before.t() @ vector)
        left = float(vector.norm())
        if left <= 1e-6 * size:
            vector.zero_()
        else:
            vector /= left  # NaN stays NaN
    return base.float()


def _revived(factor: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """A column of zeros or of NaN would stay so for ever: it begins anew."""
    sizes = factor.norm(dim=0)
    alive = sizes.isfinite() & (sizes > 0)
    return torch.where(alive, factor, fresh)


def _all_reduce(communicator: Communicator, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sums of several tensors by one collective."""
    if not tensors:
        return []
    total = communicator.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    pieces = total.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _flat(bucket: torch.Tensor, part: BucketPart) -> torch.Tensor:
    return bucket[part.start : part.start + math.prod(part.shape)]


def _matrix(bucket: torch.Tensor, part: BucketPart) -> torch.Tensor:
    return _flat(bucket, part).view(part.shape[0], -1)


_LEVELS = 127


class Int8Compression(ErrorFeedback):
    """Quantises each chunk to 255 levels of its largest magnitude.

    Each rank owns a slice: it gets that slice from all ranks, sums in rank order, quantises the sum and sends it to
    all. All decode the same bytes, so bits are identical. The sender owes the loss of the first rounding, the owner
    that of the second. ``chunk_elements``: elements that share a scale (4 bytes).
    """

    name = "int8"

    def __init__(self, chunk_elements: int = 1024) -> None:
        super().__init__()
        if chunk_elements < 1:
            raise ConfigurationError(f"expected chunk_elements of at least 1, got {chunk_elements}")
        self._chunk = chunk_elements

    def reduce(self, bucket: FullBucket, communicator: Communicator) -> None:
        owed = self.owed(bucket)
        slices = cut(owed.numel(), communicator.size)
        sent = [self.encode(owed[start:stop]) for start, stop in slices]
        for (start, stop), message in zip(slices, sent, strict=True):
            owed[start:stop] -= self.decode(message, stop - start)
        start, stop = slices[communicator.rank]
        total = torch.zeros(stop - start)
        for message in communicator.all_to_all(sent):
            total += self.decode(message, stop - start)
        mine = self.encode(total)
        owed[start:stop] += total - self.decode(mine, stop - start)
        for (start, stop), message in zip(slices, communicator.all_gather(mine), strict=True):
            bucket.result[start:stop] = self.decode(message, stop - start)
        self.keep(bucket, owed)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Flat float32 as bytes: the scales, then one byte for each element. NaN or Inf makes its whole chunk NaN."""
        num_chunks = -(-values.numel() // self._chunk)
        padded = torch.nn.functional.pad(values, (0, num_chunks * self._chunk - values.numel())).view(
            num_chunks, self._chunk
        )
        scales = padded.abs().amax(1) / _LEVELS if num_chunks else padded.new_empty(0)
        steps = (padded / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)).round_().nan_to_num_(0.0)
        scales.masked_fill_(~scales.isfinite(), torch.nan)
        levels = steps.clamp_(-_LEVELS, _LEVELS).to(torch.int8).view(-1)[: values.numel()]
        return torch.cat([scales.view(torch.uint8), levels.view(torch.uint8)])

    def decode(self, message: torch.Tensor, num_elements: int) -> torch.Tensor:
        """The ``num_elements`` values that :meth:`encode` made the bytes of."""
        num_chunks = -(-num_elements // self._chunk)
        scales, levels = message[: 4 * num_chunks].view(torch.float32), message[4 * num_chunks :].view(torch.int8)
        values = torch.zeros(num_chunks * self._chunk)
        values[:num_elements] = levels
        return values.view(num_chunks, self._chunk).mul_(scales.unsqueeze(1)).view(-1)[:num_elements]


_COMPRESSIONS: dict[str, Callable[..., GradientCompression]] = {
    "bf16": functools.partial(CastCompression, "bf16", torch.bfloat16),
    "fp16": functools.partial(CastCompression, "fp16", torch.float16),
    "int8": Int8Compression,
    "powersgd": PowerSGDCompression,
    "topk": TopKCompression,
}


def compression_named(name: str) -> GradientCompression:
    """A new compression: bf16, fp16, int8, powersgd or topk. Raises ConfigurationError: no such compression."""
    refuse_unknown("compression", [name], _COMPRESSIONS)
    return _COMPRESSIONS[name]()
