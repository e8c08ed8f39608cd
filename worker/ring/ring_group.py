"""A ring of ranks over lanes: each receives from its left neighbour and sends to its right one."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import accumulate

import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import CollectiveError, PeerUnavailableError, StratagemError
from stratagem.rpc.codec import FrameKind
from stratagem.rpc.lane import ReceivingLane, SendingLane
from stratagem.worker.ring.group import HOST, REDUCE, Arena, Breakable, LateError, OutOfStepError, Tag
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


class RingGroup(Breakable):
    """Implements :class:`stratagem.worker.ring.group.Group` over a lane to the right and one from the left.

    All-reduce is reduce-scatter and all-gather, 2(N-1) hops in chunks; small tensors go around whole, N-1 hops. Every
    message carries the collective's tag and the place of its elements. A message that is not exactly the expected one,
    a neighbour that is gone or one that stands still breaks both lanes for good, so that the others notice too. Scratch
    memory is reused, and grows to the longest tensor: in wire elements with a ``wire_dtype``, in the tensor's own for
    :meth:`reduce_scatter` and :meth:`all_to_all`, one chunk otherwise.

    Args:
        right: to rank + 1, and ``left`` from rank - 1; None only if ``size`` is 1. The group owns the lanes.
        chunk_bytes: largest payload of a message; the same on every rank.
        wire_dtype: float32 tensors travel as bfloat16 or float16, except small ones; partial sums are formed in float32
            and rounded once for each hop. None or float32: as they are.
        timeout_s: seconds that a neighbour may neither send nor take anything while this rank waits for it.
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
        super().__init__()
        self.name = f"ring over {right.name}" if right is not None else "ring of one"
        self.rank = rank
        self.size = size
        self.chunk_bytes = chunk_bytes
        """Every rank may change it, between the same two collectives."""
        self.timeout_s = timeout_s
        self._right, self._left = (rank + 1) % size, (rank - 1) % size
        self._right_lane, self._left_lane = right, left
        self._awaits: int | None = None
        """The neighbour that this rank waits for at this moment."""
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
            if self._right != root:
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
        return self._awaits if self._awaits is None or not self._is_unheard else self._right

    @property
    def _is_unheard(self) -> bool:
        return getattr(self._right_lane, "is_unheard", False)  # a tcp lane can tell

    # -- messages ----------------------------------------------------------------------------------------------

    def send(self, part: torch.Tensor, offset: int, tag: Tag) -> None:
        """Queues ``part``, whose first element is the ``offset``-th; its memory has to stay until :meth:`flush`."""
        assert self._right_lane is not None
        try:
            self._right_lane.send(
                FrameKind.COLLECTIVE, tag.ordinal, tag.fingerprint, offset, lambda: (part,), part.numel()
            )
        except StratagemError as error:
            raise self._blame(self._right, tag, error) from None

    def receive(self, into: torch.Tensor, offset: int, tag: Tag) -> torch.Tensor:
        """Waits for the next message, which has to be the elements from ``offset`` on that fill ``into``. They are
        there, or in memory of the lane, which must not be written to."""
        assert self._left_lane is not None
        self._awaits = self._left
        deadline = time.monotonic() + self.timeout_s
        num_elements = into.numel()

        def place(kind: int, group: int, at: int, num: int) -> torch.Tensor | None:
            return into if (group, at, num) == (tag.fingerprint, offset, num_elements) else None

        try:
            frame = self._left_lane.receive(0, deadline, place)
        except StratagemError as error:
            raise self._blame(self._left, tag, error, deadline) from None
        finally:
            self._awaits = None
        tensor = frame.tensor
        if (
            frame.transfer != tag.ordinal
            or frame.group != tag.fingerprint
            or frame.offset != offset
            or tensor.numel() != num_elements
            or (num_elements and tensor.dtype != into.dtype)
            or frame.kind != FrameKind.COLLECTIVE
        ):
            expected = _told(tag.ordinal, tag.fingerprint, offset, into)
            got = _told(frame.transfer, frame.group, frame.offset, tensor)
            raise self.break_off(
                OutOfStepError(
                    f"expected from rank {self._left} {expected}, got {got}: the ranks are not in the same collective",
                    self._left,
                    min(tag.ordinal, frame.transfer),
                )
            )
        return tensor

    def receive_into(self, part: torch.Tensor, offset: int, tag: Tag) -> None:
        """Waits for the next message, which has to be the elements from ``offset`` on; they are in ``part`` then."""
        received = self.receive(part, offset, tag)
        if received.data_ptr() != part.data_ptr():
            part.copy_(received)

    def flush(self, tag: Tag) -> None:
        """Waits until everything that was sent may be changed."""
        if self._right_lane is None:
            return
        self._awaits = self._right
        deadline = time.monotonic() + self.timeout_s
        try:
            self._right_lane.flush(deadline)
        except StratagemError as error:
            raise self._blame(self._right, tag, error, deadline) from None
        finally:
            self._awaits = None

    def _end(self, error: CollectiveError) -> None:
        for lane in (self._right_lane, self._left_lane):
            if lane is not None:
                lane.close(str(error))

    def _blame(self, rank: int, tag: Tag, error: StratagemError, deadline: float = math.inf) -> CollectiveError:
        kind = CollectiveError if time.monotonic() < deadline else LateError
        if self._is_unheard:  # then the one to the left waits as well
            rank, error = self._right, PeerUnavailableError("nothing arrives of what it is sent")
        return self.break_off(kind(f"collective {tag.ordinal} failed at rank {rank}: {error}", rank))

    # -- collectives -------------------------------------------------------------------------------------------

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


def _told(ordinal: int, fingerprint: int, offset: int, tensor: torch.Tensor) -> str:
    what = f"{tensor.numel():,} elements of {str(tensor.dtype).removeprefix('torch.')} at {offset:,}"
    return f"{what} of collective {ordinal} (fingerprint {fingerprint:08x})"
