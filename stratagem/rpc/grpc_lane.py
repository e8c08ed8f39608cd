"""The grpc lane: a long-lived bidirectional stream of frames, always there."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import torch

from stratagem.errors import FencedError, PeerUnavailableError, StratagemError
from stratagem.rpc import codec
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.inbox import INBOX_BYTES, Inbox
from stratagem.rpc.lane import Corkable, Payload, Place, nothing
from stratagem.rpc.lane_meter import BytesMeter

TRANSFER_METHOD = "/stratagem.ParameterServer/Transfer"
EXCHANGE_METHOD = "/stratagem.Worker/Exchange"
READ_AHEAD = 4
"""Frames that a ring's receiver takes from gRPC before somebody asks for them; flow control holds back the rest."""
_Outgoing = tuple[int, int, int, int, Payload, int]


class GrpcLane(Corkable):
    """Implements :class:`stratagem.rpc.lane.Lane` on the side that opened the stream.

    Args:
        channel: its own channel, so that payload and control messages do not share a connection. The lane owns it.
        method: full name of the streaming method.
        max_inbox_bytes: limit of frames that arrived before they were requested.
        on_wait: called now and then while a read waits; an exception from it ends the wait.
        together_bytes: limit of a message with frames sent inside :meth:`corked`; 0: one frame each, as the other
            end of a ring requires.
        linger_s: how long :meth:`close` waits for the other end to read what was flushed.
    """

    name = "grpc"

    def __init__(
        self,
        channel: grpc.Channel,
        method: str,
        metadata: Sequence[tuple[str, str | bytes]],
        peer: str,
        meter: BytesMeter,
        max_inbox_bytes: int = INBOX_BYTES,
        on_wait: Callable[[], None] = nothing,
        together_bytes: int = 0,
        linger_s: float = 0.0,
    ) -> None:
        self._peer = peer
        self._channel = channel
        self._meter = meter.lane(peer, self.name)
        self._together_bytes = together_bytes
        self._linger_s = linger_s
        self._cork: list[_Outgoing] | None = None
        self._outbox: queue.SimpleQueue[list[_Outgoing] | None] = queue.SimpleQueue()
        self._inbox = Inbox(peer, max_bytes=max_inbox_bytes, on_wait=on_wait)
        self._taken = threading.Condition()
        self._num_queued = 0
        self._num_taken = 0
        stream = channel.stream_stream(method, request_serializer=None, response_deserializer=None)
        self._call: Any = stream(self._outgoing(), metadata=tuple(metadata))
        self._reader = threading.Thread(target=self._read, name=f"lane-{peer}", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self._inbox.error is None

    def takes_at_once(self, num_bytes: int) -> bool:
        return True

    def send(self, kind: int, transfer: int, group: int, offset: int, pieces: Payload, num_elements: int) -> None:
        if self._inbox.error is not None:
            raise self._inbox.error
        self._num_queued += 1
        item = kind, transfer, group, offset, pieces, num_elements
        if self._cork is None:
            self._outbox.put([item])
        else:
            self._cork.append(item)

    @property
    def readable(self) -> bool:
        return self._inbox.has_something

    def cork(self) -> None:
        self._cork = []

    def uncork(self) -> None:
        items, self._cork = self._cork, None
        if items:
            self._outbox.put(items)

    def receive(self, transfer: int, deadline: float, into: torch.Tensor | Place | None = None) -> codec.Frame:
        if self._cork is not None:
            self.uncork()
        return self._inbox.take(transfer, deadline)

    def forget(self, transfer: int) -> None:
        self._inbox.forget(transfer)

    def flush(self, deadline: float) -> None:
        with self._taken:
            found = self._taken.wait_for(
                lambda: self._num_taken == self._num_queued or self._inbox.error, deadline - time.monotonic()
            )
            if found is not True:
                raise found or PeerUnavailableError(f"{self._peer} takes no frames")

    def close(self, reason: str) -> None:
        self._fail(PeerUnavailableError(reason))  # ends the stream, behind what gRPC has taken
        for seconds in (self._linger_s, 5.0):
            if threading.current_thread() is not self._reader:
                self._reader.join(seconds)
            self._call.cancel()  # drops what nobody has read
        self._channel.close()

    def _outgoing(self) -> Iterator[bytes]:
        while (items := self._outbox.get()) is not None and self._inbox.error is None:  # then memory may have changed
            together: list[codec.Parts] = []
            num_bytes = 0
            for kind, transfer, group, offset, pieces, num_elements in items:
                parts = codec.frame_parts(kind, transfer, group, offset, pieces(), (num_elements,))
                size = sum(map(len, parts)) + codec.TOGETHER_OVERHEAD_BYTES
                if together and num_bytes + size > self._together_bytes:
                    yield self._message(together)
                    together, num_bytes = [], 0
                together.append(parts)
                num_bytes += size
                del parts, pieces
            del items
            yield self._message(together)

    def _message(self, together: list[codec.Parts]) -> bytes:
        """Frames as one message, a copy: the tensors they were are free."""
        num_frames = len(together)
        message = codec.encode_together(together) if num_frames > 1 else b"".join(together[0])
        together.clear()
        self._meter.sent_frames += num_frames
        self._meter.sent_bytes += len(message)
        with self._taken:
            self._num_taken += num_frames
            self._taken.notify_all()
        return message

    def _read(self) -> None:
        try:
            for message in self._call:
                frames = codec.decode_frames(message)
                self._meter.received_frames += len(frames)
                self._meter.received_bytes += len(message)
                self._inbox.put(*frames)
                del message, frames
            self._fail(PeerUnavailableError(f"{self._peer} closed the lane"))
        except grpc.RpcError as error:
            reason = error_from_rpc(error, self._peer)
            # Only a fence is final; after anything else the lane can be opened again.
            self._fail(reason if isinstance(reason, FencedError) else PeerUnavailableError(str(reason)))
        except StratagemError as error:
            self._fail(error)
            self._call.cancel()
        except Exception as error:  # whoever waits must hear that nobody reads any more
            self._fail(PeerUnavailableError(f"the lane to {self._peer} broke: {error!r}"))
            self._call.cancel()
            raise

    def _fail(self, error: StratagemError) -> None:
        self._inbox.fail(error)
        with self._taken:
            self._taken.notify_all()
        self._outbox.put(None)


class ServedGrpcLane:
    """Implements :class:`stratagem.rpc.lane.ReceivingLane` on the side that serves the stream.

    The servicer's method runs :meth:`serve`; the user of the frames calls :meth:`receive` from another thread.
    """

    name = "grpc"

    def __init__(self, peer: str, meter: BytesMeter) -> None:
        self._peer = peer
        self._meter = meter.lane(peer, self.name)
        self._inbox = Inbox(peer, READ_AHEAD)
        self._cancel: Callable[[], object] = nothing

    def serve(self, messages: Iterator[bytes], cancel: Callable[[], object]) -> None:
        """Reads the stream until it ends; ``cancel`` ends it."""
        self._cancel = cancel
        if self._inbox.error is not None:
            return
        try:
            for message in messages:
                self._meter.received_frames += 1
                self._meter.received_bytes += len(message)
                if not self._inbox.put(codec.decode_frame(message)):
                    break
            self._inbox.fail(PeerUnavailableError(f"{self._peer} closed the lane"))
        except StratagemError as error:
            self._inbox.fail(error)
        except Exception as error:  # grpc ends a broken stream by a bare Exception in the iterator
            error.__traceback__ = None  # grpc keeps it with the call, whose frames would keep the call
            self._inbox.fail(PeerUnavailableError(f"the lane from {self._peer} broke"))

    def receive(self, transfer: int, deadline: float, into: torch.Tensor | Place | None = None) -> codec.Frame:
        return self._inbox.take(transfer, deadline)

    def forget(self, transfer: int) -> None:
        self._inbox.forget(transfer)

    def close(self, reason: str) -> None:
        self._inbox.fail(PeerUnavailableError(reason))
        self._cancel()
