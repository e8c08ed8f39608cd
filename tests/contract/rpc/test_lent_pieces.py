"""Weights that are sent from where they lie: a reader gets one version, and copies are made of what has not left."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import torch

from stratagem.ps.lane_server import QueueLane
from stratagem.ps.published import Publisher, cut_pieces
from stratagem.ps.requests import Version
from stratagem.ps.socket_lanes import TcpReplies
from stratagem.rpc.codec import decode_frame
from stratagem.rpc.frame_memory import FrameMemory
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.tcp_lane import TcpReceiver, TcpSender

FLAT = torch.arange(5 << 20, dtype=torch.float32)
"""Five frames of 4 MiB: more than a socket takes."""
NUM_FRAMES = sum(1 for _ in cut_pieces(FLAT))


class Reader:
    """A worker's end of a lane, and the ps's."""

    def __init__(self, memory: FrameMemory) -> None:
        ours, theirs = socket.socketpair()
        back, unused = socket.socketpair()
        self.receiver = TcpReceiver(theirs, "ps:0", BytesMeter())
        self.replies = TcpReplies(
            TcpSender(ours, "worker:0", BytesMeter()),
            TcpReceiver(back, "worker:0", BytesMeter()),
            lambda: 1 << 30,
            memory,
        )
        self._unused = unused

    def read(self, num_frames: int) -> torch.Tensor:
        frames = [self.receiver.receive(0, time.monotonic() + 30) for _ in range(num_frames)]
        return torch.cat([frame.tensor for frame in sorted(frames, key=lambda frame: frame.offset)])

    def close(self) -> None:
        self.replies.close(ConnectionError("over"))  # type: ignore[arg-type]
        self.receiver.close("over")
        self._unused.close()


@pytest.fixture
def memory() -> FrameMemory:
    return FrameMemory()


@pytest.fixture
def reader(memory: FrameMemory) -> Iterator[Reader]:
    reader = Reader(memory)
    yield reader
    reader.close()


def settled(memory: FrameMemory) -> bool:
    deadline = time.monotonic() + 30
    while memory.lent_bytes and time.monotonic() < deadline:
        time.sleep(0.001)  # a poll with a deadline
    return not memory.lent_bytes


def test_what_has_left_is_never_copied(reader: Reader, memory: FrameMemory) -> None:
    weights, publisher = FLAT.clone(), Publisher(1)
    for counter in range(3):
        publisher.send(Version(1, counter), weights, reader.replies, counter + 1)
        assert torch.equal(reader.read(NUM_FRAMES), FLAT + counter)
        assert settled(memory)
        publisher.outdate()
        weights += 1
    assert memory.num_bytes == 0


def test_a_reader_that_is_late_gets_the_version_it_was_promised(reader: Reader, memory: FrameMemory) -> None:
    weights, publisher = FLAT.clone(), Publisher(1)
    publisher.send(Version(1, 0), weights, reader.replies, 1)
    publisher.outdate()
    weights.fill_(torch.nan)
    assert 0 < memory.num_bytes == memory.kept_bytes <= FLAT.nbytes
    assert torch.equal(reader.read(NUM_FRAMES), FLAT)
    assert settled(memory) and memory.kept_bytes == 0


def test_two_readers_of_a_version_share_what_is_kept(reader: Reader, memory: FrameMemory) -> None:
    weights, publisher, other = FLAT.clone(), Publisher(1), Reader(memory)
    try:
        for one in (reader, other):
            publisher.send(Version(1, 0), weights, one.replies, 1)
        publisher.outdate()
        weights.fill_(torch.nan)
        assert memory.num_bytes <= FLAT.nbytes
        for one in (reader, other):
            assert torch.equal(one.read(NUM_FRAMES), FLAT)
    finally:
        other.close()


def test_a_lane_that_ends_borrows_nothing_any_more(memory: FrameMemory) -> None:
    weights, publisher, reader = FLAT.clone(), Publisher(1), Reader(memory)
    publisher.send(Version(1, 0), weights, reader.replies, 1)
    assert memory.lent_bytes
    reader.close()
    del reader
    assert settled(memory)
    publisher.outdate()
    assert memory.kept_bytes == 0


def test_nobody_waits_long_for_a_reader_that_does_not_read(reader: Reader, memory: FrameMemory) -> None:
    publisher = Publisher(1)
    publisher.send(Version(1, 0), FLAT.clone(), reader.replies, 1)
    memory.wait_left(FLAT.nbytes)
    assert memory.awaited_bytes, "there was room: nobody has waited"
    memory.wait_left(0)
    assert memory.awaited_bytes == 0 < memory.lent_bytes


def test_frames_of_the_grpc_lane_are_built_when_they_leave(memory: FrameMemory) -> None:
    weights, publisher, lane = FLAT.clone(), Publisher(1), QueueLane(lambda: 1 << 30, memory)
    publisher.send(Version(1, 0), weights, lane, 1)
    messages = lane.messages()
    first = decode_frame(next(messages)).tensor
    publisher.outdate()
    weights.fill_(torch.nan)
    assert memory.kept_bytes == FLAT.nbytes - first.nbytes
    rest = [decode_frame(next(messages)).tensor for _ in range(NUM_FRAMES - 1)]
    assert torch.equal(torch.cat([first, *rest]), FLAT)
    assert memory.num_bytes == 0, "beside messages, which malloc holds, memory for frames would lie idle"
    lane.close()
