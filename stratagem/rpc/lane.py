"""The interfaces of lanes, which carry payload. Logic knows only these (docs/protocol.md 34)."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from stratagem.rpc.codec import Frame
from stratagem.rpc.frame_memory import FrameMemory, fresh

Pieces = Callable[[], Sequence[torch.Tensor]]
"""Gives the tensors whose elements, one after the other, are the payload; called when the lane is ready to send. Their
memory must stay as it is until :meth:`SendingLane.flush` returns: a lane may send from it without a copy."""


def nothing() -> None:
    """What a read that waits does now and then, unless it is told otherwise."""


class LentPiece:
    """A piece of a tensor that is sent from its own memory, although its owner may change it first: the owner calls
    :meth:`keep` before that, and the unsent rest is copied. ``memory`` keeps count, and has room for copies;
    ``from_malloc``: copies come from malloc, as the frames of this lane do, so no memory lies idle beside that."""

    def __init__(self, tensor: torch.Tensor, memory: FrameMemory, *, from_malloc: bool = False) -> None:
        self._memory = memory
        self._take = fresh if from_malloc else memory.take
        self.tensor = tensor
        """The elements; only with :attr:`guard` held, which nobody holds while a peer does not read."""
        self.guard = threading.RLock()  # a reader may end by the garbage collector, at any point
        self._num_readers = 0
        self._kept = False

    def keep(self) -> None:
        """The elements are about to change: copies them if somebody has still to read them."""
        with self.guard:
            if self._num_readers:
                self.tensor = self._take(self.tensor.numel(), self.tensor.dtype).copy_(self.tensor)
                self._memory.note(0, self.tensor.nbytes)
                self._kept = True

    def count(self, num_more: int) -> None:
        """So many more frames with it are to be sent."""
        with self.guard:
            before = self._num_readers > 0
            self._num_readers += num_more
            change = ((self._num_readers > 0) - before) * self.tensor.nbytes
            if change:
                self._memory.note(change, change if self._kept else 0)


class LentPieces:
    """:data:`Pieces` of one frame, the elements of ``piece``; ``leaving`` is called when it begins to leave. A lane
    that supports them reads them bit by bit, each time with the guard held."""

    def __init__(self, piece: LentPiece, leaving: Callable[[], object] = nothing) -> None:
        piece.count(1)
        self.piece = piece
        self._leaving = leaving

    def __call__(self) -> Sequence[torch.Tensor]:
        self._leaving()
        return (self.piece.tensor,)

    def __del__(self) -> None:  # it has been sent, or its lane is gone
        self.piece.count(-1)


Place = Callable[[int, int, int, int], torch.Tensor | None]
"""Gives the memory for a frame of this kind, group, offset and number of elements, once its header is here; None: it
has no place of its own."""
Payload = Callable[[], Sequence[torch.Tensor | bytes]]
"""Pieces, or a message as bytes."""


class SendingLane(Protocol):
    """An ordered path for tensor pieces to one task."""

    name: str
    """"grpc", "tcp" or "shm"."""

    @property
    def alive(self) -> bool:
        """Whether frames can still be sent."""

    def takes_at_once(self, num_bytes: int) -> bool:
        """Whether :meth:`send` of a frame of so many bytes returns without waiting for the peer to read."""

    def send(self, kind: int, transfer: int, group: int, offset: int, pieces: Pieces, num_elements: int) -> None:
        """Queues one frame of ``num_elements`` elements. ``pieces`` is called now or later, in the lane's thread.
        PeerUnavailableError: the lane is broken."""

    def flush(self, deadline: float) -> None:
        """Waits until everything queued has left the memory it was in (``deadline``: ``time.monotonic()`` seconds).
        PeerUnavailableError: the lane broke, or the deadline passed."""

    def close(self, reason: str) -> None:
        """Ends the lane; whoever waits on it gets ``PeerUnavailableError`` with the reason."""


class ReceivingLane(Protocol):
    """An ordered path for tensor pieces from one task."""

    name: str

    def receive(self, transfer: int, deadline: float, into: torch.Tensor | Place | None = None) -> Frame:
        """The next frame of a transfer; waits for it until ``deadline`` (``time.monotonic()`` seconds). ``into``: flat,
        contiguous CPU memory for the payload, or what gives it. A lane that can, receives straight into it; any other
        gives a view on its own memory. ``frame.tensor`` is where the payload is. Raises PeerUnavailableError: the lane
        broke, or the deadline passed; FrameError: the frame does not fit into ``into``, or is none."""

    def forget(self, transfer: int) -> None:
        """Drops what has come and may still come for this and earlier transfers (their ids only grow)."""

    def close(self, reason: str) -> None:
        """Ends the lane; whoever waits on it gets ``PeerUnavailableError`` with the reason."""


class Corkable(Protocol):
    """A lane in which frames may wait."""

    @abc.abstractmethod
    def cork(self) -> None:
        """Frames may wait from now on."""

    @abc.abstractmethod
    def uncork(self) -> None:
        """What waits leaves. Raises nothing: whoever waits for an answer hears that the lane is broken."""

    def corked(self) -> Corked:
        """Inside, frames may wait for those behind them, and leave together in one write at the end. Whoever receives
        meanwhile has sent them first."""
        return Corked(self)


class Corked:
    """See :meth:`Corkable.corked`. A class, because it is entered several times a step."""

    __slots__ = ("_lane",)

    def __init__(self, lane: Corkable) -> None:
        self._lane = lane

    def __enter__(self) -> None:
        self._lane.cork()

    def __exit__(self, *_: object) -> None:
        self._lane.uncork()


class Lane(SendingLane, ReceivingLane, Corkable, Protocol):
    """Both directions between a worker and a ps: tensor pieces and messages."""

    def send(self, kind: int, transfer: int, group: int, offset: int, pieces: Payload, num_elements: int) -> None:
        """See :class:`SendingLane`."""

    @property
    def readable(self) -> bool:
        """Whether something came that nobody has received, or nothing comes any more. Callable in any thread."""
