"""The tcp and shm lanes of a ps: sockets that workers open with a token, each lane with a thread that stages."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import select
import socket
import threading
import time
from collections.abc import Callable

import torch

from stratagem.errors import FencedError, LimitError, PeerUnavailableError, StratagemError
from stratagem.ps.frames import WEIGHTS
from stratagem.ps.lane_requests import LaneRequests
from stratagem.ps.published import HeldFrame
from stratagem.ps.requests import Family, Purpose, Sender
from stratagem.ps.store import Store
from stratagem.rpc import shm_lane, tcp_lane
from stratagem.rpc.lane import BytesMeter, ReceivingLane
from stratagem.rpc.lane_listener import MAX_LANES_PER_PEER, LaneListener, LaneTicket
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.shm_lane import ShmReceiver, ShmSender
from stratagem.rpc.slots import ShmBlock, SlotPool
from stratagem.rpc.tcp_lane import TcpReceiver, TcpSender
from stratagem.rpc.throttle import THROTTLE

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Seconds that a worker has to come in after it asked for the second ticket."""


class TcpReplies:
    """Implements :class:`stratagem.ps.published.ReplyLane`: sends from held copies without another one."""

    def __init__(self, sender: TcpSender, receiver: ReceivingLane, max_unread_bytes: Callable[[], int]) -> None:
        self._sender = sender
        self._receiver = receiver
        self._max_unread_bytes = max_unread_bytes
        self._guard = threading.Lock()
        self._unread_bytes = 0
        self.closed = False

    def hold(self, transfer: int, group: int, offset: int, piece: torch.Tensor) -> HeldFrame:
        return HeldFrame(group, offset, piece.clone())

    def send(self, transfer: int, frame: HeldFrame) -> None:
        tensor = frame.tensor
        if tensor.nbytes > tcp_lane.INLINE_BYTES:
            self._sender.uncork()
        with self._guard:
            self._unread_bytes += tensor.nbytes
            unread = self._unread_bytes + self._sender.waiting_bytes
        if unread > (limit := self._max_unread_bytes()):
            self.close(LimitError(f"expected frames to be read, {unread:,} bytes wait (max_peer_bytes {limit:,})"))
        try:
            self._sender.send(WEIGHTS, transfer, frame.group, frame.offset, lambda: self._leaving(tensor), len(tensor))
        except PeerUnavailableError:
            return  # closed: the worker comes back by itself, or is dead

    def corked(self) -> contextlib.AbstractContextManager[None]:
        return self._sender.corked()

    def answer(self, kind: int, transfer: int, message: bytes) -> None:
        payload = torch.frombuffer(message, dtype=torch.uint8)
        with contextlib.suppress(PeerUnavailableError):
            self._sender.send(kind, transfer, 0, 0, lambda: (payload,), len(payload))

    def close(self, error: StratagemError) -> None:
        self.closed = True
        self._sender.close(str(error))
        self._receiver.close(str(error))

    def _leaving(self, tensor: torch.Tensor) -> tuple[torch.Tensor]:
        with self._guard:
            self._unread_bytes -= tensor.nbytes
        return (tensor,)


class ShmReplies:
    """Implements :class:`stratagem.ps.published.ReplyLane`: workers on this host read held copies where they lie."""

    def __init__(self, sender: ShmSender, receiver: ReceivingLane) -> None:
        self._sender = sender
        self._receiver = receiver
        self.closed = False

    def hold(self, transfer: int, group: int, offset: int, piece: torch.Tensor) -> HeldFrame:
        if piece.nbytes <= shm_lane.INLINE_BYTES:
            return HeldFrame(group, offset, piece.clone())
        try:
            tensor, slot = self._sender.fill([piece])
        except StratagemError:
            return HeldFrame(group, offset, piece.clone())  # the lane is closed; others may still want the version
        return HeldFrame(group, offset, tensor, slot)

    def send(self, transfer: int, frame: HeldFrame) -> None:
        try:
            tensor, slot = frame.tensor, frame.origin
            if isinstance(slot, ShmBlock):
                self._sender.send_slot(WEIGHTS, transfer, frame.group, frame.offset, tensor, slot)
            else:
                self._sender.send(WEIGHTS, transfer, frame.group, frame.offset, lambda: (tensor,), len(tensor))
        except StratagemError:
            return  # closed: the worker comes back by itself, or is dead

    def corked(self) -> contextlib.AbstractContextManager[None]:
        return self._sender.corked()

    def answer(self, kind: int, transfer: int, message: bytes) -> None:
        payload = torch.frombuffer(message, dtype=torch.uint8)
        with contextlib.suppress(StratagemError):
            self._sender.send(kind, transfer, 0, 0, lambda: (payload,), len(payload))

    def close(self, error: StratagemError) -> None:
        self.closed = True
        self._sender.close(str(error))
        self._receiver.close(str(error))


