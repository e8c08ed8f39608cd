"""What payload moves over. Logic knows only these interfaces (docs/protocol.md 34)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from stratagem.rpc.codec import Frame

Pieces = Callable[[], Sequence[torch.Tensor]]
"""Gives the tensors whose elements, one after the other, are the payload; called when the lane is ready to send. Their
memory must stay as it is until :meth:`SendingLane.flush` returns: a lane may send from it without a copy."""


class SendingLane(Protocol):
    """An ordered way for tensor pieces to one task."""

    name: str
    """"grpc", "tcp" or "shm"."""

    @property
    def alive(self) -> bool:
        """Whether frames can still be sent."""

    def send(self, kind: int, transfer: int, group: int, offset: int, pieces: Pieces, num_elements: int) -> None:
        """Queues one frame of ``num_elements`` elements. ``pieces`` is called now or later, in the lane's thread.

        Raises:
            PeerUnavailableError: the lane is broken.
        """

    def flush(self, deadline: float) -> None:
        """Waits until everything queued has left the memory it was in (``deadline``: ``time.monotonic()`` seconds).

        Raises:
            PeerUnavailableError: the lane broke, or the deadline passed.
        """

    def close(self, reason: str) -> None:
        """Ends the lane; whoever waits on it gets ``PeerUnavailableError`` with the reason."""


class ReceivingLane(Protocol):
    """An ordered way for tensor pieces from one task."""

    name: str

    def receive(self, transfer: int, deadline: float, into: torch.Tensor | None = None) -> Frame:
        """The next frame of a transfer; waits for it until ``deadline`` (``time.monotonic()`` seconds).

        Args:
            into: flat, contiguous CPU memory for the payload. A lane that can, receives straight into it;
                any other gives a view on its own memory. ``frame.tensor`` is where the payload is.

        Raises:
            PeerUnavailableError: the lane broke, or the deadline passed.
            FrameError: the frame does not fit into ``into``, or is none.
        """

    def forget(self, transfer: int) -> None:
        """Drops what has come and may still come for this and earlier transfers (their ids only grow)."""

    def close(self, reason: str) -> None:
        """Ends the lane; whoever waits on it gets ``PeerUnavailableError`` with the reason."""


class Lane(SendingLane, ReceivingLane, Protocol):
    """Both directions."""

    @property
    def readable(self) -> bool:
        """Whether something came that nobody has received, or nothing comes any more. Callable in any thread."""

    def corked(self) -> contextlib.AbstractContextManager[None]:
        """Inside, frames may wait for those behind them, and leave together in one write at the end. Whoever receives
        meanwhile has sent them first."""


def nothing() -> None:
    """What a read that waits does now and then, unless it is told otherwise."""


class BytesMeter:
    """Bytes that went over lanes, both directions."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
