"""The shm lane: frames are in shared memory; a Unix socket carries their places, and small frames themselves.

The sender copies a frame once into a slot of a segment that the receiver maps; the receiver's tensor is a view on that
slot, and the slot returns to the sender by itself when its last view is gone. If the receiver lends slots
(:mod:`stratagem.rpc.lent_slots`), large frames use these.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
import threading
from collections.abc import Callable, Sequence

import torch

from stratagem.errors import LimitError, PeerUnavailableError, SegmentError, StratagemError
from stratagem.rpc.codec import as_tensors, byte_view, dtype_of, to_wire_dtype
from stratagem.rpc.lane import Payload, nothing
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.lent_slots import LENT, LENT_SEGMENT, LENT_SLOT, RELEASE, Borrowed
from stratagem.rpc.segment import receive_descriptor_into
from stratagem.rpc.shm_receiver import BORROWED, FRAME, INLINE, INLINE_BYTES, MESSAGE, SEGMENT, WANT, ShmReceiver
from stratagem.rpc.slots import ShmBlock, SlotPool, slot_bytes
from stratagem.rpc.socket_lane import MAX_VIEWS, SocketSender, TwoSocketLane, wake_reads

_WORDS_BYTES = 4096
_COUNT = struct.Struct("=i")
MIN_BORROWED_BYTES = 1 << 20
"""Smaller frames lie in the sender's own memory."""
MAX_INLINE_UNREAD_BYTES = 64 << 10
"""Who must not wait fills no socket of a slow reader: beyond this, an impatient sender puts small frames into slots."""