@dataclasses.dataclass(frozen=True)
class SocketCall:
    """Implements :class:`stratagem.ps.state.Call`: while a request is served nobody reads, so the kernel is asked."""

    sock: socket.socket
    replies: TcpReplies | ShmReplies

    def is_active(self) -> bool:
        """Whether the worker is at the other end, and the lane is its newest."""
        if self.replies.closed:
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        return not poll.poll(0)


class SocketLanes:
    """Opens and serves them.

    Args:
        store: stages what comes and sends what is asked for.
        host: address to listen on.
        security: of this ps.
        max_lanes_per_peer: see ``PsConfig``.
    """

    def __init__(
        self, store: Store, host: str, security: Security = OPEN, max_lanes_per_peer: int = MAX_LANES_PER_PEER
    ) -> None:
        self._store = store
        self._max_lanes_per_peer = max_lanes_per_peer
        self._listener = LaneListener(host, security, max_lanes_per_peer)
        self._pool: SlotPool | None = None
        self._guard = threading.Lock()
        self._threads: set[threading.Thread] = set()

    def open(self, sender: Sender, family: Family, purpose: Purpose) -> LaneTicket:
        """A ticket in for one direction; with the ticket "down" the lane begins.

        Raises:
            FencedError: the process life was declared dead.
            LimitError: too many lanes of this task, open or not.
            SegmentError: there is no shared memory here; take another lane.
        """
        self._store.state.senders.check(sender)
        name = f"lane-{sender.task}"
        with self._guard:
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            num_lanes = sum(thread.name == name for thread in self._threads)
        if num_lanes >= self._max_lanes_per_peer:
            raise LimitError(f"{sender.task} has {num_lanes} lanes here, which is max_lanes_per_peer")
        if family == "shm":
            self._shared().take(1)
        ticket = self._listener.expect((*sender.life, purpose), family, sender.task)
        if purpose == "down":
            thread = threading.Thread(target=self._serve, args=(sender, family), name=name, daemon=True)
            thread.start()
            with self._guard:
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

    def _serve(self, sender: Sender, family: Family) -> None:
        deadline = time.monotonic() + CONNECT_S
        store, meter = self._store, BytesMeter()
        try:
            up = self._listener.wait((*sender.life, "up"), deadline)
            try:
                down = self._listener.wait((*sender.life, "down"), deadline)
            except BaseException:
                up.close()
                raise
        except PeerUnavailableError as error:
            text = "%s asked for a %s lane and did not come: %s"
            THROTTLE.log(logger, logging.INFO, "no show", text, sender, family, error)
            return

        def unread_bytes() -> int:
            return store.state.peer_bytes

        receiver: ReceivingLane
        replies: TcpReplies | ShmReplies
        if family == "tcp":
            receiver = TcpReceiver(up, sender.task, meter)
            replies = TcpReplies(TcpSender(down, sender.task, meter), receiver, unread_bytes)
        else:
            receiver = ShmReceiver(up, sender.task, meter)
            outward = ShmSender(down, sender.task, meter, unread_bytes, self._shared(), patient=False)
            replies = ShmReplies(outward, receiver)
        try:
            store.open_lane(sender, replies)
            requests = LaneRequests(store, sender, replies, SocketCall(up, replies))
            while True:
                requests.take(receiver.receive(0, math.inf))
        except (PeerUnavailableError, FencedError):
            pass
        except StratagemError as error:
            THROTTLE.log(logger, logging.WARNING, error.reason, "a frame from %s was refused: %s", sender, error)
        finally:
            store.close_lane(sender, replies)
            replies.close(PeerUnavailableError("the lane is over"))
