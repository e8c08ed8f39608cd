"""The shm lane: frames lie in shared memory, a Unix socket carries only where.

The sender copies a frame once into a slot of a segment that the receiver maps; the receiver's tensor is a view on that
slot, and when the last view of it goes the slot returns to the sender by itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from stratagem.errors import FrameError, LimitError, PeerUnavailableError, SegmentError, StratagemError
from stratagem.rpc.codec import Frame, from_wire_dtype, to_wire_dtype
from stratagem.rpc.forks import close_in_children
from stratagem.rpc.lane import BytesMeter, Pieces, nothing
from stratagem.rpc.segment import Segment, receive_descriptor
from stratagem.rpc.slots import ShmBlock, SlotPool

_FRAME, _SEGMENT = b"SGFR", b"SGSG"
_MESSAGE = struct.Struct("<4sBB2xIQQQIQI4x")  # magic, kind, dtype, group, transfer, offset, elements, segment, at, slot
_RELEASE = struct.Struct("<I")
POLL_S = 0.5


class ShmSender:
    """Implements :class:`stratagem.rpc.lane.SendingLane`.

    Args:
        sock: a connected Unix socket; the lane owns it.
        peer: task id at the other end, for messages.
        meter: counts bytes.
        max_bytes: most bytes that may lie unread; asked when it matters.
        pool: memory to send from, shared with other lanes; None: this lane's own.
        patient: wait for the receiver when that much lies unread; False: break the lane (``LimitError``).

    Raises:
        SegmentError: there is no shared memory here.
        PeerUnavailableError: the peer is gone.
    """

    name = "shm"

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        meter: BytesMeter,
        max_bytes: Callable[[], int],
        pool: SlotPool | None = None,
        patient: bool = True,
    ) -> None:
        self.pool = pool or SlotPool()
        self._owns_pool = pool is None
        self._sock = sock
        self._peer = peer
        self._meter = meter
        self._max_bytes = max_bytes
        self._patient = patient
        self._turn = threading.Lock()
        self._error: StratagemError | None = None
        self._num_announced = 0
        self._unread: dict[int, list[ShmBlock]] = {}
        self._unread_bytes = 0
        close_in_children(sock)
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(POLL_S * 1e6)))
        self.pool.take(1)  # finds out here and now whether there is shared memory

    @property
    def alive(self) -> bool:
        return self._error is None

    def send(self, kind: int, transfer: int, group: int, offset: int, pieces: Pieces, num_elements: int) -> None:
        if self._error is not None:
            raise self._error
        self.send_slot(kind, transfer, group, offset, *self.fill(pieces() if num_elements else ()))

    def fill(self, pieces: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ShmBlock | None]:
        """Copies pieces, one after the other, into a slot; gives them as one flat tensor there."""
        num_elements = sum(piece.numel() for piece in pieces)
        if not num_elements:
            return torch.empty(0, dtype=pieces[0].dtype if pieces else torch.uint8), None
        num_bytes = num_elements * pieces[0].dtype.itemsize
        with self._turn, self._breaking():
            self._make_room(num_bytes)
            slot = self.pool.take(num_bytes)
        target = slot.memory[:num_bytes].view(pieces[0].dtype)
        position = 0
        for piece in pieces:
            target[position : position + piece.numel()].copy_(piece.detach().view(-1))
            position += piece.numel()
        return target, slot

    def send_slot(
        self, kind: int, transfer: int, group: int, offset: int, tensor: torch.Tensor, slot: ShmBlock | None
    ) -> None:
        """Shows the receiver what lies at the beginning of a slot of this lane's pool; copies nothing."""
        wire = to_wire_dtype(tensor.dtype)
        place = (slot.segment, slot.at, slot.number) if slot is not None else (0, 0, 0)
        with self._turn, self._breaking():
            if slot is not None:
                self._announce(slot.segment)
                self._unread.setdefault(slot.number, []).append(slot)
                self._unread_bytes += slot.size
            self._sock.sendall(_MESSAGE.pack(_FRAME, kind, wire, group, transfer, offset, tensor.numel(), *place))
            self._meter.sent_bytes += tensor.nbytes

    def flush(self, deadline: float) -> None:
        if self._error is not None:  # a frame has left its memory when send returns
            raise self._error

    def close(self, reason: str) -> None:
        self._fail(PeerUnavailableError(reason))
        with self._turn:
            self._sock.close()
            self._unread.clear()
            if self._owns_pool:
                self.pool.close()

    def _make_room(self, num_bytes: int) -> None:
        self._collect(wait=False)
        while self._unread_bytes + num_bytes > self._max_bytes():
            if not self._patient:
                raise self._fail(LimitError(f"{self._peer} lets {self._unread_bytes:,} bytes of frames lie unread"))
            self._collect(wait=True)

    def _announce(self, segment: int) -> None:
        """Hands over the segments that the receiver does not have yet, up to ``segment``."""
        while self._num_announced <= segment:
            number, memory = self._num_announced, self.pool.segments[self._num_announced]
            message = _MESSAGE.pack(_SEGMENT, 0, 0, 0, 0, 0, memory.tensor.numel(), number, 0, 0)
            memory.send_to(self._sock, message)
            if self._owns_pool:
                memory.stop_sharing()
            self._num_announced += 1

    def _collect(self, wait: bool) -> None:
        """Takes back the slots that the receiver has let go of."""
        try:
            released = self._sock.recv(4096, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            if self._error is not None:
                raise self._error from None
            return
        if not released:
            raise ConnectionError("the peer closed it")
        while len(released) % _RELEASE.size:
            released += self._sock.recv(_RELEASE.size - len(released) % _RELEASE.size)
        for (number,) in _RELEASE.iter_unpack(released):
            slots = self._unread.get(number)
            if not slots:
                raise ConnectionError(f"the peer let go of slot {number}, which it did not have")
            self._unread_bytes -= slots.pop().size
            if not slots:
                del self._unread[number]

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Inside, an error of the socket or of the memory is the end of the lane."""
        if self._error is not None:
            raise self._error
        try:
            yield
        except OSError as error:
            raise self._fail(PeerUnavailableError(f"the lane to {self._peer} broke: {error}")) from None
        except SegmentError as error:
            raise self._fail(PeerUnavailableError(f"the lane to {self._peer} cannot grow: {error}")) from None

    def _fail(self, error: StratagemError) -> StratagemError:
        if self._error is None:
            self._error = error
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        return self._error


class ShmReceiver:
    """Implements :class:`stratagem.rpc.lane.ReceivingLane`; reads in the caller's thread.

    Args:
        sock: a connected Unix socket; the lane owns it.
        peer: task id at the other end, for messages.
        meter: counts bytes.
        on_wait: called now and then while a read waits; what it raises ends the wait.
    """

    name = "shm"

    def __init__(
        self, sock: socket.socket, peer: str, meter: BytesMeter, on_wait: Callable[[], None] = nothing
    ) -> None:
        self._on_wait = on_wait
        close_in_children(sock)
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(POLL_S * 1e6)))
        self._sock = sock
        self._peer = peer
        self._meter = meter
        self._segments: list[Segment] = []
        self._early: list[Frame] = []
        self._forgotten = 0
        self._error: StratagemError | None = None
        self._reading = threading.Lock()

    def receive(self, transfer: int, deadline: float, into: torch.Tensor | None = None) -> Frame:
        for index, frame in enumerate(self._early):
            if transfer in (0, frame.transfer):
                return self._early.pop(index)
        with self._reading:
            while True:
                frame = self._next(transfer, deadline)
                if transfer in (0, frame.transfer):
                    return frame
                if frame.transfer > self._forgotten:
                    self._early.append(frame)

    def forget(self, transfer: int) -> None:
        self._forgotten = max(self._forgotten, transfer)
        self._early = [frame for frame in self._early if frame.transfer > self._forgotten]

    def close(self, reason: str) -> None:
        if self._error is None:
            self._error = PeerUnavailableError(reason)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._reading:
            self._sock.close()
            self._early.clear()
            for segment in self._segments:
                segment.close()  # views that are still held keep their memory
            self._segments.clear()

    def _next(self, transfer: int, deadline: float) -> Frame:
        while True:
            message, descriptor = self._message(transfer, deadline)
            magic, kind, wire, group, number, offset, num_elements, segment, at, slot = _MESSAGE.unpack(message)
            if magic == _SEGMENT and descriptor is not None and segment == len(self._segments):
                try:
                    self._segments.append(Segment.attach(descriptor, num_elements))
                except SegmentError as error:
                    raise FrameError(f"{self._peer} shares memory that cannot be used: {error}") from None
                continue
            if descriptor is not None:
                os.close(descriptor)
            dtype = from_wire_dtype(wire)
            num_bytes = num_elements * dtype.itemsize
            if magic != _FRAME or at % 64:
                raise FrameError(f"{self._peer} sent no frame: {message!r}")
            self._meter.received_bytes += num_bytes
            if not num_elements:
                return Frame(kind, number, group, offset, torch.empty(0, dtype=dtype))
            if segment >= len(self._segments) or at + num_bytes > self._segments[segment].tensor.numel():
                raise FrameError(f"{self._peer} sent a frame that lies outside of the memory it shares")
            memory = self._segments[segment].tensor
            array = memory[at : at + num_bytes].numpy()
            weakref.finalize(array, _release, weakref.ref(self), slot)
            return Frame(kind, number, group, offset, torch.from_numpy(array).view(dtype))

    def _message(self, transfer: int, deadline: float) -> tuple[bytes, int | None]:
        message, descriptor = b"", None
        while len(message) < _MESSAGE.size:
            if self._error is not None:
                raise self._error
            try:
                part, came = receive_descriptor(self._sock, _MESSAGE.size - len(message))
            except (BlockingIOError, TimeoutError):
                if time.monotonic() > deadline:
                    self._error = PeerUnavailableError(f"{self._peer} sent no frame of transfer {transfer} in time")
                    raise self._error from None
                self._on_wait()
                continue
            except OSError as error:
                raise self._error or PeerUnavailableError(f"the lane from {self._peer} broke: {error}") from None
            if not part:
                raise self._error or PeerUnavailableError(f"{self._peer} closed the lane")
            message += part
            if came is not None and descriptor is not None:
                os.close(descriptor)
            descriptor = came if came is not None else descriptor
        return message, descriptor

    def released(self, slot: int) -> None:
        """Nobody looks at a frame any more: its slot goes back."""
        with contextlib.suppress(OSError):  # the lane is closed: the sender does not care any more
            self._sock.sendall(_RELEASE.pack(slot))


def _release(receiver: weakref.ref[ShmReceiver], slot: int) -> None:
    lane = receiver()
    if lane is not None:
        lane.released(slot)


class ShmLane(ShmSender):
    """Implements :class:`stratagem.rpc.lane.Lane` with a socket for each direction."""

    def __init__(
        self,
        outward: socket.socket,
        inward: socket.socket,
        peer: str,
        meter: BytesMeter,
        max_bytes: Callable[[], int],
        on_wait: Callable[[], None] = nothing,
    ) -> None:
        super().__init__(outward, peer, meter, max_bytes)
        self._receiver = ShmReceiver(inward, peer, meter, on_wait)

    def receive(self, transfer: int, deadline: float, into: torch.Tensor | None = None) -> Frame:
        """See :class:`stratagem.rpc.lane.ReceivingLane`."""
        return self._receiver.receive(transfer, deadline, into)

    def forget(self, transfer: int) -> None:
        """See :class:`stratagem.rpc.lane.ReceivingLane`."""
        self._receiver.forget(transfer)

    def close(self, reason: str) -> None:
        self._receiver.close(reason)
        super().close(reason)
