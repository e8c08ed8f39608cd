"""Compression to 8 bits with error feedback: a quarter of the bytes."""

from __future__ import annotations

import torch

from stratagem.errors import ConfigurationError
from stratagem.worker.reduction.compress_interface import ErrorFeedback, FullBucket
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.schedule import cut

LEVELS = 127


class Int8Compression(ErrorFeedback):
    """Quantises each chunk to 255 levels of its largest magnitude.

    Each rank owns a slice: it gets that slice of everybody, sums in rank order, quantises the sum and gives it to all.
    All decode the same bytes, so bits are identical. The sender owes what the first rounding lost, the owner what the
    second did.

    Args:
        chunk_elements: elements that share a scale (4 bytes).
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
        self.residuals.put(bucket.index, owed)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Flat float32 as bytes: the scales, then one byte for each element. NaN or Inf makes its whole chunk NaN."""
        num_chunks = -(-values.numel() // self._chunk)
        padded = torch.nn.functional.pad(values, (0, num_chunks * self._chunk - values.numel())).view(
            num_chunks, self._chunk
        )
        scales = padded.abs().amax(1) / LEVELS if num_chunks else padded.new_empty(0)
        steps = (padded / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)).round_().nan_to_num_(0.0)
        scales.masked_fill_(~scales.isfinite(), torch.nan)
        levels = steps.clamp_(-LEVELS, LEVELS).to(torch.int8).view(-1)[: values.numel()]
        return torch.cat([scales.view(torch.uint8), levels.view(torch.uint8)])

    def decode(self, message: torch.Tensor, num_elements: int) -> torch.Tensor:
        """The ``num_elements`` values that :meth:`encode` made the bytes of."""
        num_chunks = -(-num_elements // self._chunk)
        scales, levels = message[: 4 * num_chunks].view(torch.float32), message[4 * num_chunks :].view(torch.int8)
        values = torch.zeros(num_chunks * self._chunk)
        values[:num_elements] = levels
        return values.view(num_chunks, self._chunk).mul_(scales.unsqueeze(1)).view(-1)[:num_elements]
