"""Collectives of ranks on one host, through shared memory.

Every rank has segments that all peers map; besides there are signals of 40 bytes
(:mod:`stratagem.worker.ring.host_signals`). Three ways, chosen alike on every rank by size and place:

*Short* tensors (:data:`_SHORT_BYTES`) take one round through the scratch memory: each rank writes its values, one
exchange, each rank reads what it needs of all; an all-reduce is made by each for itself.

*In an arena* nothing is copied. Each rank owns one slice (:func:`~stratagem.worker.ring.schedule.cut`). It reduces the
ranks' slices straight from their sources and writes the values into every rank's result: the writers' ranges are
disjoint, and no source changes. Two exchanges suffice, *ready* before and *done* after:

- A rank says *ready* when its source is complete and nobody needs what its result holds. Owners read and write only
  after everybody's *ready*.
- An owner says *done* when it has written its slice everywhere. A rank returns after everybody's *done*: its result is
  complete, and nobody reads its source any more, so the caller may change both.
- A fast rank that goes on to the next collective says *ready* and waits. It touches no memory of a slow rank before
  the slow one has said *ready* too, that is, has left the last collective. So no third exchange is needed.

With ``out`` equal to ``source`` an owner writes what only it reads. A reduce-scatter whose source, and an all-gather or
a broadcast whose result lies in an arena read what they need there, between the same two exchanges.

*Anything else* passes through the scratch memory in pieces (:mod:`stratagem.worker.ring.host_memory` argues why
one exchange a piece suffices). Round k of an all-reduce carries piece k of the sources and the sums of piece k-1.
"""

from __future__ import annotations

import functools
import itertools
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.worker.ring import host_cells
from stratagem.worker.ring.group import HOST, Arena, Reduction, Tag, empty
from stratagem.worker.ring.host_memory import ArenaStep, HostArenas, Scratch
from stratagem.worker.ring.host_signals import LONGEST_WAIT_S, Signals
from stratagem.worker.ring.schedule import cut

_SHORT_BYTES = 256 << 10
"""All ranks' values together, up to which every rank reduces them all: one exchange instead of two."""
_COPIED_BYTES = 1 << 20
"""The same, of an all-reduce of what lies in no arena, and is copied anyhow."""
_CHUNK_BYTES = 256 << 10
"""What an owner reduces and spreads at once: stays in the L2 cache between the two."""
_SLOT_BYTES = 3 << 20
"""One of the two slots of a rank's scratch memory."""
_NUM_CACHED_PLANS = 128


