"""What payload moves over, seen from the side that opened it. Logic knows only this interface (PROTOCOL.md 34)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from stratagem.rpc.codec import Frame

Pieces = Callable[[], Sequence[torch.Tensor]]
"""Gives the tensors whose elements, one after the other, are the payload; called when the lane is ready to send."""


class Lane(Protocol):
    """An ordered way for tensor pieces between two tasks, in both directions."""

    name: str
    """"grpc", and later "tcp", "shm"."""

    @property
    def alive(self) -> bool:
        """Whether frames can still be sent."""

    def send(self, kind: int, transfer: int, group: int, offset: int, pieces: Pieces, num_elements: int) -> None:
        """Queues one frame of ``num_elements`` elements. ``pieces`` is called later, in the lane's thread.

        Raises:
            PeerUnavailableError: the lane is broken.
        """

    def receive(self, transfer: int, deadline: float) -> Frame:
        """The next frame of a transfer; waits for it until ``deadline`` (``time.monotonic()`` seconds).

        Raises:
            PeerUnavailableError: the lane broke, or the deadline passed.
        """

    def forget(self, transfer: int) -> None:
        """Drops what has come and may still come for this and earlier transfers (their ids only grow)."""

    def flush(self, deadline: float) -> None:
        """Waits until everything queued has left this process."""

    def close(self, reason: str) -> None:
        """Ends the lane; whoever waits on it gets ``PeerUnavailableError`` with the reason."""


class BytesMeter:
    """Bytes that went over lanes, both directions."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
