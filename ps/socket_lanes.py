"""The tcp and shm lanes of a ps: sockets that workers open with a token, each with a thread that stages frames."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from stratagem.errors import FencedError, LimitError, PeerUnavailableError, StratagemError
from stratagem.ps.frames import WEIGHTS
from stratagem.ps.lane_requests import LaneRequests
from stratagem.ps.published import HeldFrame
from stratagem.ps.requests import Family, Purpose, Sender
from stratagem.ps.store import Store
from stratagem.rpc import tcp_lane
from stratagem.rpc.frame_memory import FrameMemory
from stratagem.rpc.lane import Corked, LentPiece, LentPieces, Pieces
from stratagem.rpc.lane_listener import MAX_LANES_PER_PEER, LaneListener, LaneTicket
from stratagem.rpc.lent_slots import Lender
from stratagem.rpc.logs import THROTTLE
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.shm_lane import ShmSender
from stratagem.rpc.shm_receiver import INLINE_BYTES, ShmReceiver
from stratagem.rpc.slots import ShmBlock, SlotPool
from stratagem.rpc.socket_lane import SocketReceiver
from stratagem.rpc.tcp_lane import TcpReceiver, TcpSender

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=TcpSender | ShmSender)

CONNECT_S = 10.0
"""Seconds that a worker has to come in after it asked for the first ticket."""


class _SocketReplies(Generic[S]):
    """Over two sockets, which close together. When a lane closes, its worker reconnects by itself, or is dead."""

    def __init__(self, sender: S, receiver: SocketReceiver) -> None:
        self._sender = sender
        self._receiver = receiver
        self._closed = False

    def corked(self) -> Corked:
        return self._sender.corked()

    def is_active(self) -> bool:
        return not self._closed and self._receiver.is_connected

    def answer(self, kind: int, transfer: int, message: bytes) -> None:
        try:
            self._sender.send(kind, transfer, 0, 0, lambda: (message,), len(message))
        except StratagemError:
            return

    def close(self, error: StratagemError) -> None:
        self._closed = True
        self._sender.close(str(error))
        self._receiver.close(str(error))


class TcpReplies(_SocketReplies[TcpSender]):
    """Implements :class:`stratagem.ps.published.ReplyLane`: sends from the weights themselves until they change."""

    def __init__(
        self, sender: TcpSender, receiver: SocketReceiver, max_unread_bytes: Callable[[], int], memory: FrameMemory
    ) -> None:
        super().__init__(sender, receiver)
        self._memory = memory
        self._max_unread_bytes = max_unread_bytes
        self._guard = threading.Lock()
        self._unread_bytes = 0
        self._limit = 0
        """Of bytes unread, as it was when it mattered last: it grows with what the ps holds."""

    def room(self, group: int, offset: int, num_elements: int, dtype: torch.dtype) -> HeldFrame:
        return HeldFrame(group, offset, torch.empty(num_elements, dtype=dtype))

    def hold(self, transfer: int, group: int, offset: int, piece: torch.Tensor) -> HeldFrame:
        if piece.numel() <= tcp_lane.INLINE_ELEMENTS:  # which may leave at once, or wait in the cork
            return HeldFrame(group, offset, piece.clone())
        return HeldFrame(group, offset, piece, LentPiece(piece, self._memory))

    def send(self, transfer: int, frame: HeldFrame) -> None:
        tensor = frame.tensor
        num_bytes = tensor.nbytes
        if num_bytes > tcp_lane.INLINE_BYTES:
            self._sender.uncork()
        with self._guard:
            self._unread_bytes += num_bytes
            unread = self._unread_bytes + self._sender.waiting_bytes
        if unread > self._limit:
            self._limit = limit = self._max_unread_bytes()
            if unread > limit:
                self.close(LimitError(f"expected frames to be read, {unread:,} bytes wait (max_peer_bytes {limit:,})"))
        pieces: Pieces = functools.partial(self._leaving, frame)  # which keeps the memory the frame lies in
        if isinstance(frame.origin, LentPiece):
            pieces = LentPieces(frame.origin, pieces)
        try:
            self._sender.send(WEIGHTS, transfer, frame.group, frame.offset, pieces, tensor.numel())
        except PeerUnavailableError:
            return

    def _leaving(self, frame: HeldFrame) -> tuple[torch.Tensor]:
        with self._guard:
            self._unread_bytes -= frame.tensor.nbytes
        return (frame.tensor,)


class ShmReplies(_SocketReplies[ShmSender]):
    """Implements :class:`stratagem.ps.published.ReplyLane`: workers on this host read copies in place."""

    def __init__(self, sender: ShmSender, receiver: SocketReceiver, memory: FrameMemory) -> None:
        super().__init__(sender, receiver)
        self._memory = memory
        memory.watch(sender.collect)

    def close(self, error: StratagemError) -> None:
        super().close(error)
        self._memory.watch_no_more(self._sender.collect)

    def room(self, group: int, offset: int, num_elements: int, dtype: torch.dtype) -> HeldFrame:
        if num_elements * dtype.itemsize > INLINE_BYTES:
            with contextlib.suppress(StratagemError):  # the lane is closed; others may still want the version
                return HeldFrame(group, offset, *self._sender.room(num_elements, dtype))
        return HeldFrame(group, offset, torch.empty(num_elements, dtype=dtype))

    def hold(self, transfer: int, group: int, offset: int, piece: torch.Tensor) -> HeldFrame:
        frame = self.room(group, offset, piece.numel(), piece.dtype)
        frame.tensor.copy_(piece)
        return frame

    def send(self, transfer: int, frame: HeldFrame) -> None:
        try:
            tensor, slot = frame.tensor, frame.origin
            if isinstance(slot, ShmBlock):
                self._sender.send_slot(WEIGHTS, transfer, frame.group, frame.offset, tensor, slot)
            else:
                self._sender.send(WEIGHTS, transfer, frame.group, frame.offset, lambda: (tensor,), tensor.numel())
        except StratagemError:
            return


class SocketLanes:
    """Opens and serves the lanes, at ``host``; ``store`` stages incoming frames and sends what is requested."""

    def __init__(
        self, store: Store, host: str, security: Security = OPEN, max_lanes_per_peer: int = MAX_LANES_PER_PEER
    ) -> None:
        self._store = store
        self._max_lanes_per_peer = max_lanes_per_peer
        self._listener = LaneListener(host, security, max_lanes_per_peer)
        self._pool: SlotPool | None = None
        self._num_open = 0
        """Lanes that use it, or memory of the store."""
        self._guard = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._numbers = itertools.count(1)
        self._expected: dict[tuple[str, int], int] = {}
        """The newest lane of each sender that is expected: it may have asked for another, of another family, before."""

    def open(self, sender: Sender, family: Family, purpose: Purpose) -> LaneTicket:
        """A ticket in for one direction; with the ticket "up" the lane begins. FencedError: the incarnation was
        declared dead. LimitError: too many lanes of this task, open or not. PeerUnavailableError: "down" comes first,
        or too late. SegmentError: there is no shared memory here; take another lane."""
        self._store.state.senders.check(sender)
        if purpose == "down":
            with self._guard:
                number = self._expected.get(sender.key, 0)
                if not number:
                    raise PeerUnavailableError(f"expected {sender} to ask for up first, and soon for down")
                return self._listener.expect((*sender.key, number, purpose), family, sender.task)
        name = f"lane-{sender.task}"
        with self._guard:
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            num_lanes = sum(thread.name == name for thread in self._threads)
        if num_lanes >= self._max_lanes_per_peer:
            raise LimitError(f"{sender.task} has {num_lanes} lanes here, which is max_lanes_per_peer")
        if family == "shm":
            self._shared().take(1)
        number = next(self._numbers)
        ticket = self._listener.expect((*sender.key, number, purpose), family, sender.task)
        thread = threading.Thread(target=self._serve, args=(sender, family, number), name=name, daemon=True)
        with self._guard:
            self._expected[sender.key] = number
            thread.start()
            self._threads.add(thread)
        return ticket

    def close(self) -> None:
        """Lets nobody in any more, and waits for the lanes, which the store has closed."""
        self._listener.close()
        with self._guard:
            threads = [*self._threads]
        for thread in threads:
            thread.join(5.0)
        if self._pool is not None:
            self._pool.close()

    def _shared(self) -> SlotPool:
        with self._guard:
            self._pool = self._pool or SlotPool()
            return self._pool

    def _serve(self, sender: Sender, family: Family, number: int) -> None:
        deadline = time.monotonic() + CONNECT_S
        try:
            up = self._listener.wait((*sender.key, number, "up"), deadline)
            try:
                down = self._listener.wait((*sender.key, number, "down"), deadline)
            except BaseException:
                up.close()
                raise
        except PeerUnavailableError as error:
            text = "%s requested a %s lane and did not connect: %s"
            THROTTLE.log(logger, logging.INFO, "no show", text, sender, family, error)
            return
        finally:
            with self._guard:
                if self._expected.get(sender.key) == number:
                    del self._expected[sender.key]
            self._listener.forget(lambda who: who[:-1] == (*sender.key, number))  # both ways

        with self._guard:
            self._num_open += 1
        try:
            self._serve_over(up, down, sender, family)
        finally:
            self._ended()

    def _serve_over(self, up: socket.socket, down: socket.socket, sender: Sender, family: Family) -> None:
        store, meter, unread_bytes = self._store, self._store.state.lanes, self._store.state.peer_bytes
        receiver: SocketReceiver
        replies: TcpReplies | ShmReplies
        if family == "tcp":
            receiver = TcpReceiver(up, sender.task, meter, memory=store.state.memory)
            replies = TcpReplies(TcpSender(down, sender.task, meter), receiver, unread_bytes, store.state.memory)
        else:
            pool = self._shared()
            lender = Lender(pool, store.state.keeps_slots, unread_bytes)
            receiver = ShmReceiver(up, sender.task, meter, lender=lender)
            shown = functools.partial(store.state.memory.note, kept_bytes=0)
            outward = ShmSender(down, sender.task, meter, unread_bytes, pool, patient=False, on_shown=shown)
            replies = ShmReplies(outward, receiver, store.state.memory)
        requests = LaneRequests(store, sender, replies)
        try:
            store.open_lane(sender, replies)
            while True:
                requests.take([receiver.receive(0, math.inf)])
        except (PeerUnavailableError, FencedError):
            pass
        except StratagemError as error:
            requests.refused(error)
            THROTTLE.log(logger, logging.WARNING, error.reason, "a frame from %s was refused: %s", sender, error)
        finally:
            store.close_lane(sender, replies)
            replies.close(PeerUnavailableError("the lane is over"))

    def _ended(self) -> None:
        """Of what was for frames on their way nothing is kept when the last lane is gone."""
        with self._guard:
            self._num_open -= 1
            if self._num_open:
                return
            self._store.give_back()
            if self._pool is not None:
                self._pool.close()
                self._pool = None
