"""Top-k: each rank sends the largest elements of a bucket, and owes the rest."""

from __future__ import annotations

import torch

from stratagem.errors import ConfigurationError
from stratagem.worker.reduction.compress_interface import ErrorFeedback, FullBucket
from stratagem.worker.ring.communicator import Communicator


class TopKCompression(ErrorFeedback):
    """Indices and values of the elements of largest magnitude; all ranks add up all of them in rank order.

    Source: Stich, Cordonnier, Jaggi: "Sparsified SGD with Memory", 2018.

    Args:
        ratio: part of a bucket that is sent, above 0, at most 1. Each element sent costs 8 bytes to every other rank.
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
        self.residuals.put(bucket.index, owed)
