"""The tcp lane: plain or TLS sockets that send and receive straight from tensor memory.

A lane is one or two one-way sockets: a TLS connection must not be read and written by two threads at once. Sockets come
from :mod:`stratagem.rpc.lane_listener`, which has checked the peer.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence

import torch

from stratagem.errors import FrameError, PeerUnavailableError, StratagemError
from stratagem.rpc.codec import Frame, byte_view, dtype_of, frame_of, from_wire_dtype, to_wire_dtype
from stratagem.rpc.frame_memory import FrameMemory, fresh
from stratagem.rpc.inbox import INBOX_BYTES, check_inbox
from stratagem.rpc.lane import LentPiece, LentPieces, Payload, Place, nothing
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.socket_lane import MAX_VIEWS, POLL_S, SocketReceiver, SocketSender, TwoSocketLane, wake_reads
from stratagem.rpc.spin import Spin

_HEADER = struct.Struct("<4sBB2xIQQQ")  # magic, kind, dtype, group, transfer, offset, elements
_MAGIC = b"SGF1"
INLINE_ELEMENTS = 256 << 10
"""Frames up to this size are sent by the caller itself when nothing waits before them, as far as the socket takes them
at once: waking the thread costs more. Two ranks, all-reduce of 1 MB: 1.3 to 3.1 GB/s without, 3.7 with."""
INLINE_BYTES = 1 << 20
"""What is written together inside :meth:`TcpSender.corked`."""
MAX_FRAME_BYTES = 256 << 20
"""Larger frames are refused before any memory is set aside for them."""
_MOST_RESENT = 3
"""A peer that has acknowledged nothing after so many attempts of the kernel in a row, about 1.4 s, gets nothing."""
_Unread = tuple[int, int, int, int, Payload, int]
_Outgoing = _Unread | list[memoryview]
"""A frame to build, or the rest of one."""


def tune(sock: socket.socket) -> None:
    """Sends small frames at once, and notices a peer whose machine is gone within about five seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class TcpSender(SocketSender):
    name = "tcp"

    def __init__(self, sock: socket.socket, peer: str, meter: BytesMeter) -> None:
        super().__init__(sock, peer, meter.lane(peer, self.name, sock))
        sock.settimeout(None)
        self._secure = isinstance(sock, ssl.SSLSocket)
        self._outbox: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._sent = threading.Condition()
        self._num_waiting = 0
        self.waiting_bytes = 0
        """Of frames that are read from their tensors and not sent."""
        self._writer = threading.Thread(target=self._write, name=f"lane-to-{peer}", daemon=True)
        self._writer.start()

    @property
    def is_unheard(self) -> bool:
        """Whether nothing of what was sent arrives, as the kernel sees it: a peer that stands still acknowledges."""
        with contextlib.suppress(OSError):  # else it is closed
            return self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[2] >= _MOST_RESENT
        return False

    def send(self, kind: int, transfer: int, group: int, offset: int, pieces: Payload, num_elements: int) -> None:
        if self._error is not None:
            raise self._error
        self._meter.sent_frames += 1
        item = kind, transfer, group, offset, pieces, num_elements
        if self._cork is not None and num_elements <= INLINE_BYTES:
            views, num_bytes = _encode(item)
            self._cork += views
            self._corked_bytes += num_bytes
            if self._corked_bytes > INLINE_BYTES:
                views, num_bytes, self._cork, self._corked_bytes = self._cork, self._corked_bytes, [], 0
                self._write_or_queue(views, num_bytes)
        elif num_elements <= INLINE_ELEMENTS and not self._num_waiting and not self._secure:
            self._write_or_queue(*_encode(item))
        else:
            if self._cork is not None:
                self.uncork()
            self._queue(item, 0)

    def uncork(self) -> None:
        views, self._cork = self._cork, None
        if views:
            try:
                self._write_or_queue(views, self._corked_bytes)
            except PeerUnavailableError:
                return

    def _write_or_queue(self, views: list[memoryview], num_bytes: int) -> None:
        """Sends at once what the socket takes; leaves the rest to the thread."""
        if not self._num_waiting and not self._secure:
            num_sent = self._send_now(views)
            if num_sent == num_bytes:
                return
            views, num_bytes = _after(views, num_sent), num_bytes - num_sent
        self._queue(views, num_bytes)

    def _queue(self, item: _Outgoing, num_bytes: int) -> None:
        with self._sent:
            self._num_waiting += 1
            self.waiting_bytes += num_bytes
        self._outbox.put(item)

    def flush(self, deadline: float) -> None:
        if not self._num_waiting:
            return
        with self._sent:
            self._sent.wait_for(lambda: not self._num_waiting or self._error is not None, deadline - time.monotonic())
            if self._num_waiting:
                raise self._error or PeerUnavailableError(f"{self._peer} takes no frames")

    def close(self, reason: str) -> None:
        self._fail(PeerUnavailableError(reason))
        if threading.current_thread() is not self._writer:
            self._writer.join(5.0)

    def _send_now(self, views: list[memoryview]) -> int:
        """Hands the kernel what it takes at once; returns the number of bytes."""
        try:
            num_sent = self._sock.sendmsg(views[:MAX_VIEWS], (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._fail(PeerUnavailableError(f"the lane to {self._peer} broke: {error}"))
            raise self._error or error from None
        self._meter.sent_bytes += num_sent
        return num_sent

    def _write(self) -> None:
        try:
            while (item := self._outbox.get()) is not None:
                num_bytes = sum([view.nbytes for view in item]) if isinstance(item, list) else 0
                if not isinstance(item, list) and isinstance(item[4], LentPieces):
                    self._send_lent(item, item[4].piece)
                else:
                    self._send_all(item if isinstance(item, list) else _encode(item)[0])
                del item
                with self._sent:
                    self._num_waiting -= 1
                    self.waiting_bytes -= num_bytes
                    self._sent.notify_all()
        except OSError as error:
            self._fail(PeerUnavailableError(f"the lane to {self._peer} broke: {error}"))
        finally:
            self._sock.close()
            with contextlib.suppress(queue.Empty):  # what nobody will send holds no memory
                while True:
                    self._outbox.get_nowait()

    def _send_all(self, views: Sequence[memoryview]) -> None:
        self._meter.sent_bytes += sum(view.nbytes for view in views)
        if self._secure:
            for view in views:
                self._sock.sendall(view)
            return
        left = [view for view in views if view.nbytes]
        while left:
            left = _after(left, self._sock.sendmsg(left[:MAX_VIEWS]))

    def _send_lent(self, item: _Unread, piece: LentPiece) -> None:
        """Waits for the peer without the guard, and looks each time where the elements are now."""
        (header, elements), _ = _encode(item)
        if self._secure:  # which encrypts all of it, wants the same memory again, and may wait for the peer
            with piece.guard:
                tensor = piece.tensor.clone()
            self._send_all([header, byte_view(tensor)])
            return
        self._sock.sendall(header, socket.MSG_MORE)
        num_sent, num_bytes = 0, elements.nbytes
        writable = select.poll()
        writable.register(self._sock, select.POLLOUT)
        while num_sent < num_bytes:
            with piece.guard, contextlib.suppress(BlockingIOError):
                num_sent += self._sock.send(byte_view(piece.tensor)[num_sent:], socket.MSG_DONTWAIT)
            if num_sent < num_bytes:
                writable.poll()
        self._meter.sent_bytes += header.nbytes + num_bytes

    def _fail(self, error: StratagemError) -> None:
        with self._sent:
            if self._error is None:
                self._error = error
            self._sent.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a write that the peer does not take
        self._outbox.put(None)


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of ``views`` after their first ``num_bytes``."""
    for index, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= view.nbytes
    return []


def _encode(item: _Unread) -> tuple[list[memoryview], int]:
    """A frame as it goes over the socket, and its number of bytes."""
    kind, transfer, group, offset, pieces, num_elements = item
    parts = pieces() if num_elements else ()
    dtype = dtype_of(parts[0]) if parts else torch.uint8
    header = _HEADER.pack(_MAGIC, kind, to_wire_dtype(dtype), group, transfer, offset, num_elements)
    if parts and isinstance(parts[0], bytes) and len(parts) == 1:
        return [memoryview(header + parts[0])], _HEADER.size + num_elements
    views = [memoryview(header)]
    views += map(byte_view, parts)
    return views, _HEADER.size + num_elements * dtype.itemsize


class TcpReceiver(SocketReceiver):
    """Reads straight into ``into``. Frames that arrived before they were requested take at most ``max_inbox_bytes``;
    those that are received into nothing else are in ``memory``, None: malloc's. ``spins``: spins briefly before a wait
    for a frame sleeps; see :mod:`stratagem.rpc.spin`."""

    name = "tcp"

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        meter: BytesMeter,
        max_inbox_bytes: int = INBOX_BYTES,
        on_wait: Callable[[], None] = nothing,
        *,
        memory: FrameMemory | None = None,
        spins: bool = False,
    ) -> None:
        super().__init__(sock, peer, meter, on_wait)
        self._take = fresh if memory is None else memory.take
        self._max_inbox_bytes = max_inbox_bytes
        self._secure = isinstance(sock, ssl.SSLSocket)
        if self._secure:
            sock.settimeout(POLL_S)
        else:
            wake_reads(sock)
        self._spin = Spin() if spins and not self._secure else None
        watch = select.poll()
        watch.register(sock, select.POLLIN)
        self._look = functools.partial(watch.poll, 0)

    def _keep(self, frame: Frame) -> None:
        super()._keep(frame)
        check_inbox(self._peer, sum(each.num_bytes for each in self._early), self._max_inbox_bytes)

    def _next(self, transfer: int, deadline: float, into: torch.Tensor | Place | None) -> Frame:
        magic, kind, wire, group, number, offset, num_elements = self._ahead.unpack(_HEADER, transfer, deadline)
        dtype = from_wire_dtype(wire)
        num_bytes = num_elements * dtype.itemsize
        if magic != _MAGIC or num_bytes > MAX_FRAME_BYTES:
            raise FrameError(
                f"{self._peer} sent no frame: expected {_MAGIC!r} and at most {MAX_FRAME_BYTES:,} bytes, got {magic!r} "
                f"and {num_elements:,} elements of {dtype}"
            )
        if transfer and number != transfer:
            into = None
        elif into is not None and not isinstance(into, torch.Tensor):
            into = into(kind, group, offset, num_elements)
        if into is None:
            if num_elements and (here := self._ahead.take(num_bytes)) is not None:
                self._count(num_bytes)
                return frame_of(kind, number, group, offset, dtype, here)
            tensor = self._take(num_elements, dtype)
        elif into.dtype != dtype and num_elements:
            raise FrameError(f"expected {into.dtype} from {self._peer}, got {dtype}")
        elif (room := into.numel()) != num_elements:
            if num_elements > room:
                raise FrameError(f"expected at most {room:,} elements from {self._peer}, got {num_elements:,}")
            tensor = into[:num_elements]
        else:
            tensor = into
        if num_elements:
            self._ahead.fill(byte_view(tensor), transfer, deadline)
        self._count(num_bytes)
        return Frame(kind, number, group, offset, tensor)

    def _count(self, num_bytes: int) -> None:
        self._meter.received_frames += 1
        self._meter.received_bytes += _HEADER.size + num_bytes

    def _read(self, view: memoryview, whole: bool) -> int:
        return self._sock.recv_into(view, 0, socket.MSG_WAITALL if whole and not self._secure else 0)


class TcpLane(TwoSocketLane, TcpSender):
    def __init__(
        self,
        outward: socket.socket,
        inward: socket.socket,
        peer: str,
        meter: BytesMeter,
        max_inbox_bytes: int = INBOX_BYTES,
        on_wait: Callable[[], None] = nothing,
    ) -> None:
        TcpSender.__init__(self, outward, peer, meter)
        self._receiver = TcpReceiver(inward, peer, meter, max_inbox_bytes, on_wait)
