"""The tcp lane: plain or TLS sockets that send and receive straight from tensor memory.

A lane is one or two one-way sockets: a TLS connection must not be read and written by two threads at once. Sockets come
from :mod:`stratagem.rpc.lane_listener`, which has checked who is at the other end.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from stratagem.errors import FrameError, PeerUnavailableError, StratagemError
from stratagem.rpc.codec import Frame, byte_view, from_wire_dtype, to_wire_dtype
from stratagem.rpc.forks import close_in_children
from stratagem.rpc.inbox import INBOX_BYTES, check_inbox
from stratagem.rpc.lane import BytesMeter, Pieces, nothing

_HEADER = struct.Struct("<4sBB2xIQQQ")  # magic, kind, dtype, group, transfer, offset, elements
_MAGIC = b"SGF1"
INLINE_ELEMENTS = 256 << 10
"""Frames up to this size are sent by the caller itself when nothing waits before them, as far as the socket takes them
at once: waking the thread costs more. Two ranks, all-reduce of 1 MB: 1.3 to 3.1 GB/s without, 3.7 with."""
INLINE_BYTES = 1 << 20
"""What is written together inside :meth:`TcpSender.corked`."""
MAX_FRAME_BYTES = 256 << 20
"""Larger frames are refused before any memory is set aside for them."""
POLL_S = 0.5  # how often a waiting read looks at its deadline
_Outgoing = tuple[int, int, int, int, Pieces, int] | list[memoryview]
"""A frame to build, or the rest of one."""


def tune(sock: socket.socket) -> None:
    """Sends small frames at once, and notices a peer whose machine is gone within about five seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def is_readable(sock: socket.socket) -> bool:
    """Whether a read would not wait."""
    poll = select.poll()
    try:
        poll.register(sock, select.POLLIN)
    except ValueError:  # it is closed
        return True
    return bool(poll.poll(0))


