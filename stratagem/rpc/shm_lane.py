"""The shm lane: frames lie in shared memory, a Unix socket carries where, and small frames themselves.

The sender copies a frame once into a slot of a segment that the receiver maps; the receiver's tensor is a view on that
slot, and when the last view of it goes the slot returns to the sender by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from stratagem.errors import FrameError, LimitError, PeerUnavailableError, SegmentError, StratagemError
from stratagem.rpc.codec import Frame, byte_view, from_wire_dtype, to_wire_dtype
from stratagem.rpc.forks import close_in_children
from stratagem.rpc.lane import BytesMeter, Pieces, nothing
from stratagem.rpc.segment import Segment, receive_descriptor
from stratagem.rpc.slots import ShmBlock, SlotPool
from stratagem.rpc.tcp_lane import is_readable

_FRAME, _SEGMENT, _INLINE = b"SGFR", b"SGSG", b"SGIN"
_MESSAGE = struct.Struct("<4sBB2xIQQQIQI4x")  # magic, kind, dtype, group, transfer, offset, elements, segment, at, slot
_RELEASE = struct.Struct("<I")
_COUNT = struct.Struct("=i")
POLL_S = 0.5
INLINE_BYTES = 32 << 10
"""Frames up to this size go through the socket: taking a slot, showing it and getting it back costs more."""
MAX_INLINE_UNREAD_BYTES = 64 << 10
"""An impatient sender must not fill the socket of a reader that is slow: beyond this, small frames take slots too."""


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
        self._cork: list[memoryview] | None = None
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
        tensors = pieces() if num_elements else ()
        if tensors and num_elements * tensors[0].dtype.itemsize <= INLINE_BYTES and self._takes_inline():
            self._send_inline((kind, to_wire_dtype(tensors[0].dtype), group, transfer, offset, num_elements), tensors)
        else:
            self.send_slot(kind, transfer, group, offset, *self.fill(tensors))

    def _takes_inline(self) -> bool:
        if self._patient or self._error is not None:
            return True
        (unread,) = _COUNT.unpack(fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(_COUNT.size)))
        return bool(unread <= MAX_INLINE_UNREAD_BYTES)

    def _send_inline(self, what: tuple[int, int, int, int, int, int], tensors: Sequence[torch.Tensor]) -> None:
        views = [memoryview(_MESSAGE.pack(_INLINE, *what, 0, 0, 0)), *(byte_view(tensor) for tensor in tensors)]
        with self._turn, self._breaking():
            self._write(views)
            self._meter.sent_bytes += sum(view.nbytes for view in views) - _MESSAGE.size

    @contextlib.contextmanager
    def corked(self) -> Iterator[None]:
        """See :class:`stratagem.rpc.lane.Lane`."""
        self._cork = []
        try:
            yield
        finally:
            with contextlib.suppress(StratagemError):  # whoever waits for an answer hears of it
                self.uncork()

    def uncork(self) -> None:
        """Sends what waits; nothing waits from now on."""
        with self._turn:
            views, self._cork = self._cork, None
            if views:
                with self._breaking():
                    self._write(views)

    def _write(self, views: list[memoryview]) -> None:
        """Writes to the socket, or puts it with what waits."""
        if self._cork is not None:
            self._cork += views
            if sum(view.nbytes for view in self._cork) <= INLINE_BYTES:
                return
            views, self._cork = self._cork, []
        num_sent = self._sock.sendmsg(views)
        if num_sent < sum(view.nbytes for view in views):  # a signal came in between
            self._sock.sendall(b"".join(views)[num_sent:])

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
            message = _MESSAGE.pack(_FRAME, kind, wire, group, transfer, offset, tensor.numel(), *place)
            self._write([memoryview(message)])
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
        """Hands over the segments that the receiver does not have yet, up to ``segment``; before the frames that wait,
        which may lie in them."""
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

    @property
    def readable(self) -> bool:
        """See :class:`stratagem.rpc.lane.Lane`."""
        return bool(self._early) or is_readable(self._sock)

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
            if magic == _INLINE and descriptor is None:
                tensor = self._inline(from_wire_dtype(wire), num_elements, transfer, deadline)
                return Frame(kind, number, group, offset, tensor)
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

    def _inline(self, dtype: torch.dtype, num_elements: int, transfer: int, deadline: float) -> torch.Tensor:
        """The payload that follows in the socket."""
        num_bytes = num_elements * dtype.itemsize
        if not 0 < num_bytes <= INLINE_BYTES:
            raise FrameError(f"{self._peer} sent no frame: {num_elements:,} elements of {dtype} in the socket")
        tensor = torch.empty(num_elements, dtype=dtype)
        view, num_read = byte_view(tensor), 0
        while num_read < num_bytes:
            with self._waiting(transfer, deadline):
                count = self._sock.recv_into(view[num_read:], 0, socket.MSG_WAITALL)
                self._check_open(count)
                num_read += count
        self._meter.received_bytes += num_bytes
        return tensor

    def _message(self, transfer: int, deadline: float) -> tuple[bytes, int | None]:
        message, descriptor = b"", None
        while len(message) < _MESSAGE.size:
            part = b""
            with self._waiting(transfer, deadline):
                part, came = receive_descriptor(self._sock, _MESSAGE.size - len(message))
                self._check_open(len(part))
            if not part:
                continue
            message += part
            if came is not None and descriptor is not None:
                os.close(descriptor)
            descriptor = came if came is not None else descriptor
        return message, descriptor

    @contextlib.contextmanager
    def _waiting(self, transfer: int, deadline: float) -> Iterator[None]:
        """Around one read: it may end without anything, to be tried again."""
        if self._error is not None:
            raise self._error
        try:
            yield
        except (BlockingIOError, TimeoutError):
            if time.monotonic() > deadline:
                self._error = PeerUnavailableError(f"{self._peer} sent no frame of transfer {transfer} in time")
                raise self._error from None
            self._on_wait()
        except OSError as error:
            raise self._error or PeerUnavailableError(f"the lane from {self._peer} broke: {error}") from None

    def _check_open(self, num_read: int) -> None:
        if not num_read:
            raise self._error or PeerUnavailableError(f"{self._peer} closed the lane")

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
        if self._cork is not None:
            self.uncork()
        return self._receiver.receive(transfer, deadline, into)

    @property
    def readable(self) -> bool:
        """See :class:`stratagem.rpc.lane.Lane`."""
        return self._receiver.readable

    def forget(self, transfer: int) -> None:
        """See :class:`stratagem.rpc.lane.ReceivingLane`."""
        self._receiver.forget(transfer)

    def close(self, reason: str) -> None:
        self._receiver.close(reason)
        super().close(reason)
