"""What the socket lanes, tcp and shm, share: a sender, reading one socket, and a lane made of two."""

from __future__ import annotations

import abc
import contextlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from stratagem.errors import PeerUnavailableError, StratagemError
from stratagem.rpc.codec import Frame
from stratagem.rpc.lane import Corkable, Place
from stratagem.rpc.lane_meter import BytesMeter, LaneMeter
from stratagem.rpc.spin import Spin

POLL_S = 0.5
"""How often a waiting read looks at its deadline."""
AHEAD_BYTES = 8 << 10
"""Read together with a header, at most: what of a large frame comes with it is copied once more."""
MAX_VIEWS = os.sysconf("SC_IOV_MAX")
"""What one ``sendmsg`` takes."""

Receive = Callable[[memoryview, bool, int, float], int]
"""One read into memory: whether to wait until it is full, for which transfer, until when. Gives at least a byte."""


_in_children: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> None:
    """Closes ``sock`` in every child that is forked from now on; the connection itself goes on here.

    A forked child (a DataLoader's worker) has copies of all descriptors (docs/protocol.md 28): with them open a peer
    would not notice that this process died, and an object that the child's garbage collector frees could speak in this
    process's name.
    """
    _in_children.add(sock)


def _close_all() -> None:
    for sock in list(_in_children):
        sock.close()


os.register_at_fork(after_in_child=_close_all)


def wake_reads(sock: socket.socket) -> None:
    """A read that waits ends every ``POLL_S`` with ``BlockingIOError``."""
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(POLL_S * 1e6)))


def is_readable(sock: socket.socket) -> bool:
    """Whether a read would not wait."""
    poll = select.poll()
    try:
        poll.register(sock, select.POLLIN)
    except ValueError:  # it is closed
        return True
    return bool(poll.poll(0))