class ShmSender(SocketSender):
    """Implements :class:`stratagem.rpc.lane.SendingLane`.

    Args:
        sock: a connected Unix socket; the lane owns it.
        max_bytes: limit of unread bytes; asked when it matters.
        pool: memory to send from, shared with other lanes; None: this lane's own.
        patient: wait for the receiver when that much is unread; False: break the lane (``LimitError``).
        on_shown: gets the number of bytes by which the memory that receivers see grows or shrinks; of a shared pool.
        on_wait: if given, large frames use memory that the receiver lends, and this is called now and then while it
            lends none; an exception from it ends the wait.

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
        on_shown: Callable[[int], None] | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(sock, peer, meter.lane(peer, self.name))
        self.pool = pool or SlotPool()
        self._owns_pool = pool is None
        self._max_bytes = max_bytes
        self._patient = patient
        self._turn = threading.Lock()
        self._num_announced = 0
        self._on_shown = on_shown
        self._on_wait = on_wait
        self._collecting = threading.Lock()
        """Of what follows, and of what the receiver says; taken inside ``_turn``."""
        self._words = memoryview(bytearray(_WORDS_BYTES + RELEASE.size + LENT.size))
        self._borrowed = Borrowed()
        self._unread: dict[int, list[ShmBlock]] = {}
        self._unread_bytes = 0
        self._breaking = _Breaking(self)
        wake_reads(sock)
        self.pool.take(1)  # finds out here and now whether there is shared memory

    def takes_at_once(self, num_bytes: int) -> bool:
        return self._has_little_unread() and self._unread_bytes + num_bytes <= self._max_bytes()

    def send(self, kind: int, transfer: int, group: int, offset: int, pieces: Payload, num_elements: int) -> None:
        if self._error is not None:
            raise self._error
        parts = pieces() if num_elements else ()
        dtype = dtype_of(parts[0]) if parts else torch.uint8
        num_bytes = num_elements * dtype.itemsize
        if parts and num_bytes <= INLINE_BYTES and (self._patient or self._has_little_unread()):
            wire = to_wire_dtype(dtype)
            views = [memoryview(MESSAGE.pack(INLINE, kind, wire, group, transfer, offset, num_elements, 0, 0, 0))]
            views += map(byte_view, parts)
            with self._turn, self._breaking:
                self._write(views, MESSAGE.size + num_bytes)
                self._meter.sent_frames += 1
                self._meter.sent_bytes += num_bytes
        else:
            self.send_slot(kind, transfer, group, offset, *self.fill(as_tensors(parts)))

    def _has_little_unread(self) -> bool:
        if self._error is not None:
            return True
        try:
            (unread,) = _COUNT.unpack(fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(_COUNT.size)))
        except (OSError, ValueError):  # closed by another thread: the write will say so
            return True
        return bool(unread <= MAX_INLINE_UNREAD_BYTES)

    def uncork(self) -> None:
        with self._turn:
            views, self._cork = self._cork, None
            if views:
                with contextlib.suppress(StratagemError), self._breaking:
                    self._write(views, self._corked_bytes)

    def _write(self, views: list[memoryview], num_bytes: int) -> None:
        """Writes to the socket, or puts it with what waits."""
        if self._cork is not None:
            self._cork += views
            self._corked_bytes += num_bytes
            if self._corked_bytes <= INLINE_BYTES:
                return
            num_bytes, views, self._cork, self._corked_bytes = self._corked_bytes, self._cork, [], 0
        self._send(views, num_bytes)

    def _send(self, views: Sequence[memoryview], num_bytes: int) -> None:
        num_sent = self._sock.sendmsg(views if len(views) <= MAX_VIEWS else [b"".join(views)])
        if num_sent < num_bytes:  # a signal came in between
            self._sock.sendall(b"".join(views)[num_sent:])

    def fill(self, pieces: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ShmBlock | None]:
        """Copies pieces, one after the other, into a slot; gives them as one flat tensor there."""
        num_elements = sum([piece.numel() for piece in pieces])
        if not num_elements:
            return torch.empty(0, dtype=pieces[0].dtype if pieces else torch.uint8), None
        target, slot = self.room(num_elements, pieces[0].dtype)
        flat = [piece.detach().view(-1) for piece in pieces]
        if len(flat) == 1:
            target.copy_(flat[0])
        else:
            torch.cat(flat, out=target)
        return target, slot

    def room(self, num_elements: int, dtype: torch.dtype) -> tuple[torch.Tensor, ShmBlock]:
        """A slot for so many elements (at least one), and those as a flat tensor there, to be filled."""
        num_bytes = num_elements * dtype.itemsize
        with self._turn, self._breaking:
            if self._on_wait is not None and num_bytes >= MIN_BORROWED_BYTES:
                slot = self._borrow(slot_bytes(num_bytes), self._on_wait)
            else:
                self._make_room(num_bytes)
                slot = self.pool.take(num_bytes)
        return slot.memory[:num_bytes].view(dtype), slot

    def send_slot(
        self, kind: int, transfer: int, group: int, offset: int, tensor: torch.Tensor, slot: ShmBlock | None
    ) -> None:
        """Shows the receiver what lies at the beginning of a slot of this lane's pool; copies nothing."""
        wire = to_wire_dtype(tensor.dtype)
        place = (slot.segment, slot.at, slot.number) if slot is not None else (0, 0, 0)
        with self._turn, self._breaking:
            is_borrowed = slot is not None and slot.is_borrowed
            if slot is not None and not is_borrowed:
                self._announce(slot.segment)
                with self._collecting:
                    self._unread.setdefault(slot.number, []).append(slot)
                    self._unread_bytes += slot.size
                    self._show(slot, 1)
            magic = BORROWED if is_borrowed else FRAME
            message = MESSAGE.pack(magic, kind, wire, group, transfer, offset, tensor.numel(), *place)
            if is_borrowed and slot is not None and self._borrowed.must_ask(slot.size):  # for the next one
                message += _wish(slot.size)
            self._write([memoryview(message)], len(message))
            self._meter.sent_frames += 1
            self._meter.sent_bytes += tensor.nbytes

    def flush(self, deadline: float) -> None:
        if self._error is not None:  # a frame has left its memory when send returns
            raise self._error

    def close(self, reason: str) -> None:
        self._fail(PeerUnavailableError(reason))
        with self._turn:
            self._sock.close()
            with self._collecting:
                for slots in self._unread.values():
                    for slot in slots:
                        self._show(slot, -1)
                self._unread.clear()
                self._borrowed.close()
            if self._owns_pool:
                self.pool.close()

    def collect(self) -> None:
        """Takes back what the receiver has let go of; callable in any thread."""
        with contextlib.suppress(StratagemError), self._breaking:
            self._collect(wait=False)

    def _show(self, slot: ShmBlock, num_more: int) -> None:
        if self._on_shown is not None and (change := self.pool.show(slot, num_more)):
            self._on_shown(change)

    def _borrow(self, size: int, on_wait: Callable[[], None]) -> ShmBlock:
        self._collect(wait=False)
        while (slot := self._borrowed.take(size)) is None:
            wish = [memoryview(_wish(size))] if self._borrowed.must_ask(size) else []
            if self._cork is not None:  # what waits there, the receiver has to have
                wish, self._cork, self._corked_bytes = [*self._cork, *wish], [], 0
            if wish:
                self._send(wish, sum(map(len, wish)))
            on_wait()
            self._collect(wait=True)
        return slot

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
            message = MESSAGE.pack(SEGMENT, 0, 0, 0, 0, 0, memory.tensor.numel(), number, 0, 0)
            memory.send_to(self._sock, message)
            if self._owns_pool:
                memory.stop_sharing()
            self._num_announced += 1

    def _collect(self, wait: bool) -> None:
        """Takes back the slots that the receiver has let go of, and those that it lends."""
        with self._collecting:
            words, flags = self._words, 0 if wait else socket.MSG_DONTWAIT
            try:
                stop, descriptor = receive_descriptor_into(self._sock, words[:_WORDS_BYTES], flags)
            except BlockingIOError:
                if self._error is not None:
                    raise self._error from None
                return
            if not stop:
                raise ConnectionError("the peer closed it")
            at = 0
            try:
                while at < stop:
                    stop = self._complete(at + RELEASE.size, stop)
                    (number,) = RELEASE.unpack_from(words, at)
                    at += RELEASE.size
                    if number in (LENT_SEGMENT, LENT_SLOT) and self._on_wait is not None:
                        stop = self._complete(at + LENT.size, stop)
                        segment, slot, first, size = LENT.unpack_from(words, at)
                        at += LENT.size
                        if number == LENT_SLOT:
                            self._borrowed.came(segment, slot, first, size)
                        elif descriptor is not None:
                            shared, descriptor = descriptor, None  # which closes it, whatever it is
                            self._borrowed.share(shared, segment, size)
                    else:
                        self._let_go(number)
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    def _complete(self, wanted: int, stop: int) -> int:
        """Reads on until so many bytes of what the receiver says are here; how many are."""
        while stop < wanted:
            count = self._sock.recv_into(self._words[stop:wanted])
            if not count:
                raise ConnectionError("the peer closed it")
            stop += count
        return stop

    def _let_go(self, number: int) -> None:
        slots = self._unread.get(number)
        if not slots:
            raise ConnectionError(f"the peer released slot {number}, which it did not hold")
        slot = slots.pop()
        self._unread_bytes -= slot.size
        self._show(slot, -1)
        if not slots:
            del self._unread[number]

    def _fail(self, error: StratagemError) -> StratagemError:
        if self._error is None:
            self._error = error
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        return self._error


class _Breaking:
    """Inside, an error of the socket or of the memory ends the lane. A class, because it is entered for every frame."""

    __slots__ = ("_lane",)

    def __init__(self, lane: ShmSender) -> None:
        self._lane = lane

    def __enter__(self) -> None:
        if self._lane._error is not None:
            raise self._lane._error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, OSError):
            raise self._lane._fail(PeerUnavailableError(f"the lane to {self._lane._peer} broke: {error}")) from None
        if isinstance(error, SegmentError):
            why = f"the lane to {self._lane._peer} cannot grow: {error}"
            raise self._lane._fail(PeerUnavailableError(why)) from None


def _wish(num_bytes: int) -> bytes:
    return MESSAGE.pack(WANT, 0, 0, 0, 0, 0, num_bytes, 0, 0, 0)


class ShmLane(TwoSocketLane, ShmSender):
    def __init__(
        self,
        outward: socket.socket,
        inward: socket.socket,
        peer: str,
        meter: BytesMeter,
        max_bytes: Callable[[], int],
        on_wait: Callable[[], None] = nothing,
    ) -> None:
        ShmSender.__init__(self, outward, peer, meter, max_bytes, on_wait=on_wait)
        self._receiver = ShmReceiver(inward, peer, meter, on_wait)
