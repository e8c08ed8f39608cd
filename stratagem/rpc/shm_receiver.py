"""The reading half of a shm lane: the messages on its Unix socket; frames are views on the memory in which they were
sent."""

from __future__ import annotations

import collections
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable

import torch

from stratagem.errors import FrameError, SegmentError
from stratagem.rpc.codec import Frame, byte_view, frame_of, from_wire_dtype
from stratagem.rpc.lane import Place, nothing
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.lent_slots import RELEASE, Lender, Said
from stratagem.rpc.segment import Segment, receive_descriptor_into
from stratagem.rpc.slots import ShmBlock
from stratagem.rpc.socket_lane import SocketReceiver, wake_reads

FRAME, SEGMENT, INLINE, BORROWED, WANT = b"SGFR", b"SGSG", b"SGIN", b"SGBR", b"SGWT"
"""A frame in the sender's memory, that memory, a frame behind its header, one in a slot that was borrowed, and the wish
to borrow one of so many bytes."""
MESSAGE = struct.Struct("<4sBB2xIQQQIQI4x")
"""Magic, kind, dtype, group, transfer, offset, elements, segment, at, slot."""
INLINE_BYTES = 32 << 10
"""Frames up to this size go through the socket: taking a slot, showing it and getting it back costs more."""


class ShmReceiver(SocketReceiver):
    """Returns frames as views on the memory in which they were sent, whatever ``into`` is, over a Unix socket.
    ``lender``: lends the sender memory."""

    name = "shm"

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        meter: BytesMeter,
        on_wait: Callable[[], None] = nothing,
        lender: Lender | None = None,
    ) -> None:
        super().__init__(sock, peer, meter, on_wait)
        self._lender = lender
        self._unsaid: collections.deque[Said] = collections.deque()
        """To the sender, who does not listen at every moment: what has found no room in the socket."""
        self._saying = threading.Lock()
        wake_reads(sock)
        self._segments: list[Segment] = []
        self._descriptor: int | None = None
        """Came with what was read ahead, for the segment that is announced there."""

    def close(self, reason: str) -> None:
        super().close(reason)
        with self._reading:
            self._drop_descriptor()
            self._early.clear()
            if self._lender is not None:
                self._lender.close()
            for segment in self._segments:
                segment.close()  # views that are still held keep their memory
            self._segments.clear()

    def _next(self, transfer: int, deadline: float, into: torch.Tensor | Place | None) -> Frame:
        self._say()
        while True:
            message = self._ahead.unpack(MESSAGE, transfer, deadline)
            magic, kind, wire, group, number, offset, num_elements, segment, at, slot = message
            if magic == SEGMENT and self._descriptor is not None and segment == len(self._segments):
                descriptor, self._descriptor = self._descriptor, None
                try:
                    self._segments.append(Segment.attach(descriptor, num_elements))
                except SegmentError as error:
                    raise FrameError(f"{self._peer} shares memory that cannot be used: {error}") from None
                continue
            if magic == WANT and self._lender is not None and num_elements > 0:
                self._unsaid += self._lender.lend(num_elements)
                self._say()
                continue
            is_unused = self._descriptor is not None and not self._ahead
            if magic not in (INLINE, FRAME, BORROWED) or at % 64 or is_unused:
                raise FrameError(f"{self._peer} sent no frame: {message!r}")
            dtype = from_wire_dtype(wire)
            num_bytes = num_elements * dtype.itemsize
            self._meter.received_frames += 1
            self._meter.received_bytes += num_bytes
            if magic == INLINE:
                if not 0 < num_bytes <= INLINE_BYTES:
                    raise FrameError(f"{self._peer} sent no frame: {num_elements:,} elements of {dtype} in the socket")
                here = self._ahead.take(num_bytes)
                if here is not None:
                    return frame_of(kind, number, group, offset, dtype, here)
                tensor = torch.empty(num_elements, dtype=dtype)
                self._ahead.fill(byte_view(tensor), transfer, deadline)
                return Frame(kind, number, group, offset, tensor)
            if not num_elements:
                return Frame(kind, number, group, offset, torch.empty(0, dtype=dtype))
            block: ShmBlock | None = None
            if magic == BORROWED and self._lender is not None:
                block = self._lender.take_back(slot)
                memory, at = block.memory, 0
            else:
                memory = self._segments[segment].tensor if segment < len(self._segments) else torch.empty(0)
            if (magic == BORROWED and block is None) or at + num_bytes > memory.numel():
                raise FrameError(f"{self._peer} sent a frame that lies outside of the memory it shares")
            array = memory[at : at + num_bytes].numpy()
            weakref.finalize(array, _release, weakref.ref(self), block or slot)
            return Frame(kind, number, group, offset, torch.from_numpy(array).view(dtype))

    def _read(self, view: memoryview, whole: bool) -> int:
        """The kernel ends a read behind a descriptor, whose message is the last one in it therefore."""
        if whole:
            return self._sock.recv_into(view, 0, socket.MSG_WAITALL)
        count, descriptor = receive_descriptor_into(self._sock, view)
        if descriptor is not None:
            self._drop_descriptor()
            self._descriptor = descriptor
        return count

    def _drop_descriptor(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def released(self, slot: int | ShmBlock) -> None:
        """Nobody looks at a frame any more: its slot goes back. Callable in any thread, at any point."""
        if not isinstance(slot, ShmBlock):
            self._unsaid.append((RELEASE.pack(slot), None))
        elif self._lender is not None:
            self._unsaid += self._lender.done(slot)
        self._say()

    def _say(self) -> None:
        """Tells the sender, without waiting for it: it may be waiting for this end."""
        while self._unsaid and self._saying.acquire(blocking=False):  # else whoever has it says this too
            try:
                while self._unsaid:
                    message, segment = self._unsaid[0]
                    if segment is None:
                        self._sock.send(message, socket.MSG_DONTWAIT)
                    else:
                        segment.send_to(self._sock, message, socket.MSG_DONTWAIT)
                    self._unsaid.popleft()
            except OSError:  # no room; or the lane is closed, and the sender does not care any more
                return
            finally:
                self._saying.release()


def _release(receiver: weakref.ref[ShmReceiver], slot: int | ShmBlock) -> None:
    lane = receiver()
    if lane is not None:
        lane.released(slot)
