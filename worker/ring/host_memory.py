"""Memory shared by the ranks of one host: arenas, in which tensors are reduced in place, and scratch for all others.

The others pass through two slots in every rank's scratch segment, used in turn. A *round* is: write into the own slot,
exchange signals, read the peers' slots. The next round uses the other slot. One exchange for each round is enough,
across collectives too, as long as every rank goes through the same rounds:

    A rank writes slot s for round k+2 after it has everybody's signal of round k+1. Everybody sent that signal after
    it had read round k, which was the last to use slot s. So nobody reads what is being overwritten.

Exchanges that belong to no round (those of :mod:`stratagem.worker.ring.host_group` around memory of an arena) only add
more order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch

from stratagem.worker.ring.group import Arena

_RESULT_SHIFT_BYTES = 1024
"""Source and result of an arena do not start at the same place of a page: a store would wait for loads 4 KiB away."""
_PAGE_BYTES = 4096

ArenaStep = tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]
"""One chunk: the ranks' sources, where the reduction goes, and the other places that get a copy of it."""


@dataclasses.dataclass(frozen=True)
class _Shared:
    """The shared memory behind an arena."""

    segments: Sequence[torch.Tensor]
    """Every rank's, flat uint8: the source, and from ``result_start`` on the result; 0: it is the source."""
    address: int
    """Where the own one is mapped."""
    num_bytes: int
    result_start: int


class HostArenas:
    """The arenas of a group; the first has the number 1, and 0 means none of them."""

    def __init__(self) -> None:
        self._arenas: dict[int, _Shared] = {}
        self._num_made = 0

    def make(
        self,
        num_bytes: int,
        in_place: bool,
        share: Callable[[int], Sequence[torch.Tensor]],
        rank: int,
        freed: Callable[[], None],
    ) -> Arena:
        """One more. ``share`` gives segments of that many bytes, flat uint8, one for each rank; ``freed`` is called
        when the arena is, from any thread."""
        shift = 0 if in_place else -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES + _RESULT_SHIFT_BYTES
        segments = share(shift + num_bytes)
        own = segments[rank]
        self._num_made += 1
        number = self._num_made
        self._arenas[number] = _Shared(segments, own.data_ptr(), own.numel(), shift)

        def free() -> None:
            self._arenas.pop(number, None)
            freed()

        with torch.inference_mode(False):
            return Arena(own[:num_bytes], own[shift : shift + num_bytes], free)

    def place(self, source: torch.Tensor, out: torch.Tensor | None) -> tuple[int, int, int]:
        """Arena and offsets in bytes of source and result in its segment.

        A rank without a result expects it where an arena has it: at the source's offset.
        """
        num_bytes = source.numel() * source.itemsize
        pointer = source.data_ptr()
        for number, shared in list(self._arenas.items()):
            start = pointer - shared.address
            if 0 <= start < shared.num_bytes:
                result = start + shared.result_start if out is None else out.data_ptr() - shared.address
                if 0 <= result <= shared.num_bytes - num_bytes:
                    return number, start, result
        return 0, 0, 0

    def place_of_all(self, outs: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Arena and offset of tensors that lie there one behind the other."""
        ends = [out.data_ptr() + out.nbytes for out in outs]
        arena, start, last = self.place(outs[0], outs[-1])
        follow = all(end == out.data_ptr() for end, out in zip(ends, outs[1:], strict=False))
        return (arena, start) if arena and follow and last >= start else (0, 0)

    def steps(
        self,
        arena: int,
        starts: tuple[int, int],
        num_bytes: int,
        chunk: int,
        dtype: torch.dtype,
        owners: tuple[int, Sequence[int]],
        private: torch.Tensor | None,
    ) -> list[ArenaStep]:
        """A rank's slice in chunks, as views of all ranks' segments. ``starts``: where it begins in bytes, as source
        and as result; ``num_bytes``: its length; ``chunk``: elements; ``owners``: whose result is reduced into, and who
        gets one; ``private``: is reduced into instead."""

        def chunks(segment: torch.Tensor, start: int) -> Sequence[torch.Tensor]:
            with torch.inference_mode(False):
                return segment[start : start + num_bytes].view(dtype).split(chunk) if num_bytes > 0 else ()

        first, targets = owners
        segments = self._arenas[arena].segments
        sources = zip(*(chunks(segment, starts[0]) for segment in segments), strict=True)
        results = zip(*(chunks(segments[rank], starts[1]) for rank in targets), strict=True)
        own = list(targets).index(first)
        steps: list[ArenaStep] = []
        for parts, places in zip(sources, results, strict=True):
            if private is not None:
                steps.append((list(parts), private[: parts[0].numel()], list(places)))
            else:
                steps.append((list(parts), places[own], [*places[:own], *places[own + 1 :]]))
        return steps

    def at(self, arena: int, start: int, like: torch.Tensor) -> list[torch.Tensor]:
        """What every rank has at an offset, in the dtype and length of a flat tensor."""
        stop = start + like.numel() * like.itemsize
        with torch.inference_mode(False):  # a view made in that mode could not be written outside of it
            return [segment[start:stop].view(like.dtype) for segment in self._arenas[arena].segments]

    def clear(self) -> None:
        """Lets go of the memory; it is unmapped when the last tensor in it goes."""
        self._arenas.clear()


ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every element's size."""
_NUM_CACHED_VIEWS = 1024


class Scratch:
    """The two slots of every rank. ``segments``: flat uint8, one for each rank, of equal length."""

    def __init__(self, segments: Sequence[torch.Tensor]) -> None:
        self.slot_bytes = segments[0].numel() // 2 // ALIGNMENT * ALIGNMENT
        self._segments = list(segments)
        self._slot = 0
        self._views = functools.lru_cache(_NUM_CACHED_VIEWS)(self._make_view)
        self._rows = functools.lru_cache(_NUM_CACHED_VIEWS)(self._make_row)

    def next_round(self) -> None:
        """From now on the other slot is the one that is written and read."""
        self._slot = 1 - self._slot

    def part_elements(self, num_parts: int, dtype: torch.dtype) -> int:
        """How many elements each of so many equal parts of a slot has room for; the parts are aligned."""
        return self.slot_bytes // num_parts // ALIGNMENT * ALIGNMENT // dtype.itemsize

    def view(self, rank: int, start: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A range of a rank's slot, from its ``start``-th element on; fastest where that is aligned."""
        return self._views(self._slot, rank, start, num_elements, dtype)

    def row(self, num_elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The start of every rank's slot, in rank order."""
        return self._rows(self._slot, num_elements, dtype)

    def close(self) -> None:
        self._segments.clear()
        self._views.cache_clear()
        self._rows.cache_clear()

    def _make_view(self, slot: int, rank: int, start: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        first = slot * self.slot_bytes + start * dtype.itemsize
        with torch.inference_mode(False):  # a view made in that mode could not be written outside of it
            return self._segments[rank][first : first + num_elements * dtype.itemsize].view(dtype)

    def _make_row(self, slot: int, num_elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [self._make_view(slot, rank, 0, num_elements, dtype) for rank in range(len(self._segments))]
