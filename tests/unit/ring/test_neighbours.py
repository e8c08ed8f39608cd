"""Messages between neighbours: only the expected one is accepted, and the first error is everybody's."""

from __future__ import annotations

import pytest
import torch

from stratagem.errors import CollectiveError, FrameError, PeerUnavailableError, StratagemError
from stratagem.rpc.codec import Frame
from stratagem.rpc.generated import frame_pb2
from stratagem.rpc.lane import Pieces, Place
from stratagem.worker.ring.group import Tag
from stratagem.worker.ring.ring_group import RingGroup

TAG = Tag(5, 0xABCD)
GOOD = Frame(frame_pb2.COLLECTIVE, 5, 0xABCD, 100, torch.arange(3.0))


class ScriptedLane:
    """Both ends of a lane: remembers what is sent, gives what the test says, or raises it."""

    name = "scripted"
    alive = True

    def __init__(self, outcome: Frame | StratagemError = GOOD) -> None:
        self.outcome = outcome
        self.sent: list[tuple[int, int, int, int, torch.Tensor, int]] = []
        self.closed: list[str] = []
        self.seen_waiting_on: int | None = None
        self.neighbours: RingGroup | None = None

    def takes_at_once(self, num_bytes: int) -> bool:
        return True

    def send(self, kind: int, transfer: int, group: int, offset: int, pieces: Pieces, num_elements: int) -> None:
        self._raise()
        self.sent.append((kind, transfer, group, offset, torch.cat(list(pieces())), num_elements))

    def flush(self, deadline: float) -> None:
        self._note()
        self._raise()

    def receive(self, transfer: int, deadline: float, into: torch.Tensor | Place | None = None) -> Frame:
        self._note()
        self._raise()
        assert isinstance(self.outcome, Frame)
        return self.outcome

    def forget(self, transfer: int) -> None:
        raise AssertionError("nothing to forget")

    def close(self, reason: str) -> None:
        self.closed.append(reason)

    def _note(self) -> None:
        if self.neighbours is not None:
            self.seen_waiting_on = self.neighbours.waiting_on()

    def _raise(self) -> None:
        if isinstance(self.outcome, StratagemError):
            raise self.outcome


def between(right: ScriptedLane, left: ScriptedLane) -> RingGroup:
    """Rank 1 of three."""
    neighbours = RingGroup(1, 3, right, left, chunk_bytes=1024, wire_dtype=None, timeout_s=9.0)
    right.neighbours = left.neighbours = neighbours
    return neighbours


def test_the_expected_message() -> None:
    right, left = ScriptedLane(), ScriptedLane()
    neighbours = between(right, left)
    into = torch.zeros(3)
    neighbours.receive_into(into, 100, TAG)
    assert torch.equal(into, torch.arange(3.0))
    assert neighbours.receive(into, 100, TAG) is GOOD.tensor
    neighbours.send(into, 7, TAG)
    neighbours.flush(TAG)
    kind, transfer, group, offset, tensor, num_elements = right.sent[0]
    assert (kind, transfer, group, offset, num_elements) == (frame_pb2.COLLECTIVE, 5, 0xABCD, 7, 3)
    assert torch.equal(tensor, into)
    assert (left.seen_waiting_on, right.seen_waiting_on, neighbours.waiting_on()) == (0, 2, None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"transfer": 6}, "collective 6"),
        ({"group": 1}, "fingerprint 00000001"),
        ({"offset": 99}, "at 99 of"),
        ({"tensor": torch.zeros(2)}, "2 elements"),
        ({"tensor": torch.zeros(3, dtype=torch.int32)}, "int32"),
        ({"kind": frame_pb2.GRADIENT}, "not in the same collective"),
    ],
)
def test_any_other_message_breaks_the_ring(change: dict[str, object], named: str) -> None:
    right, left = ScriptedLane(), ScriptedLane(GOOD._replace(**change))  # type: ignore[arg-type]
    neighbours = between(right, left)
    with pytest.raises(CollectiveError) as raised:
        neighbours.receive(torch.zeros(3), 100, TAG)
    assert raised.value.rank == 0
    assert "3 elements of float32 at 100 of collective 5 (fingerprint 0000abcd)" in str(raised.value)
    assert named in str(raised.value)
    assert right.closed == left.closed == [str(raised.value)]
    with pytest.raises(CollectiveError) as again:
        neighbours.check()
    assert again.value is raised.value


@pytest.mark.parametrize("error", [PeerUnavailableError("worker:0 is gone"), FrameError("that is no frame")])
def test_errors_of_lanes_name_the_neighbour(error: StratagemError) -> None:
    for calls, rank in ((("receive",), 0), (("send", "flush"), 2)):
        for call in calls:
            neighbours = between(ScriptedLane(error), ScriptedLane(error))
            with pytest.raises(CollectiveError, match=f"collective 5 failed at rank {rank}: {error}") as raised:
                neighbours.flush(TAG) if call == "flush" else getattr(neighbours, call)(torch.zeros(3), 0, TAG)
            assert raised.value.rank == rank
            assert neighbours.waiting_on() is None


def test_the_first_error_stays() -> None:
    neighbours = between(ScriptedLane(), ScriptedLane(PeerUnavailableError("the lane is closed")))
    first = neighbours.break_off(CollectiveError("the user closed it"))
    with pytest.raises(CollectiveError, match="the user closed it") as raised:
        neighbours.receive(torch.zeros(3), 0, TAG)
    assert raised.value is first
