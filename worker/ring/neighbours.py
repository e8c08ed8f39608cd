"""The two neighbours of a rank in a ring: checked messages from the left, messages to the right, one error for all."""

from __future__ import annotations

import math
import time

import torch

from stratagem.errors import CollectiveError, StratagemError
from stratagem.rpc.codec import FrameKind
from stratagem.rpc.lane import ReceivingLane, SendingLane
from stratagem.worker.ring.group import Breakable, OutOfStepError, Tag


class Neighbours(Breakable):
    """Moves pieces of collectives. A message that is not exactly the expected one, a neighbour that is gone or one that
    stands still breaks both lanes for good, so that the others notice too.

    Args:
        right: to rank + 1; None only if ``size`` is 1.
        left: from rank - 1; None only if ``size`` is 1.
        timeout_s: seconds that a neighbour may neither send nor take anything while this rank waits for it.
    """

    def __init__(
        self, rank: int, size: int, right: SendingLane | None, left: ReceivingLane | None, timeout_s: float
    ) -> None:
        super().__init__()
        self.right = (rank + 1) % size
        self.left = (rank - 1) % size
        self.awaits: int | None = None
        """The neighbour that this rank waits for at this moment."""
        self._right_lane = right
        self._left_lane = left
        self.timeout_s = timeout_s

    def send(self, part: torch.Tensor, offset: int, tag: Tag) -> None:
        """Queues ``part``, whose first element is the ``offset``-th; its memory has to stay until :meth:`flush`."""
        assert self._right_lane is not None
        try:
            self._right_lane.send(
                FrameKind.COLLECTIVE, tag.ordinal, tag.fingerprint, offset, lambda: (part,), part.numel()
            )
        except StratagemError as error:
            raise self._blame(self.right, tag, error) from None

    def receive(self, into: torch.Tensor, offset: int, tag: Tag) -> torch.Tensor:
        """Waits for the next message, which has to be the elements from ``offset`` on that fill ``into``. They are
        there, or in memory of the lane, which must not be written to."""
        assert self._left_lane is not None
        self.awaits = self.left
        deadline = time.monotonic() + self.timeout_s
        try:
            frame = self._left_lane.receive(0, deadline, into)
        except StratagemError as error:
            raise self._blame(self.left, tag, error, deadline) from None
        finally:
            self.awaits = None
        tensor = frame.tensor
        num_elements = into.numel()
        if (
            frame.transfer != tag.ordinal
            or frame.group != tag.fingerprint
            or frame.offset != offset
            or tensor.numel() != num_elements
            or (num_elements and tensor.dtype != into.dtype)
            or frame.kind != FrameKind.COLLECTIVE
        ):
            expected = _told(tag.ordinal, tag.fingerprint, offset, into)
            got = _told(frame.transfer, frame.group, frame.offset, tensor)
            raise self.break_off(
                OutOfStepError(
                    f"expected from rank {self.left} {expected}, got {got}: the ranks are not in the same collective",
                    self.left,
                )
            )
        return tensor

    def receive_into(self, part: torch.Tensor, offset: int, tag: Tag) -> None:
        """Waits for the next message, which has to be the elements from ``offset`` on; they are in ``part`` then."""
        received = self.receive(part, offset, tag)
        if received.data_ptr() != part.data_ptr():
            part.copy_(received)

    def flush(self, tag: Tag) -> None:
        """Waits until everything that was sent may be changed."""
        if self._right_lane is None:
            return
        self.awaits = self.right
        deadline = time.monotonic() + self.timeout_s
        try:
            self._right_lane.flush(deadline)
        except StratagemError as error:
            raise self._blame(self.right, tag, error, deadline) from None
        finally:
            self.awaits = None

    def _end(self, error: CollectiveError) -> None:
        for lane in (self._right_lane, self._left_lane):
            if lane is not None:
                lane.close(str(error))

    def _blame(self, rank: int, tag: Tag, error: StratagemError, deadline: float = math.inf) -> CollectiveError:
        kind = CollectiveError if time.monotonic() < deadline else OutOfStepError
        return self.break_off(kind(f"collective {tag.ordinal} failed at rank {rank}: {error}", rank))


def _told(ordinal: int, fingerprint: int, offset: int, tensor: torch.Tensor) -> str:
    what = f"{tensor.numel():,} elements of {str(tensor.dtype).removeprefix('torch.')} at {offset:,}"
    return f"{what} of collective {ordinal} (fingerprint {fingerprint:08x})"
