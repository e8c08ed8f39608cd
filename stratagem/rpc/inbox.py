"""Received frames that wait for a request of their transfer."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

from stratagem.errors import LimitError, PeerUnavailableError, StratagemError
from stratagem.rpc.codec import Frame
from stratagem.rpc.lane import nothing

INBOX_BYTES = 4 << 30
"""Bytes of frames that came before they were asked for, in one lane."""


POLL_S = 0.5


class Inbox:
    """Filled by a lane's reader thread, which waits while it holds ``max_frames`` (0: no bound), emptied by the caller
    of ``receive``. It holds at most ``max_bytes``. ``on_wait`` is called now and then while :meth:`take` waits: an
    exception from it ends the wait."""

    def __init__(
        self,
        peer: str,
        max_frames: int = 0,
        max_bytes: int = INBOX_BYTES,
        on_wait: Callable[[], None] = nothing,
    ) -> None:
        self._on_wait = on_wait
        self._peer = peer
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._frames: collections.deque[Frame] = collections.deque()
        self._forgotten = 0
        self.error: StratagemError | None = None
        """Why nothing more comes; None while the lane lives."""

    @property
    def has_something(self) -> bool:
        """Whether a frame lies here, or nothing more comes."""
        return bool(self._frames) or self.error is not None

    def put(self, *frames: Frame) -> bool:
        """Adds frames that came together; False when the lane is broken. LimitError: too much lies here."""
        with self._changed:
            if self._max_frames:
                self._changed.wait_for(lambda: len(self._frames) < self._max_frames or self.error is not None)
            if self.error is not None:
                return False
            for frame in frames:
                if not frame.transfer or frame.transfer > self._forgotten:
                    self._num_bytes += frame.num_bytes
                    check_inbox(self._peer, self._num_bytes, self._max_bytes)
                    self._frames.append(frame)
            self._changed.notify_all()
            return True

    def take(self, transfer: int, deadline: float) -> Frame:
        """The oldest frame of a transfer, 0 for the oldest of all; see ``ReceivingLane.receive``."""
        with self._changed:
            while True:
                for index, frame in enumerate(self._frames):
                    if transfer in (0, frame.transfer):
                        del self._frames[index]
                        self._num_bytes -= frame.num_bytes
                        self._changed.notify_all()
                        return frame
                if self.error is not None:
                    raise self.error
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerUnavailableError(f"{self._peer} sent no frame of transfer {transfer} in time")
                if not self._changed.wait(min(left, POLL_S)):
                    self._on_wait()

    def forget(self, transfer: int) -> None:
        """Drops what has come and may still come for this and earlier transfers."""
        with self._changed:
            self._forgotten = max(self._forgotten, transfer)
            self._frames = collections.deque(frame for frame in self._frames if frame.transfer > self._forgotten)
            self._num_bytes = sum(frame.num_bytes for frame in self._frames)
            self._changed.notify_all()

    def fail(self, error: StratagemError) -> None:
        """Nothing more comes; only the first reason counts. Frames that lie here can still be taken."""
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()


def check_inbox(peer: str, num_bytes: int, max_bytes: int) -> None:
    """Raises ``LimitError``, which names the limit, where too much lies here that nobody has asked for."""
    if num_bytes > max_bytes:
        raise LimitError(
            f"{num_bytes:,} bytes of frames from {peer} wait to be requested, over max_inbox_bytes of {max_bytes:,}"
        )