class ReadAhead:
    """The bytes of a stream: headers by their format, payloads into their place. Small frames that came together take
    one read. For one thread at a time."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._memory = memoryview(bytearray(AHEAD_BYTES))
        self._first = self._stop = 0
        """Of ``_memory``, what was read and not asked for."""

    def __bool__(self) -> bool:
        """Whether bytes are here that nobody has asked for."""
        return self._first < self._stop

    def unpack(self, form: struct.Struct, transfer: int, deadline: float) -> tuple[Any, ...]:
        """The next fields; waits for them."""
        while (num_bytes := self._stop - self._first) < form.size:
            if self._first:
                self._memory[:num_bytes] = self._memory[self._first : self._stop]
                self._first, self._stop = 0, num_bytes
            self._stop += self._receive(self._memory[num_bytes:], False, transfer, deadline)
        fields = form.unpack_from(self._memory, self._first)
        self._first += form.size
        return fields

    def take(self, num_bytes: int) -> bytearray | None:
        """The next bytes if they are here already, as those of a small frame mostly are; else nothing."""
        stop = self._first + num_bytes
        if stop > self._stop:
            return None
        taken = bytearray(self._memory[self._first : stop])
        self._first = stop
        return taken

    def fill(self, view: memoryview, transfer: int, deadline: float) -> None:
        """Writes the next bytes into ``view``; waits for them."""
        wanted, num_bytes = view.nbytes, self._stop - self._first
        if num_bytes > wanted:
            num_bytes = wanted
        view[:num_bytes] = self._memory[self._first : self._first + num_bytes]
        self._first += num_bytes
        while num_bytes < wanted:
            num_bytes += self._receive(view[num_bytes:], True, transfer, deadline)


class SocketReceiver(abc.ABC):
    """Implements :class:`stratagem.rpc.lane.ReceivingLane`; reads in the caller's thread. :meth:`_next` knows the
    format of a frame. It owns the connected socket; ``on_wait`` is called now and then while a read waits: an exception
    from it ends the wait."""

    name: str
    _spin: Spin | None = None
    """Looks for a moment before a wait sleeps, by ``_look``."""
    _look: Callable[[], object]

    def __init__(self, sock: socket.socket, peer: str, meter: BytesMeter, on_wait: Callable[[], None]) -> None:
        close_in_children(sock)
        self._sock = sock
        self._peer = peer
        self._meter = meter.lane(peer, self.name)
        self._on_wait = on_wait
        self._ahead = ReadAhead(self._receive)
        self._early: list[Frame] = []
        self._forgotten = 0
        self._error: StratagemError | None = None
        self._reading = threading.Lock()

    def receive(self, transfer: int, deadline: float, into: torch.Tensor | Place | None = None) -> Frame:
        for index, frame in enumerate(self._early):
            if transfer in (0, frame.transfer):
                return self._early.pop(index)
        with self._reading:
            while True:
                frame = self._next(transfer, deadline, into)
                if transfer in (0, frame.transfer):
                    return frame
                if frame.transfer > self._forgotten:
                    self._keep(frame)

    def forget(self, transfer: int) -> None:
        self._forgotten = max(self._forgotten, transfer)
        if self._early:
            self._early = [frame for frame in self._early if frame.transfer > self._forgotten]

    @property
    def readable(self) -> bool:
        return bool(self._early) or bool(self._ahead) or is_readable(self._sock)

    @property
    def is_connected(self) -> bool:
        """Whether the peer is at the other end: the kernel knows, while nobody reads."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return not poll.poll(0)

    def close(self, reason: str) -> None:
        if self._error is None:
            self._error = PeerUnavailableError(reason)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a read that waits
        with self._reading:
            self._sock.close()

    def _keep(self, frame: Frame) -> None:
        """It came before it was asked for."""
        self._early.append(frame)

    @abc.abstractmethod
    def _next(self, transfer: int, deadline: float, into: torch.Tensor | Place | None) -> Frame:
        """Reads a frame of any transfer; ``into`` is for one of ``transfer``."""

    @abc.abstractmethod
    def _read(self, view: memoryview, whole: bool) -> int:
        """Reads from the socket once; gives the number of bytes, 0 at its end."""

    def _receive(self, view: memoryview, whole: bool, transfer: int, deadline: float) -> int:
        """See :data:`Receive`."""
        if not whole and self._spin is not None:
            self._spin.until(self._look)
        while True:
            if self._error is not None:
                raise self._error
            try:
                count = self._read(view, whole)
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
            return count


class SocketSender(Corkable):
    """Implements :class:`stratagem.rpc.lane.SendingLane`; it owns the connected socket. ``peer``: task id there."""

    def __init__(self, sock: socket.socket, peer: str, meter: LaneMeter) -> None:
        close_in_children(sock)
        self._sock = sock
        self._peer = peer
        self._meter = meter
        self._error: StratagemError | None = None
        self._cork: list[memoryview] | None = None
        self._corked_bytes = 0

    @property
    def alive(self) -> bool:
        return self._error is None

    def takes_at_once(self, num_bytes: int) -> bool:
        return True

    def cork(self) -> None:
        self._cork, self._corked_bytes = [], 0

    @abc.abstractmethod
    def close(self, reason: str) -> None:
        """See :class:`stratagem.rpc.lane.SendingLane`."""


class TwoSocketLane(SocketSender):
    """Implements :class:`stratagem.rpc.lane.Lane` with a socket for each direction; its sender is the next base."""

    _receiver: SocketReceiver

    def receive(self, transfer: int, deadline: float, into: torch.Tensor | Place | None = None) -> Frame:
        if self._cork is not None:
            self.uncork()
        return self._receiver.receive(transfer, deadline, into)

    @property
    def readable(self) -> bool:
        return self._receiver.readable

    def forget(self, transfer: int) -> None:
        self._receiver.forget(transfer)

    def close(self, reason: str) -> None:
        self._receiver.close(reason)
        super().close(reason)  # type: ignore[safe-super]
