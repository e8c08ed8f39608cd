"""The ps's end of a lane: frames in go to staging, reply frames out are queued and never waited for."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from stratagem.errors import FencedError, LimitError, StratagemError
from stratagem.ps.frames import payload_of, reply_message, weights_message
from stratagem.ps.lane_requests import LaneRequests
from stratagem.ps.published import HeldFrame
from stratagem.ps.requests import Sender
from stratagem.ps.store import Store
from stratagem.rpc.codec import decode_frame
from stratagem.rpc.throttle import THROTTLE

logger = logging.getLogger(__name__)


class WorkerStream(Protocol):
    """The stream that carries a grpc lane."""

    def is_active(self) -> bool:
        """False once the worker is gone."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Has ``callback`` called when the stream ends; False when it has ended already."""


class QueueLane:
    """Reply messages on their ticket into a grpc stream. Implements :class:`stratagem.ps.published.ReplyLane`.

    Args:
        max_pinned_bytes: bytes of messages that may wait here; a reader that is slower is cut off.
    """

    def __init__(self, max_pinned_bytes: Callable[[], int]) -> None:
        self._max_pinned_bytes = max_pinned_bytes
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[int, HeldFrame | bytes]] = collections.deque()
        self._pinned_bytes = 0
        self._closed = False
        self._error: StratagemError | None = None

    def hold(self, transfer: int, group: int, offset: int, piece: torch.Tensor) -> HeldFrame:
        message = weights_message(transfer, group, offset, piece)
        return HeldFrame(group, offset, payload_of(message), (transfer, message))

    def send(self, transfer: int, frame: HeldFrame) -> None:
        with self._changed:
            if self._closed:
                return
            self._waiting.append((transfer, frame))
            self._pinned_bytes += frame.tensor.nbytes
            limit = self._max_pinned_bytes()
            self._changed.notify_all()
        if self._pinned_bytes > limit:
            self.close(
                LimitError(f"expected frames to be read, {self._pinned_bytes} bytes wait (max_peer_bytes {limit})")
            )

    def answer(self, kind: int, transfer: int, message: bytes) -> None:
        with self._changed:
            if not self._closed:
                self._waiting.append((transfer, reply_message(kind, transfer, message)))
                self._changed.notify_all()

    def corked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._closed

    def close(self, error: StratagemError | None = None) -> None:
        """Ends the lane; frames that wait are dropped. ``error`` is what the worker gets, None for an orderly end."""
        with self._changed:
            if not self._closed:
                self._closed, self._error = True, error
            self._waiting.clear()
            self._pinned_bytes = 0
            self._changed.notify_all()

    def messages(self) -> Iterator[bytes]:
        """Messages as they come, until the lane is closed. A frame that was held for the transfer it is sent under is
        not copied again.

        Raises:
            StratagemError: what the lane was closed with.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    break
                transfer, frame = self._waiting.popleft()
                if not isinstance(frame, bytes):
                    self._pinned_bytes -= frame.tensor.nbytes
            if isinstance(frame, bytes):
                yield frame
            elif isinstance(frame.origin, tuple) and frame.origin[0] == transfer:
                yield frame.origin[1]
            else:
                yield weights_message(transfer, frame.group, frame.offset, frame.tensor)
            del frame
        if self._error is not None:
            raise self._error


def serve_lane(store: Store, sender: Sender, messages: Iterator[bytes], stream: WorkerStream) -> Iterator[bytes]:
    """Serves one Transfer stream: a thread of its own stages what comes, the caller's sends what is yielded.

    Raises:
        FencedError: the sender is or becomes dead.
        FrameError: a frame that cannot be what it says.
    """
    lane = QueueLane(lambda: store.state.peer_bytes)
    store.open_lane(sender, lane)
    requests = LaneRequests(store, sender, lane, _StreamCall(stream, lane))
    reader = threading.Thread(
        target=_read, args=(requests, sender, messages, lane), name=f"lane-{sender.task}", daemon=True
    )
    reader.start()
    if not stream.add_callback(lane.close):
        lane.close()
    try:
        yield from lane.messages()
    finally:
        lane.close()
        store.close_lane(sender, lane)


@dataclasses.dataclass(frozen=True)
class _StreamCall:
    """Implements :class:`stratagem.ps.state.Call`."""

    stream: WorkerStream
    lane: QueueLane

    def is_active(self) -> bool:
        return not self.lane.closed and self.stream.is_active()


def _read(requests: LaneRequests, sender: Sender, messages: Iterator[bytes], lane: QueueLane) -> None:
    try:
        for message in messages:
            requests.take(decode_frame(message))
            del message  # staging holds what is needed; nothing else keeps the last message alive
    except FencedError as error:
        lane.close(error)
    except StratagemError as error:
        THROTTLE.log(logger, logging.WARNING, error.reason, "Transfer from %s refused: %s", sender, error)
        lane.close(error)
    except Exception as error:  # grpc ends a broken stream by a bare Exception in the iterator
        error.__traceback__ = None  # grpc keeps it with the call, whose frames would keep the call
        lane.close()