class TcpSender:
    """Implements :class:`stratagem.rpc.lane.SendingLane`.

    Args:
        sock: connected; the lane owns it.
        peer: task id at the other end, for messages.
        meter: counts bytes.
    """

    name = "tcp"

    def __init__(self, sock: socket.socket, peer: str, meter: BytesMeter) -> None:
        close_in_children(sock)
        sock.settimeout(None)
        self._sock = sock
        self._secure = isinstance(sock, ssl.SSLSocket)
        self._peer = peer
        self._meter = meter
        self._outbox: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._sent = threading.Condition()
        self._num_waiting = 0
        self._cork: list[memoryview] | None = None
        self.waiting_bytes = 0
        """Of frames that are read from their tensors and not sent."""
        self._error: StratagemError | None = None
        self._writer = threading.Thread(target=self._write, name=f"lane-to-{peer}", daemon=True)
        self._writer.start()

    @property
    def alive(self) -> bool:
        return self._error is None

    def send(self, kind: int, transfer: int, group: int, offset: int, pieces: Pieces, num_elements: int) -> None:
        if self._error is not None:
            raise self._error
        item: _Outgoing = (kind, transfer, group, offset, pieces, num_elements)
        if self._cork is not None and num_elements <= INLINE_BYTES:
            self._cork += _encode(item)
            if sum(view.nbytes for view in self._cork) > INLINE_BYTES:
                views, self._cork = self._cork, []
                self._queue(views)
        elif num_elements <= INLINE_ELEMENTS and not self._num_waiting and not self._secure:
            self._queue(_encode(item))
        else:
            if self._cork is not None:
                self.uncork()
            self._queue(item)

    @contextlib.contextmanager
    def corked(self) -> Iterator[None]:
        """See :class:`stratagem.rpc.lane.Lane`."""
        self._cork = []
        try:
            yield
        finally:
            with contextlib.suppress(PeerUnavailableError):  # whoever waits for an answer hears of it
                self.uncork()

    def uncork(self) -> None:
        """Sends what waits; nothing waits from now on."""
        views, self._cork = self._cork, None
        if views:
            self._queue(views)

    def _queue(self, item: _Outgoing) -> None:
        """Sends at once what is ready, as far as the socket takes it; leaves the rest to the thread."""
        if isinstance(item, list) and not self._num_waiting and not self._secure:
            item = self._send_now(item)
            if not item:
                return
        with self._sent:
            self._num_waiting += 1
            self.waiting_bytes += _num_bytes(item)
        self._outbox.put(item)

    def flush(self, deadline: float) -> None:
        with self._sent:
            while self._num_waiting:
                if self._error is not None:
                    raise self._error
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerUnavailableError(f"{self._peer} takes no frames")
                self._sent.wait(left)

    def close(self, reason: str) -> None:
        self._fail(PeerUnavailableError(reason))
        if threading.current_thread() is not self._writer:
            self._writer.join(5.0)

    def _send_now(self, views: list[memoryview]) -> list[memoryview]:
        """Hands the kernel what it takes at once; returns the rest."""
        try:
            num_sent = self._sock.sendmsg(views, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return views
        except OSError as error:
            self._fail(PeerUnavailableError(f"the lane to {self._peer} broke: {error}"))
            raise self._error or error from None
        self._meter.sent_bytes += num_sent
        return _after(views, num_sent)

    def _write(self) -> None:
        try:
            while (item := self._outbox.get()) is not None:
                num_bytes = _num_bytes(item)
                self._send_all(item if isinstance(item, list) else _encode(item))
                del item
                with self._sent:
                    self._num_waiting -= 1
                    self.waiting_bytes -= num_bytes
                    self._sent.notify_all()
        except OSError as error:
            self._fail(PeerUnavailableError(f"the lane to {self._peer} broke: {error}"))
        finally:
            self._sock.close()

    def _send_all(self, views: Sequence[memoryview]) -> None:
        self._meter.sent_bytes += sum(view.nbytes for view in views)
        if self._secure:
            for view in views:
                self._sock.sendall(view)
            return
        left = [view for view in views if view.nbytes]
        while left:
            left = _after(left, self._sock.sendmsg(left))

    def _fail(self, error: StratagemError) -> None:
        with self._sent:
            if self._error is None:
                self._error = error
            self._sent.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a write that the peer does not take
        self._outbox.put(None)


def _num_bytes(item: _Outgoing) -> int:
    return sum(view.nbytes for view in item) if isinstance(item, list) else 0


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of ``views`` after their first ``num_bytes``."""
    for index, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= view.nbytes
    return []


def _encode(item: _Outgoing) -> list[memoryview]:
    assert not isinstance(item, list)
    kind, transfer, group, offset, pieces, num_elements = item
    tensors = pieces() if num_elements else ()
    dtype = tensors[0].dtype if tensors else torch.uint8
    header = _HEADER.pack(_MAGIC, kind, to_wire_dtype(dtype), group, transfer, offset, num_elements)
    return [memoryview(header), *(byte_view(tensor) for tensor in tensors)]


class TcpReceiver:
    """Implements :class:`stratagem.rpc.lane.ReceivingLane`; reads in the caller's thread, straight into ``into``.

    Args:
        sock: connected; the lane owns it.
        peer: task id at the other end, for messages.
        meter: counts bytes.
        max_inbox_bytes: frames that came before they were asked for may not take more.
        on_wait: called now and then while a read waits; what it raises ends the wait.
    """

    name = "tcp"

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        meter: BytesMeter,
        max_inbox_bytes: int = INBOX_BYTES,
        on_wait: Callable[[], None] = nothing,
    ) -> None:
        close_in_children(sock)
        self._max_inbox_bytes = max_inbox_bytes
        self._on_wait = on_wait
        self._sock = sock
        self._secure = isinstance(sock, ssl.SSLSocket)
        if self._secure:
            sock.settimeout(POLL_S)
        else:
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(POLL_S * 1e6)))
        self._peer = peer
        self._meter = meter
        self._header = bytearray(_HEADER.size)
        self._header_view = memoryview(self._header)
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
                frame = self._next(transfer, deadline, into)
                if transfer in (0, frame.transfer):
                    return frame
                if frame.transfer > self._forgotten:
                    self._early.append(frame)
                    check_inbox(self._peer, sum(each.tensor.nbytes for each in self._early), self._max_inbox_bytes)

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
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a read that waits
        with self._reading:
            self._sock.close()

    def _next(self, transfer: int, deadline: float, into: torch.Tensor | None) -> Frame:
        self._fill(self._header_view, transfer, deadline)
        magic, kind, wire, group, number, offset, num_elements = _HEADER.unpack(self._header)
        dtype = from_wire_dtype(wire)
        if magic != _MAGIC or num_elements * dtype.itemsize > MAX_FRAME_BYTES:
            raise FrameError(
                f"{self._peer} sent no frame: expected {_MAGIC!r} and at most {MAX_FRAME_BYTES:,} bytes, got {magic!r} "
                f"and {num_elements:,} elements of {dtype}"
            )
        if into is None or (transfer and number != transfer):
            tensor = torch.empty(num_elements, dtype=dtype)
        elif into.dtype != dtype and num_elements:
            raise FrameError(f"expected {into.dtype} from {self._peer}, got {dtype}")
        elif num_elements > into.numel():
            raise FrameError(f"expected at most {into.numel():,} elements from {self._peer}, got {num_elements:,}")
        else:
            tensor = into[:num_elements]
        if num_elements:
            self._fill(byte_view(tensor), transfer, deadline)
        self._meter.received_bytes += _HEADER.size + num_elements * dtype.itemsize
        return Frame(kind, number, group, offset, tensor)

    def _fill(self, view: memoryview, transfer: int, deadline: float) -> None:
        """Fills ``view`` from the socket."""
        flags = 0 if self._secure else socket.MSG_WAITALL
        num_read, num_bytes = 0, view.nbytes
        while num_read < num_bytes:
            if self._error is not None:
                raise self._error
            try:
                count = self._sock.recv_into(view[num_read:] if num_read else view, 0, flags)
            except (BlockingIOError, TimeoutError):
                if time.monotonic() > deadline:  # a frame may be half read: nothing after it can be understood
                    self._error = PeerUnavailableError(f"{self._peer} sent no frame of transfer {transfer} in time")
                    raise self._error from None
                self._on_wait()
                continue
            except OSError as error:
                raise self._error or PeerUnavailableError(f"the lane from {self._peer} broke: {error}") from None
            if not count:
                raise self._error or PeerUnavailableError(f"{self._peer} closed the lane")
            num_read += count


class TcpLane(TcpSender):
    """Implements :class:`stratagem.rpc.lane.Lane` with a socket for each direction."""

    def __init__(
        self,
        outward: socket.socket,
        inward: socket.socket,
        peer: str,
        meter: BytesMeter,
        max_inbox_bytes: int = INBOX_BYTES,
        on_wait: Callable[[], None] = nothing,
    ) -> None:
        super().__init__(outward, peer, meter)
        self._receiver = TcpReceiver(inward, peer, meter, max_inbox_bytes, on_wait)

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
