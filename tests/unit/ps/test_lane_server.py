"""The queue of reply frames."""

from __future__ import annotations

import pytest

from stratagem.errors import FencedError, LimitError
from stratagem.ps.lane_server import QueueLane


def test_frames_leave_in_order_whether_built_or_not() -> None:
    lane = QueueLane(lambda: 100)
    lane.send((b"a",))
    lane.send(iter([b"b", b"c"]))
    lane.send((b"d",))
    frames = lane.frames()
    assert [next(frames) for _ in range(4)] == [b"a", b"b", b"c", b"d"]
    lane.close()
    assert list(frames) == []
    lane.send((b"late",))
    assert list(lane.frames()) == []


def test_a_reader_that_does_not_read_is_cut_off() -> None:
    lane = QueueLane(lambda: 10)
    lane.send((b"x" * 10,))
    frames = lane.frames()
    assert next(frames) == b"x" * 10
    lane.send((b"x" * 10,))
    lane.send((b"x",))
    with pytest.raises(LimitError, match="11 bytes wait"):
        next(frames)


def test_the_first_reason_is_the_one_told() -> None:
    lane = QueueLane(lambda: 10)
    lane.close(FencedError("dead"))
    lane.close()
    with pytest.raises(FencedError, match="dead"):
        next(lane.frames())
