"""Memory that a script takes from a process group, in which the group copies less."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Iterator

import torch

_NUM_BLOCKS = 3
"""Of one size: FSDP2 holds a gathered layer, the next one and gradients that are being reduced."""
MIN_BYTES = 256 << 10
"""Smaller tensors are torch's own: what passes through the scratch memory in one round is as fast."""


class CommMemory:
    """Tensors in arenas of a group.

    The first tensors of a size make blocks, which is collective; later ones take these in turn. So ranks that ask for
    the same sizes in the same order have their tensors at the same places, whenever each of them frees its own. Who
    finds the block in use gets memory of torch's, and that collective copies on every rank. ``arena`` makes shared
    memory of so many bytes, flat uint8; collective.
    """

    def __init__(self, arena: Callable[[int], torch.Tensor]) -> None:
        self._arena = arena
        self._blocks: dict[int, list[torch.Tensor]] = {}
        self._turns: dict[int, Iterator[int]] = {}
        self._used: set[int] = set()

    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor, not filled. Its memory is used again when the last view of it is gone."""
        num_bytes = num_elements * dtype.itemsize
        if num_bytes < MIN_BYTES:
            return torch.empty(num_elements, dtype=dtype)
        blocks = self._blocks.setdefault(num_bytes, [])
        turn = next(self._turns.setdefault(num_bytes, itertools.cycle(range(_NUM_BLOCKS))))
        if turn == len(blocks):
            blocks.append(self._arena(num_bytes))
        address = blocks[turn].data_ptr()
        if address in self._used:
            return torch.empty(num_elements, dtype=dtype)
        self._used.add(address)
        # A tensor of a buffer keeps the buffer's object, which says when the last view has gone.
        buffer = (ctypes.c_char * num_bytes).from_address(address)
        weakref.finalize(buffer, _free, self._used, address, blocks[turn]).atexit = False
        with torch.inference_mode(False):
            return torch.frombuffer(buffer, dtype=dtype)


def _free(used: set[int], address: int, _: torch.Tensor) -> None:
    """The memory itself is mapped until now. All else of the group may go before: its error may hold the buffer."""
    used.discard(address)
