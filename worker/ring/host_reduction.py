"""The arithmetic of one host's collectives: tensors in rank order become one. No signals, no sockets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.worker.ring.group import REDUCE

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
