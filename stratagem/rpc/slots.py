"""Slots of shared memory: taken, shown to peers, and free again when no process holds them."""

from __future__ import annotations

import dataclasses
import threading
import weakref

import torch

from stratagem.rpc.segment import Segment

SEGMENT_BYTES = 8 << 20
"""Or the size of a slot that is larger: so much of a pool lies idle at most."""
MIN_SLOT_BYTES = 64 << 10


@dataclasses.dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class ShmBlock:
    """A piece of a segment. It returns to its pool when the last reference to this object goes."""

    number: int
    """Of the slot, in its pool."""
    segment: int
    """Number of its segment."""
    at: int
    """First byte in the segment."""
    size: int
    """Bytes."""
    memory: torch.Tensor
    """Those bytes, flat uint8."""
    is_borrowed: bool = False
    """Whether the pool is the receiver's."""
    num_readers: int = 0
    """Peers that were shown it and have not let go of it."""


def slot_bytes(num_bytes: int) -> int:
    """Size of a slot for so many bytes."""
    return max(MIN_SLOT_BYTES, 1 << (num_bytes - 1).bit_length())


class SlotPool:
    """Segments, cut into slots of powers of two. Thread-safe."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._guard = threading.RLock()  # a slot may be given back by the garbage collector at any point
        self._carved = 0
        self._places: list[tuple[int, int, int]] = []
        """(segment, first byte, size) of every slot."""
        self._free: dict[int, list[int]] = {}
        self._closed = False

    def take(self, num_bytes: int) -> ShmBlock:
        """A slot of at least ``num_bytes``, with whatever is in it. SegmentError: there is no memory for another
        segment."""
        size = slot_bytes(num_bytes)
        with self._guard:
            if not self._free.get(size):
                self._carve(size)
            number = self._free[size].pop()
            segment, at, _ = self._places[number]
            slot = ShmBlock(number, segment, at, size, self.segments[segment].tensor[at : at + size])
        weakref.finalize(slot, self._give_back, number, size).atexit = False
        return slot

    def show(self, slot: ShmBlock, num_more: int) -> int:
        """So many more peers look at a slot, or fewer. Returns by how many bytes the memory that any looks at grows."""
        with self._guard:
            before = slot.num_readers > 0
            slot.num_readers += num_more
            return ((slot.num_readers > 0) - before) * slot.size

    def close(self) -> None:
        """Lets go of the memory; what peers have mapped stays theirs until they let go too."""
        with self._guard:
            self._closed = True
            self._free.clear()
            for segment in self.segments:
                segment.close()

    def _carve(self, size: int) -> None:
        if not self.segments or self._carved + size > self.segments[-1].tensor.numel():
            self.segments.append(Segment.create(max(SEGMENT_BYTES, size)))
            self._carved = 0
        self._places.append((len(self.segments) - 1, self._carved, size))
        self._free.setdefault(size, []).append(len(self._places) - 1)
        self._carved += size

    def _give_back(self, number: int, size: int) -> None:
        with self._guard:
            if not self._closed:
                self._free[size].append(number)
