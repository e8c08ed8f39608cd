"""A ring of ranks over lanes: each receives from its left neighbour and sends to its right one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError
from stratagem.rpc.lane import ReceivingLane, SendingLane
from stratagem.worker.ring.group import HOST, REDUCE, Arena, Tag
from stratagem.worker.ring.neighbours import Neighbours
from stratagem.worker.ring.schedule import (
    ChunkAction,
    Schedule,
    all_reduce_schedule,
    chunks,
    cut,
    gather_slices,
    reduce_scatter_schedule,
)

SMALL_BYTES = 64 << 10
"""Where all ranks' tensors together are at most this long, everybody gets all of them: half the hops, more bytes."""


class RingGroup(Neighbours):
    """Implements :class:`stratagem.worker.ring.group.Group` over a lane to the right and one from the left.

    All-reduce is reduce-scatter and all-gather, 2(N-1) hops in chunks; small tensors go around whole, N-1 hops. Every
    message carries the collective's tag and the place of its elements, and a message that is not exactly the
    expected one breaks the group. Scratch memory is reused, and grows to the longest tensor: in wire elements with a
    ``wire_dtype``, in the tensor's own for :meth:`reduce_scatter` and :meth:`all_to_all`, one chunk otherwise.

    Args:
        right: see :class:`Neighbours`, as for ``left`` and ``timeout_s``. The group owns the lanes.
        chunk_bytes: largest payload of a message; the same on every rank.
        wire_dtype: float32 tensors travel as bfloat16 or float16, except small ones; partial sums are formed in float32
            and rounded once for each hop. None or float32: as they are.
    """

    device = HOST

    def __init__(
        self,
        rank: int,
        size: int,
        right: SendingLane | None,
        left: ReceivingLane | None,
        *,
        chunk_bytes: int,
        wire_dtype: torch.dtype | None,
        timeout_s: float,
    ) -> None:
        super().__init__(rank, size, right, left, timeout_s)
        self.name = f"ring over {right.name}" if right is not None else "ring of one"
        self.rank = rank
        self.size = size
        self.chunk_bytes = chunk_bytes
        """Every rank may change it, between the same two collectives."""
        self._wire_dtype = wire_dtype
        self._memory: dict[str, torch.Tensor] = {}
        self._scratches: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def arena(self, num_bytes: int, tag: Tag, in_place: bool = False) -> Arena:
        self.check()
        return Arena.of(lambda: torch.zeros(num_bytes, dtype=torch.uint8), in_place)

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, op: ReduceOp, tag: Tag) -> None:
        self.check()
        num_elements = source.numel()
        if self.size == 1 or not num_elements:
            out.copy_(source)
        elif num_elements * source.itemsize * self.size <= SMALL_BYTES:
            self._all_reduce_small(source, out, op, tag)
        else:
            dtype = self._wire(source.dtype)
            held = out if dtype is source.dtype else self._scratch("held", num_elements, dtype)
            steps = all_reduce_schedule(self.size, self.rank, num_elements, self._chunk_elements(dtype))
            self._run(steps, source, held, out, op, tag)
        self.flush(tag)

    def reduce_scatter(self, source: torch.Tensor, out: torch.Tensor, op: ReduceOp, tag: Tag) -> None:
        self.check()
        if self.size == 1:
            out.copy_(source)
            return
        dtype = self._wire(source.dtype)
        held = self._scratch("held", source.numel(), dtype)
        steps = reduce_scatter_schedule(self.size, self.rank, source.numel(), self._chunk_elements(dtype))
        self._run(steps, source, held, held, op, tag)
        self.flush(tag)
        out.copy_(held[slice(*cut(source.numel(), self.size)[self.rank])])

    def all_gather(self, source: torch.Tensor, outs: Sequence[torch.Tensor], tag: Tag) -> None:
        self.check()
        outs[self.rank].copy_(source)
        stops = list(accumulate(out.numel() for out in outs))
        slices = tuple(zip([0, *stops], stops, strict=False))
        for step in gather_slices(slices, self.rank, self._chunk_elements(source.dtype)):
            first = slices[step.slice][0]
            part = outs[step.slice][step.start - first : step.stop - first]
            if step.action is ChunkAction.SEND:
                self.send(part, step.start, tag)
            else:
                self.receive_into(part, step.start, tag)
        self.flush(tag)

    def broadcast(self, buffer: torch.Tensor, root: int, tag: Tag) -> None:
        self.check()
        if self.size == 1:
            return
        for start, stop in chunks(0, buffer.numel(), self._chunk_elements(buffer.dtype)):
            part = buffer[start:stop]
            if self.rank != root:
                self.receive_into(part, start, tag)
            if self.right != root:
                self.send(part, start, tag)
        self.flush(tag)

    def all_to_all(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], tag: Tag) -> None:
        """By rotation: what a rank has for the d-th rank to its right goes d hops, for d = 1 … N-1."""
        self.check()
        outs[self.rank].copy_(sources[self.rank])
        mine = torch.tensor([source.numel() for source in sources])
        lengths = [torch.empty_like(mine) for _ in range(self.size)]  # that every rank has for every rank
        lengths[self.rank] = mine
        if self.size > 2:  # two need not ask
            self._pass_around(lengths, tag)
        for distance in range(1, self.size):
            block = sources[(self.rank + distance) % self.size]
            for hop in range(1, distance + 1):
                origin = (self.rank - hop) % self.size
                num_elements = int(lengths[origin][(origin + distance) % self.size])
                if hop == distance:
                    received = outs[origin]
                else:  # on its way; the block sent before it has left its memory: two places are enough
                    received = self._scratch(f"relay {hop % 2}", num_elements, block.dtype)
                self._rotate(block, received, tag)
                block = received

    def barrier(self, tag: Tag) -> None:
        """N-1 hops of empty messages: the one that comes at hop h was sent when the h ranks to the left were here."""
        self.check()
        empty = torch.empty(0, dtype=torch.uint8)
        for hop in range(1, self.size):
            self.send(empty, hop, tag)
            self.receive(empty, hop, tag)
        self.flush(tag)

    def waiting_on(self) -> int | None:
        return self.awaits

    def close(self, reason: str) -> None:
        self.break_off(CollectiveError(reason))

    def _all_reduce_small(self, source: torch.Tensor, out: torch.Tensor, op: ReduceOp, tag: Tag) -> None:
        """Everybody gets all tensors and reduces them in the order of ranks."""
        num_elements = source.numel()
        if self.size == 2:
            other = self._scratch("chunk", num_elements, source.dtype)
            self.send(source, 0, tag)
            other = self.receive(other, 0, tag)
            self.flush(tag)  # out may be the source, which has to have left
            first, second = (source, other) if self.rank == 0 else (other, source)
            REDUCE[op](first, second, out=out)
            return
        every = self._scratch("chunk", self.size * num_elements, source.dtype).view(self.size, num_elements)
        every[self.rank].copy_(source)
        self._pass_around(every, tag)
        REDUCE[op](every[0], every[1], out=out)
        for other in every[2:]:
            REDUCE[op](out, other, out=out)

    def _run(
        self, steps: Schedule, source: torch.Tensor, held: torch.Tensor, out: torch.Tensor, op: ReduceOp, tag: Tag
    ) -> None:
        """Leaves partial results, then results, in ``held``, which has the dtype of the wire, and results in ``out``
        too, as decoded from it, if that is another tensor.

        ``held`` may be ``source`` and may be sent from while it is written to: a chunk that comes a second time is
        reduced with what this rank sent the first time, so that has left this memory.
        """
        reduce, converts = REDUCE[op], held.dtype is not source.dtype
        for step in steps:
            own, part = source[step.start : step.stop], held[step.start : step.stop]
            if step.action is ChunkAction.REDUCE:
                received = self.receive(self._scratch("chunk", own.numel(), held.dtype), step.start, tag)
                if converts:
                    total = self._scratch("total", own.numel(), source.dtype)
                    total.copy_(received)
                    part.copy_(reduce(own, total, out=total))
                else:
                    reduce(own, received, out=part)
            elif step.action is ChunkAction.STORE:
                self.receive_into(part, step.start, tag)
            elif step.action is ChunkAction.SEND_OWN and not converts:
                self.send(own, step.start, tag)
            else:
                if step.action is ChunkAction.SEND_OWN:
                    part.copy_(own)
                self.send(part, step.start, tag)
            is_complete = step.action is ChunkAction.STORE or (
                step.action is ChunkAction.REDUCE and step.slice == self.rank
            )
            if is_complete and out is not held:
                out[step.start : step.stop].copy_(part)

    def _pass_around(self, every: Sequence[torch.Tensor] | torch.Tensor, tag: Tag) -> None:
        """Fills in the others' tensors; the own one is there."""
        for hop in range(self.size - 1):
            self.send(every[(self.rank - hop) % self.size], hop, tag)
            self.receive_into(every[(self.rank - hop - 1) % self.size], hop, tag)

    def _rotate(self, block: torch.Tensor, received: torch.Tensor, tag: Tag) -> None:
        """Sends one tensor to the right while another one comes from the left."""
        chunk_elements = self._chunk_elements(block.dtype)
        for start, stop in chunks(0, block.numel(), chunk_elements):
            self.send(block[start:stop], start, tag)
        for start, stop in chunks(0, received.numel(), chunk_elements):
            self.receive_into(received[start:stop], start, tag)
        self.flush(tag)

    def _wire(self, dtype: torch.dtype) -> torch.dtype:
        """As which dtype tensors of this one travel."""
        return self._wire_dtype if dtype is torch.float32 and self._wire_dtype is not None else dtype

    def _chunk_elements(self, dtype: torch.dtype) -> int:
        return max(1, self.chunk_bytes // dtype.itemsize)

    def _scratch(self, purpose: str, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for one purpose, kept; its contents are gone when the same purpose is asked for again."""
        typed = self._scratches.get((purpose, dtype))
        if typed is None or typed.numel() < num_elements:
            num_bytes = num_elements * dtype.itemsize
            memory = self._memory.get(purpose)
            with torch.inference_mode(False):  # what is made in that mode could not be written outside of it
                if memory is None or memory.numel() < num_bytes:
                    self._scratches = {key: view for key, view in self._scratches.items() if key[0] != purpose}
                    memory = self._memory[purpose] = torch.empty(-(-num_bytes // 64) * 64, dtype=torch.uint8)
                typed = self._scratches[purpose, dtype] = memory.view(dtype)
        return typed[:num_elements]
