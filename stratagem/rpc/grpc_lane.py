"""The grpc lane, worker side: one long-lived bidirectional stream of frames, always there."""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from stratagem.errors import FencedError, PeerUnavailableError, StratagemError
from stratagem.rpc.codec import Frame, decode_frame, encode_pieces
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.lane import BytesMeter, Pieces

TRANSFER_METHOD = "/stratagem.ParameterServer/Transfer"
_Outgoing = tuple[int, int, int, int, Pieces, int]


class GrpcLane:
    """Implements :class:`stratagem.rpc.lane.Lane` over ``ParameterServer.Transfer``.

    Args:
        channel: a channel of its own, so that payload and control messages do not share a connection.
        task: task id of the caller.
        incarnation: its process life.
        peer: task id at the other end, for messages.
        meter: counts bytes.
    """

    name = "grpc"

    def __init__(self, channel: grpc.Channel, task: str, incarnation: int, peer: str, meter: BytesMeter) -> None:
        self._peer = peer
        self._meter = meter
        self._outbox: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._arrived = threading.Condition()
        self._frames: dict[int, collections.deque[Frame]] = {}
        self._forgotten = 0
        self._num_queued = 0
        self._num_taken = 0
        self._error: StratagemError | None = None
        stream = channel.stream_stream(TRANSFER_METHOD, request_serializer=None, response_deserializer=None)
        metadata = (("stratagem-task", task), ("stratagem-incarnation", str(incarnation)))
        self._call: Any = stream(self._outgoing(), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name=f"lane-{peer}", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self._error is None

    def send(self, kind: int, transfer: int, group: int, offset: int, pieces: Pieces, num_elements: int) -> None:
        if self._error is not None:
            raise self._error
        self._num_queued += 1
        self._outbox.put((kind, transfer, group, offset, pieces, num_elements))

    def receive(self, transfer: int, deadline: float) -> Frame:
        with self._arrived:
            frames = self._frames.setdefault(transfer, collections.deque())
            while not frames:
                if self._error is not None:
                    raise self._error
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerUnavailableError(f"{self._peer} sent no frame of transfer {transfer} in time")
                self._arrived.wait(left)
            return frames.popleft()

    def forget(self, transfer: int) -> None:
        with self._arrived:
            self._forgotten = max(self._forgotten, transfer)
            for old in [known for known in self._frames if known <= self._forgotten]:
                del self._frames[old]

    def flush(self, deadline: float) -> None:
        with self._arrived:
            while self._num_taken < self._num_queued:
                if self._error is not None:
                    raise self._error
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerUnavailableError(f"{self._peer} takes no frames")
                self._arrived.wait(min(left, 0.05))

    def close(self, reason: str) -> None:
        self._fail(PeerUnavailableError(reason))
        self._outbox.put(None)
        self._call.cancel()
        if threading.current_thread() is not self._reader:
            self._reader.join(5.0)

    def _outgoing(self) -> Iterator[bytes]:
        while (item := self._outbox.get()) is not None:
            kind, transfer, group, offset, pieces, num_elements = item
            message = encode_pieces(kind, transfer, group, offset, pieces(), (num_elements,))
            del item, pieces
            self._meter.sent_bytes += len(message)
            yield message
            self._num_taken += 1

    def _read(self) -> None:
        try:
            for message in self._call:
                self._meter.received_bytes += len(message)
                frame = decode_frame(message)
                with self._arrived:
                    if frame.transfer > self._forgotten:
                        self._frames.setdefault(frame.transfer, collections.deque()).append(frame)
                        self._arrived.notify_all()
            self._fail(PeerUnavailableError(f"{self._peer} closed the lane"))
        except grpc.RpcError as error:
            reason = error_from_rpc(error, self._peer)
            # Only a fence is final; after anything else the lane can be opened again.
            self._fail(reason if isinstance(reason, FencedError) else PeerUnavailableError(str(reason)))
        except StratagemError as error:
            self._fail(error)
            self._call.cancel()

    def _fail(self, error: StratagemError) -> None:
        with self._arrived:
            if self._error is None:
                self._error = error
            self._arrived.notify_all()
        self._outbox.put(None)
