"""The queue of reply frames."""

from __future__ import annotations

import pytest
import torch

from stratagem.errors import FencedError, LimitError
from stratagem.ps.lane_server import QueueLane
from stratagem.ps.published import HeldFrame
from stratagem.rpc.codec import decode_frame

PIECE = torch.arange(4.0)


def test_frames_leave_in_order_whoever_holds_them() -> None:
    lane = QueueLane(lambda: 100)
    lane.send(1, lane.hold(1, 7, 0, PIECE))
    lane.send(1, HeldFrame(7, 4, PIECE + 1))
    lane.send(2, lane.hold(1, 7, 8, PIECE + 2))
    messages = lane.messages()
    frames = [decode_frame(next(messages)) for _ in range(3)]
    assert [(frame.transfer, frame.offset) for frame in frames] == [(1, 0), (1, 4), (2, 8)]
    assert [float(frame.tensor[0]) for frame in frames] == [0, 1, 2]
    lane.close()
    assert list(messages) == []
    lane.send(1, HeldFrame(7, 0, PIECE))
    assert list(lane.messages()) == []


def test_a_frame_is_not_copied_again_for_the_transfer_it_was_held_for() -> None:
    lane = QueueLane(lambda: 100)
    held = lane.hold(5, 7, 0, PIECE)
    lane.send(5, held)
    assert next(lane.messages()) is held.origin[1]


def test_a_reader_that_does_not_read_is_cut_off() -> None:
    lane = QueueLane(lambda: 16)
    lane.send(1, lane.hold(1, 7, 0, PIECE))
    messages = lane.messages()
    next(messages)
    lane.send(1, lane.hold(1, 7, 0, PIECE))
    lane.send(1, lane.hold(1, 7, 4, PIECE[:1]))
    with pytest.raises(LimitError, match="20 bytes wait"):
        next(messages)


def test_the_first_reason_is_the_one_told() -> None:
    lane = QueueLane(lambda: 10)
    lane.close(FencedError("dead"))
    lane.close()
    with pytest.raises(FencedError, match="dead"):
        next(lane.messages())
