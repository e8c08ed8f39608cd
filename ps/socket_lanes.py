"""The tcp and shm lanes of a ps: sockets that workers open with a token, each lane with a thread that stages."""

from __future__ import annotations

import functools
import logging
import math
import socket
import threading
import time
from typing import Literal

import torch

from stratagem.errors import FencedError, LimitError, PeerUnavailableError, StratagemError
from stratagem.ps.frames import WEIGHTS, kind_of
from stratagem.ps.lane_server import most_unread_bytes
from stratagem.ps.published import HeldFrame
from stratagem.ps.requests import Sender
from stratagem.ps.store import Store
from stratagem.rpc.door import Door, Way
from stratagem.rpc.lane import BytesMeter, ReceivingLane
from stratagem.rpc.shm_lane import ShmReceiver, ShmSender
from stratagem.rpc.slots import Slot, SlotPool
from stratagem.rpc.tcp_lane import TcpReceiver, TcpSender

logger = logging.getLogger(__name__)

Family = Literal["tcp", "shm"]
Purpose = Literal["up", "down"]
CONNECT_S = 10.0
"""Seconds that a worker has to come in after it asked for the second way."""


class TcpReplies:
    """Implements :class:`stratagem.ps.published.ReplyLane`: sends from held copies without another one."""

    def __init__(self, sender: TcpSender, receiver: ReceivingLane, max_unread_bytes: int) -> None:
        self._sender = sender
        self._receiver = receiver
        self._max_unread_bytes = max_unread_bytes
        self._guard = threading.Lock()
        self._unread_bytes = 0

    def hold(self, transfer: int, group: int, offset: int, piece: torch.Tensor) -> HeldFrame:
        return HeldFrame(group, offset, piece.clone())

    def send(self, transfer: int, frame: HeldFrame) -> None:
        tensor = frame.tensor
        with self._guard:
            self._unread_bytes += tensor.nbytes
            late = self._unread_bytes > self._max_unread_bytes
        if late:
            self.close(LimitError(f"expected frames to be read, {self._unread_bytes:,} bytes wait"))
        try:
            self._sender.send(WEIGHTS, transfer, frame.group, frame.offset, lambda: self._leaving(tensor), len(tensor))
        except PeerUnavailableError:
            return  # closed: the worker comes back by itself, or is dead

    def close(self, error: StratagemError) -> None:
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

    def hold(self, transfer: int, group: int, offset: int, piece: torch.Tensor) -> HeldFrame:
        try:
            tensor, slot = self._sender.fill([piece])
        except StratagemError:
            return HeldFrame(group, offset, piece.clone())  # the lane is closed; others may still want the version
        return HeldFrame(group, offset, tensor, slot)

    def send(self, transfer: int, frame: HeldFrame) -> None:
        try:
            tensor, slot = frame.tensor, frame.origin
            if not isinstance(slot, Slot):
                tensor, slot = self._sender.fill([tensor])
            self._sender.send_slot(WEIGHTS, transfer, frame.group, frame.offset, tensor, slot)
        except StratagemError:
            return  # closed: the worker comes back by itself, or is dead

    def close(self, error: StratagemError) -> None:
        self._sender.close(str(error))
        self._receiver.close(str(error))


class SocketLanes:
    """Opens and serves them.

    Args:
        store: stages what comes and sends what is asked for.
        host: address to listen on.
    """

    def __init__(self, store: Store, host: str) -> None:
        self._store = store
        self._door = Door(host)
        self._pool: SlotPool | None = None
        self._guard = threading.Lock()
        self._threads: set[threading.Thread] = set()

    def open(self, sender: Sender, family: Family, purpose: Purpose) -> Way:
        """A way in for one direction; with the way "down" the lane begins.

        Raises:
            FencedError: the process life was declared dead.
            SegmentError: there is no shared memory here; take another lane.
        """
        self._store.state.senders.check(sender)
        if family == "shm":
            self._shared().take(1)
        way = self._door.expect((*sender.life, purpose), socket.AF_UNIX if family == "shm" else socket.AF_INET)
        if purpose == "down":
            name = f"lane-{sender.task}"
            thread = threading.Thread(target=self._serve, args=(sender, family), name=name, daemon=True)
            with self._guard:
                self._threads = {thread for thread in self._threads if thread.is_alive()} | {thread}
            thread.start()
        return way

    def close(self) -> None:
        """Lets nobody in any more, and waits for the lanes, which the store has closed."""
        self._door.close()
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
            up = self._door.wait((*sender.life, "up"), deadline)
            try:
                down = self._door.wait((*sender.life, "down"), deadline)
            except BaseException:
                up.close()
                raise
        except PeerUnavailableError as error:
            logger.info("%s asked for a %s lane and did not come: %s", sender, family, error)
            return
        receiver: ReceivingLane
        replies: TcpReplies | ShmReplies
        if family == "tcp":
            receiver = TcpReceiver(up, sender.task, meter)
            replies = TcpReplies(TcpSender(down, sender.task, meter), receiver, most_unread_bytes(store))
        else:
            receiver = ShmReceiver(up, sender.task, meter)
            unread = functools.partial(most_unread_bytes, store)
            replies = ShmReplies(ShmSender(down, sender.task, meter, unread, self._shared(), patient=False), receiver)
        try:
            store.open_lane(sender, replies)
            while True:
                frame = receiver.receive(0, math.inf)
                store.variables.stage(sender, kind_of(frame), frame)
                del frame  # staging holds what is needed
        except (PeerUnavailableError, FencedError):
            pass
        except StratagemError as error:
            logger.warning("a frame from %s was refused: %s", sender, error)
        finally:
            store.close_lane(sender, replies)
            replies.close(PeerUnavailableError("the lane is over"))
