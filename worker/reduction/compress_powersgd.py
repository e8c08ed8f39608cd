"""PowerSGD: gradients of matrices as products of two thin ones, found by one power iteration a step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from stratagem.errors import ConfigurationError
from stratagem.worker.reduction.compress_interface import BucketPart, Committed, ErrorFeedback, FullBucket
from stratagem.worker.ring.communicator import Communicator


class PowerSGDCompression(ErrorFeedback):
    """Low-rank approximation with a warm start and error feedback.

    A gradient is taken as a matrix of its first dimension by the rest. Those of fewer than two dimensions, and those
    whose two factors would not be smaller than they are, travel as they are.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", 2019. There each rank's residual is its gradient minus the mean of all; here it is what this rank's
    own gradient lost. The sum over ranks is the same, so are all results, and a rank without examples owes nothing.

    Args:
        rank: columns of the factors.
        seed: of their first values, equal on all ranks.
    """

    name = "powersgd"

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        super().__init__()
        if rank < 1:
            raise ConfigurationError(f"expected a rank of at least 1, got {rank}")
        self._rank = rank
        self._seed = seed
        self._factors: Committed[list[torch.Tensor]] = Committed()

    def reduce(self, bucket: FullBucket, communicator: Communicator) -> None:
        owed = self.owed(bucket)
        low = [part for part in bucket.parts if self._pays(part.shape)]
        whole = [part for part in bucket.parts if not self._pays(part.shape)]
        matrices = [_matrix(owed, part) for part in low]
        first = [self._first(bucket.index, at, matrix.shape[1]) for at, matrix in enumerate(matrices)]
        warm = self._factors.get(bucket.index, bucket.again, lambda: first)
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
        self.residuals.put(bucket.index, owed)
        self._factors.put(bucket.index, sums)

    def commit(self, buckets: Iterable[int]) -> None:
        stepped = list(buckets)
        super().commit(stepped)
        self._factors.commit(stepped)

    def reset(self) -> None:
        super().reset()
        self._factors.clear()

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