class HostGroup:
    """Implements :class:`stratagem.worker.ring.group.Group` for the ranks of one host. Making one is collective, too.

    Args:
        links: a connected, authenticated AF_UNIX stream socket to every other rank; the group closes them.
        timeout_s: seconds a peer may stand still.

    Raises:
        SegmentError: on every rank, when one has no memory to share; the links are closed.
        CollectiveError: a peer is gone or stands still.
    """

    name = "shm"

    device = HOST

    def __init__(self, rank: int, size: int, links: Mapping[int, socket.socket], *, timeout_s: float) -> None:
        if sorted(links) != [peer for peer in range(size) if peer != rank]:
            raise ValueError(f"expected links to all {size} ranks but {rank}, got {sorted(links)}")
        self.rank = rank
        self.size = size
        self._signals = Signals(rank, links, timeout_s)
        self._arenas = HostArenas()
        self._reductions = functools.lru_cache(_NUM_CACHED_PLANS)(
            lambda op, dtype, max_elements: Reduction(op, dtype, size, max_elements)
        )
        self._plans = functools.lru_cache(_NUM_CACHED_PLANS)(self._make_plan)
        try:
            with self._signals.collective(Tag(0, 0)):
                shared = self._signals.share(2 * _SLOT_BYTES + host_cells.NUM_BYTES)
                self._scratch = Scratch([segment[: 2 * _SLOT_BYTES] for segment in shared])
                self._signals.use_cells([segment[2 * _SLOT_BYTES :] for segment in shared])
        except BaseException:
            self._signals.close("the group could not be set up")
            raise

    @property
    def timeout_s(self) -> float:
        return self._signals.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._signals.timeout_s = min(seconds, LONGEST_WAIT_S)

    def arena(self, num_bytes: int, tag: Tag, in_place: bool = False) -> Arena:
        """See :meth:`Group.arena`. Raises SegmentError: on every rank, when one has no memory to share; the group goes
        on working."""
        with self._signals.collective(tag) as signals:
            return self._arenas.make(num_bytes, in_place, signals.share, self.rank, self._plans.cache_clear)

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, op: ReduceOp, tag: Tag) -> None:
        with self._signals.collective(tag):
            self._reduce(source, out, op, None)

    def reduce(self, source: torch.Tensor, out: torch.Tensor | None, root: int, op: ReduceOp, tag: Tag) -> None:
        """``out`` of rank ``root`` = op over ranks of ``source``. The other ranks give None as ``out``."""
        if (out is None) == (root == self.rank):
            raise ValueError(f"expected out on rank {root} and nowhere else, got {type(out).__name__} on {self.rank}")
        with self._signals.collective(tag):
            self._reduce(source, out, op, root)

    def reduce_scatter(self, source: torch.Tensor, out: torch.Tensor, op: ReduceOp, tag: Tag) -> None:
        with self._signals.collective(tag) as signals:
            if 4 * source.nbytes * self.size <= _SHORT_BYTES:  # more would be copied than calls are saved
                self._show(source)
                start, stop = cut(source.numel(), self.size)[self.rank]
                self._reduction(op, source)(self._staged(1, start, stop - start, source.dtype), out)
                return
            part = self._scratch.part_elements(self.size, source.dtype)
            slices = [source[start:stop] for start, stop in cut(source.numel(), self.size)]
            reduction = self._reductions(op, source.dtype, part)
            is_inside = out.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            arena = start = 0
            if slices[0].numel() > part and not is_inside:
                arena, start, _ = self._arenas.place(source, source)
            if self._all_are_at(arena, start, start):
                start += slices[self.rank].data_ptr() - source.data_ptr()
                chunk = min(part, _CHUNK_BYTES // out.itemsize)
                views = [view.split(chunk) for view in self._arenas.at(arena, start, out)]
                for into, *parts in zip(out.split(chunk), *views, strict=True):
                    reduction(parts, into)
                signals.exchange(False)
                return
            stages_own = self.rank >= 2 and is_inside  # a reduction may be written over its first two sources only

            def write(k: int) -> None:
                for rank, piece in enumerate(slices):
                    if rank != self.rank or stages_own:
                        self._stage(rank, part, piece[k * part : (k + 1) * part])

            def read(k: int) -> None:
                into = out[k * part : (k + 1) * part]
                parts = self._staged(self.rank, part, into.numel(), source.dtype)
                if not stages_own:
                    parts[self.rank] = slices[self.rank][k * part : (k + 1) * part]
                reduction(parts, into)

            self._rounds(-(-slices[0].numel() // part), write, read)

    def all_gather(self, source: torch.Tensor, outs: Sequence[torch.Tensor], tag: Tag) -> None:
        with self._signals.collective(tag) as signals:
            if sum(out.nbytes for out in outs) <= _SHORT_BYTES:
                self._show(source)
                if outs[self.rank].data_ptr() != source.data_ptr():  # before what comes lies where it is
                    outs[self.rank].copy_(source)
                for rank, out in enumerate(outs):
                    if rank != self.rank:
                        self._fetch(rank, 0, 0, out)
                return
            part = self._scratch.part_elements(1, source.dtype)
            arena, start = self._arenas.place_of_all(outs) if min(out.numel() for out in outs) > part else (0, 0)
            if arena and outs[self.rank].data_ptr() != source.data_ptr():
                outs[self.rank].copy_(source)
            if self._all_are_at(arena, start, start):
                for rank, out in enumerate(outs):
                    if rank != self.rank:
                        out.copy_(self._arenas.at(arena, start, out)[rank])
                    start += out.nbytes
                signals.exchange(False)
                return

            def write(k: int) -> None:
                self._stage(0, part, source[k * part : (k + 1) * part])

            def read(k: int) -> None:
                for rank, out in self._others(source, outs, k, part):
                    self._fetch(rank, 0, part, out[k * part : (k + 1) * part])

            self._rounds(-(-max(out.numel() for out in outs) // part), write, read)

    def broadcast(self, buffer: torch.Tensor, root: int, tag: Tag) -> None:
        """See :meth:`Group.broadcast`. A buffer at the same place of an arena on every rank is read where it is."""
        with self._signals.collective(tag) as signals:
            part = self._scratch.part_elements(1, buffer.dtype)
            arena, start, _ = self._arenas.place(buffer, buffer) if buffer.numel() > part else (0, 0, 0)
            if self._all_are_at(arena, start, start):
                if self.rank != root:
                    buffer.copy_(self._arenas.at(arena, start, buffer)[root])
                signals.exchange(False)
                return

            def write(k: int) -> None:
                if self.rank == root:
                    self._stage(0, part, buffer[k * part : (k + 1) * part])

            def read(k: int) -> None:
                if self.rank != root:
                    self._fetch(root, 0, part, buffer[k * part : (k + 1) * part])

            self._rounds(-(-buffer.numel() // part), write, read)

    def all_to_all(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], tag: Tag) -> None:
        with self._signals.collective(tag):
            part = self._scratch.part_elements(self.size, sources[0].dtype)

            def write(k: int) -> None:
                for rank, source in enumerate(sources):
                    if rank != self.rank:
                        self._stage(rank, part, source[k * part : (k + 1) * part])

            def read(k: int) -> None:
                for rank, out in self._others(sources[self.rank], outs, k, part):
                    self._fetch(rank, self.rank, part, out[k * part : (k + 1) * part])

            self._rounds(-(-max(source.numel() for source in sources) // part), write, read, agree=True)

    def barrier(self, tag: Tag) -> None:
        with self._signals.collective(tag) as signals:
            signals.exchange(False)

    def waiting_on(self) -> int | None:
        return self._signals.waiting_on

    def close(self, reason: str) -> None:
        """See :meth:`Group.close`. An arena's memory is unmapped when the last tensor in it goes."""
        self._signals.close(reason)
        self._scratch.close()
        self._arenas.clear()
        self._plans.cache_clear()
        self._reductions.cache_clear()

    # -- three ways to reduce -----------------------------------------------------------------------------------

    def _reduce(self, source: torch.Tensor, out: torch.Tensor | None, op: ReduceOp, root: int | None) -> None:
        if self.size == 1 and out is not None:
            out.copy_(source)
            return
        if source.nbytes * self.size <= _SHORT_BYTES:
            self._reduce_short(source, out, op)
            return
        arena, start, result = self._arenas.place(source, out)
        if self._all_are_at(arena, start, result):
            reduction = self._reductions(op, source.dtype, _CHUNK_BYTES // source.itemsize)
            for sources, into, copies in self._plans(arena, start, result, source.numel(), source.dtype, op, root):
                reduction(sources, into)
                for copy in copies:
                    copy.copy_(into)
            self._signals.exchange(False)
            return
        if source.nbytes * self.size <= _COPIED_BYTES:
            self._reduce_short(source, out, op)
        else:
            self._reduce_in_pieces(source, out, op, root)

    def _all_are_at(self, arena: int, start: int, result: int) -> bool:
        """Whether all ranks have their tensors at the same place of an arena, and are ready."""
        if not arena:
            return False
        is_there = self._signals.exchange(True, arena, start, result)
        if not is_there:  # the others have their tensors elsewhere, and this was their first round
            self._scratch.next_round()
        return is_there

    def _reduce_short(self, source: torch.Tensor, out: torch.Tensor | None, op: ReduceOp) -> None:
        """Every rank reduces everything for itself; in rank order, so that bits are equal."""
        row = self._show(source)
        if out is not None:
            self._reduction(op, source)(row, out)

    def _reduction(self, op: ReduceOp, source: torch.Tensor) -> Reduction:
        """Of short tensors."""
        return self._reductions(op, source.dtype, _COPIED_BYTES // self.size // source.itemsize)

    def _show(self, values: torch.Tensor) -> list[torch.Tensor]:
        """One round after which every rank's slot begins with its values; as many of them of each."""
        self._scratch.next_round()
        row = self._scratch.row(values.numel(), values.dtype)
        row[self.rank].copy_(values)
        # Or else a rank has its tensors in an arena and has written nothing yet.
        return row if self._signals.exchange(False) else self._show(values)

    def _make_plan(
        self, arena: int, start: int, result: int, num_elements: int, dtype: torch.dtype, op: ReduceOp, root: int | None
    ) -> list[ArenaStep]:
        first, last = (element * dtype.itemsize for element in cut(num_elements, self.size)[self.rank])
        chunk = _CHUNK_BYTES // dtype.itemsize
        # In place, the own result may be a source that is still to come.
        aside = start == result and self.rank >= 2 and not self._reductions(op, dtype, chunk).wide
        private = empty(chunk, dtype) if aside else None
        owners = (self.rank, range(self.size)) if root is None else (root, [root])
        return self._arenas.steps(arena, (start + first, result + first), last - first, chunk, dtype, owners, private)

    def _reduce_in_pieces(self, source: torch.Tensor, out: torch.Tensor | None, op: ReduceOp, root: int | None) -> None:
        """Round k: writes piece k of the source, and the own slice of the reduced piece k-1; reads both from peers."""
        size, rank, dtype = self.size, self.rank, source.dtype
        part = self._scratch.part_elements(size + 1, dtype)
        num_pieces = -(-source.numel() // (part * size))
        reduction = self._reductions(op, dtype, part)
        private: torch.Tensor | None = None
        if out is None or (rank >= 2 and not reduction.wide and out.data_ptr() == source.data_ptr()):
            private = empty(part, dtype)  # nowhere to sum, or only where a source still to come is
        reduced = source[:0]

        def slices(k: int) -> list[tuple[int, int]]:
            begin = k * part * size
            parts = cut(min(source.numel() - begin, part * size), size)
            return [(begin + start, begin + stop) for start, stop in parts]

        def write(k: int) -> None:
            if k > 0 and root != rank:
                self._stage(size, part, reduced)
            if k < num_pieces:
                for peer, (start, stop) in enumerate(slices(k)):
                    if peer != rank:
                        self._stage(peer, part, source[start:stop])

        def read(k: int) -> None:
            nonlocal reduced
            if k > 0 and out is not None:
                for peer, (start, stop) in enumerate(slices(k - 1)):
                    if peer != rank:
                        self._fetch(peer, size, part, out[start:stop])
            if k < num_pieces:
                start, stop = slices(k)[rank]
                parts = self._staged(rank, part, stop - start, dtype)
                parts[rank] = source[start:stop]
                if private is not None:
                    reduced = private[: stop - start]
                elif out is not None:
                    reduced = out[start:stop]
                reduction(parts, reduced)
                if private is not None and out is not None:
                    out[start:stop].copy_(reduced)

        self._rounds(num_pieces + 1, write, read)

    # -- rounds through the scratch memory --------------------------------------------------------------------

    def _rounds(
        self, count: int, write: Callable[[int], None], read: Callable[[int], None], agree: bool = False
    ) -> None:
        """Writes to the own slot, exchanges, reads the peers' slots; as often as said, at least once. Ranks may ask for
        different counts (``agree``): the largest is used."""
        for k in itertools.count():
            self._scratch.next_round()
            write(k)
            if not self._signals.exchange(k + 1 < count, 0, count if agree and k == 0 else 0):
                told = self._signals.told.values()
                if agree:
                    count = max(count, *(theirs for _, theirs, _ in told))
                else:  # a rank has its tensors in an arena and has written nothing yet
                    self._scratch.next_round()
                    write(k)
                    self._signals.exchange(k + 1 < count)
            read(k)
            if k + 1 >= count:
                return

    def _stage(self, place: int, part: int, values: torch.Tensor) -> None:
        if values.numel():
            self._scratch.view(self.rank, place * part, values.numel(), values.dtype).copy_(values)

    def _others(self, own: torch.Tensor, outs: Sequence[torch.Tensor], k: int, part: int) -> Iterator[Any]:
        """The peers, each with its result. First a rank keeps what is its own: it may lie where theirs will."""
        if outs[self.rank].data_ptr() != own.data_ptr():
            outs[self.rank][k * part : (k + 1) * part].copy_(own[k * part : (k + 1) * part])
        return ((rank, out) for rank, out in enumerate(outs) if rank != self.rank)

    def _fetch(self, peer: int, place: int, part: int, into: torch.Tensor) -> None:
        if into.numel():
            into.copy_(self._scratch.view(peer, place * part, into.numel(), into.dtype))

    def _staged(self, place: int, part: int, num_elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The same part of every rank's slot."""
        return [self._scratch.view(rank, place * part, num_elements, dtype) for rank in range(self.size)]
