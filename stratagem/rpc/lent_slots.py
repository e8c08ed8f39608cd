"""Slots that a receiver lends its senders, from one pool: the memory of large frames, however many senders there are.

A sender requests one; the answer comes in the order of its frames, so a receiver that reads them slowly lends slowly. A
slot is lent once: it returns with the frame in it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from stratagem.errors import FrameError, LimitError
from stratagem.rpc.segment import Segment
from stratagem.rpc.slots import ShmBlock, SlotPool

RELEASE = struct.Struct("<I")
"""What a receiver says on the socket of a shm lane: it has let go of this slot, or what follows here."""
LENT_SEGMENT, LENT_SLOT = (1 << 32) - 1, (1 << 32) - 2
"""Instead of the number of a slot that a receiver lets go of: a segment follows, with its descriptor, or a slot."""
LENT = struct.Struct("<IIQQ")
"""Number of the segment and of the slot, first byte and bytes."""
Said = tuple[bytes, Segment | None]
"""What a receiver says to its sender, and the segment whose descriptor goes with it."""


class Lender:
    """The lending side of one receiver. ``keeps``: whether a sender, rather than the pool, gets a slot when its frame
    is done with; ``max_bytes``: limit of one sender; asked when it matters."""

    def __init__(self, pool: SlotPool, keeps: Callable[[], bool], max_bytes: Callable[[], int]) -> None:
        self._pool = pool
        self._keeps = keeps
        self._max_bytes = max_bytes
        self._lent: dict[int, ShmBlock] = {}
        self._num_announced = 0
        self._closed = False

    def lend(self, num_bytes: int) -> list[Said]:
        """The sender asks for a slot. Returns what is to be said to it. LimitError: it has too many. SegmentError:
        there is no memory."""
        lent_bytes = sum([slot.size for slot in [*self._lent.values()]])
        if lent_bytes + num_bytes > (limit := self._max_bytes()):
            raise LimitError(f"{lent_bytes:,} bytes are lent and not used, over max_peer_bytes of {limit:,}")
        slot = self._pool.take(num_bytes)
        said: list[Said] = []
        while self._num_announced <= slot.segment:
            segment = self._pool.segments[self._num_announced]
            said.append((_words(LENT_SEGMENT, self._num_announced, 0, 0, segment.tensor.numel()), segment))
            self._num_announced += 1
        return [*said, self._hand_out(slot)]

    def take_back(self, number: int) -> ShmBlock:
        """A frame has come in a slot; ``FrameError`` where that is not lent."""
        slot = self._lent.pop(number, None)
        if slot is None:
            raise FrameError(f"a frame came in slot {number}, which is not lent")
        return slot

    def done(self, slot: ShmBlock) -> list[Said]:
        """Nobody looks at the frame any more. Returns what is to be said to the sender."""
        return [self._hand_out(slot)] if not self._closed and self._keeps() else []

    def close(self) -> None:
        """The sender is gone: what it has is the pool's."""
        self._closed = True
        self._lent.clear()

    def _hand_out(self, slot: ShmBlock) -> Said:
        self._lent[slot.number] = slot
        return _words(LENT_SLOT, slot.segment, slot.number, slot.at, slot.size), None


def _words(what: int, *lent: int) -> bytes:
    return RELEASE.pack(what) + LENT.pack(*lent)


class Borrowed:
    """The slots lent by a receiver, at its sender."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._free: dict[int, list[ShmBlock]] = {}
        self._asked: set[int] = set()
        """Sizes that one was asked for and has not come."""

    def share(self, descriptor: int, number: int, num_bytes: int) -> None:
        """A segment came; ``SegmentError`` where it cannot be used."""
        segment = Segment.attach(descriptor, num_bytes)
        if number != len(self._segments):
            raise ConnectionError(f"the peer shares segment {number} after {len(self._segments)}")
        self._segments.append(segment)

    def came(self, segment: int, number: int, at: int, size: int) -> None:
        if segment >= len(self._segments) or at + size > self._segments[segment].tensor.numel():
            raise ConnectionError(f"the peer lends slot {number}, which lies outside of the memory it shares")
        memory = self._segments[segment].tensor[at : at + size]
        self._free.setdefault(size, []).append(ShmBlock(number, segment, at, size, memory, is_borrowed=True))
        self._asked.discard(size)

    def take(self, size: int) -> ShmBlock | None:
        """One of this size; None: it has to be asked for."""
        free = self._free.get(size)
        return free.pop() if free else None

    def must_ask(self, size: int) -> bool:
        """Whether there is none, and none was asked for; it is now."""
        if self._free.get(size) or size in self._asked:
            return False
        self._asked.add(size)
        return True

    def close(self) -> None:
        self._free.clear()
        for segment in self._segments:
            segment.close()
