"""The ps's end of a lane: incoming frames go to staging; reply frames are queued and never waited for."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from stratagem.errors import FencedError, LimitError, PeerUnavailableError, StratagemError
from stratagem.ps.frames import WEIGHTS
from stratagem.ps.lane_requests import LaneRequests
from stratagem.ps.published import HeldFrame
from stratagem.ps.requests import Sender
from stratagem.ps.store import Store
from stratagem.ps.waiting import Call
from stratagem.rpc import codec
from stratagem.rpc.frame_memory import FrameMemory
from stratagem.rpc.lane import Corkable, LentPiece, LentPieces
from stratagem.rpc.logs import THROTTLE

logger = logging.getLogger(__name__)

LENT_ELEMENTS = 256 << 10
"""Larger frames are copied when they leave, not when they are queued."""


class WorkerStream(Call, Protocol):
    """The stream that carries a grpc lane."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Has ``callback`` called when the stream ends; False when it has ended already."""


class _Reply:
    """A frame that waits to leave under a ``transfer``: weights, or the frame of a reply."""

    __slots__ = ("_frame", "_lent", "_transfer", "num_bytes", "pinned_bytes")

    def __init__(self, transfer: int, frame: HeldFrame | codec.Parts) -> None:
        self._transfer, self._frame = transfer, frame
        self._lent: LentPieces | None = None
        self.pinned_bytes = 0
        if isinstance(frame, HeldFrame):
            self.pinned_bytes = num_bytes = frame.tensor.nbytes
            if isinstance(frame.origin, LentPiece):
                self._lent = LentPieces(frame.origin)
        else:
            num_bytes = sum(map(len, frame))
        self.num_bytes = num_bytes + codec.TOGETHER_OVERHEAD_BYTES

    def parts(self) -> codec.Parts:
        """The frame as bytes. One that was held for the transfer it is sent under is not copied again."""
        frame = self._frame
        if not isinstance(frame, HeldFrame):
            return frame
        if self._lent is not None:
            with self._lent.piece.guard:
                return [codec.encode_frame(WEIGHTS, self._transfer, frame.group, frame.offset, self._lent.piece.tensor)]
        if isinstance(frame.origin, tuple) and frame.origin[0] == self._transfer:
            return [frame.origin[1]]
        shape = tuple(frame.tensor.shape)
        return codec.frame_parts(WEIGHTS, self._transfer, frame.group, frame.offset, [frame.tensor], shape)


def _message(replies: list[_Reply]) -> bytes:
    frames = [reply.parts() for reply in replies]
    if len(frames) > 1:
        return codec.encode_together(frames)
    (parts,) = frames
    return parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else b"".join(parts)


class QueueLane(Corkable):
    """Queues reply messages for a grpc stream. Implements :class:`stratagem.ps.published.ReplyLane`. A reader that lets
    more than ``max_pinned_bytes`` of messages wait is cut off; weights that change before they have left are kept in
    ``memory``."""

    def __init__(
        self, max_pinned_bytes: Callable[[], int], memory: FrameMemory | None = None, stream: Call | None = None
    ) -> None:
        self._max_pinned_bytes = max_pinned_bytes
        self._stream = stream
        self._memory = memory or FrameMemory()
        self._changed = threading.Condition()
        self._waiting: collections.deque[list[_Reply]] = collections.deque()
        """What leaves in one message each."""
        self._cork: list[_Reply] | None = None
        self._corked_bytes = 0
        self._pinned_bytes = 0
        self._closed = False
        self._error: StratagemError | None = None

    def room(self, group: int, offset: int, num_elements: int, dtype: torch.dtype) -> HeldFrame:
        return HeldFrame(group, offset, torch.empty(num_elements, dtype=dtype))

    def hold(self, transfer: int, group: int, offset: int, piece: torch.Tensor) -> HeldFrame:
        if piece.numel() > LENT_ELEMENTS:
            return HeldFrame(group, offset, piece, LentPiece(piece, self._memory, from_malloc=True))
        message = codec.encode_frame(WEIGHTS, transfer, group, offset, piece)
        return HeldFrame(group, offset, codec.decode_frame(message).tensor, (transfer, message))

    def send(self, transfer: int, frame: HeldFrame) -> None:
        with self._changed:
            if self._closed:
                return
            self._pinned_bytes += frame.tensor.nbytes
            self._queue(_Reply(transfer, frame))
            limit = self._max_pinned_bytes()
        if self._pinned_bytes > limit:
            self.close(
                LimitError(f"expected frames to be read, {self._pinned_bytes} bytes wait (max_peer_bytes {limit})")
            )

    def answer(self, kind: int, transfer: int, message: bytes) -> None:
        with self._changed:
            if not self._closed:
                self._queue(_Reply(transfer, codec.frame_parts(kind, transfer, 0, 0, [message], (len(message),))))

    def cork(self) -> None:
        self._cork, self._corked_bytes = [], 0

    def uncork(self) -> None:
        with self._changed:
            replies, self._cork = self._cork, None
            if replies:
                self._waiting.append(replies)
                self._changed.notify_all()

    def _queue(self, reply: _Reply) -> None:
        """With ``changed`` held."""
        if self._cork is not None:
            self._corked_bytes += reply.num_bytes
            if self._corked_bytes <= codec.TOGETHER_BYTES:
                self._cork.append(reply)
                return
            self.uncork()
        self._waiting.append([reply])
        self._changed.notify_all()

    def is_active(self) -> bool:
        return not self._closed and (self._stream is None or self._stream.is_active())

    def close(self, error: StratagemError | None = None) -> None:
        """Ends the lane; frames that wait are dropped. ``error`` is what the worker gets, None for an orderly end."""
        with self._changed:
            if not self._closed:
                self._closed, self._error = True, error
            self._waiting.clear()
            self._cork = None
            self._pinned_bytes = 0
            self._changed.notify_all()

    def messages(self) -> Iterator[bytes]:
        """Messages as they come, until the lane is closed. A frame that was held for the transfer it is sent under is
        not copied again. StratagemError: what the lane was closed with."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    break
                replies = self._waiting.popleft()
                self._pinned_bytes -= sum([reply.pinned_bytes for reply in replies])
            message = _message(replies)
            del replies
            yield message
            del message
        if self._error is not None:
            raise self._error


def serve_lane(store: Store, sender: Sender, messages: Iterator[bytes], stream: WorkerStream) -> Iterator[bytes]:
    """Serves one Transfer stream: a thread of its own stages what comes, the caller's sends what is yielded.
    FencedError: the sender is or becomes dead. FrameError: a frame that cannot be what it says."""
    lane = QueueLane(store.state.peer_bytes, store.state.memory, stream)
    store.open_lane(sender, lane)
    requests = LaneRequests(store, sender, lane)
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
        if not store.state.senders.lanes:
            store.give_back()


def _read(requests: LaneRequests, sender: Sender, messages: Iterator[bytes], lane: QueueLane) -> None:
    try:
        for message in messages:
            frames = codec.decode_frames(message)
            del message  # staging holds what is needed; nothing else keeps the last message alive
            requests.take(frames)
    except (FencedError, PeerUnavailableError) as error:
        lane.close(error)
    except StratagemError as error:
        requests.refused(error)
        THROTTLE.log(logger, logging.WARNING, error.reason, "Transfer from %s refused: %s", sender, error)
        lane.close(error)
    except Exception as error:  # grpc ends a broken stream by a bare Exception in the iterator
        error.__traceback__ = None  # grpc keeps it with the call, whose frames would keep the call
        lane.close()
