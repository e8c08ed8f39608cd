"""Run by test_lanes.py: a process with lanes forks a child, as a DataLoader does for its workers."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from typing import Any

import torch

from stratagem.errors import PeerUnavailableError
from stratagem.rpc.generated import frame_pb2
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.shm_lane import ShmSender
from stratagem.rpc.shm_receiver import ShmReceiver
from stratagem.rpc.tcp_lane import TcpReceiver, TcpSender


def main(kind: str) -> None:
    outward, inward = socket.socketpair()
    meter = BytesMeter()
    sender: Any = ShmSender(outward, "b", meter, lambda: 1 << 20) if kind == "shm" else TcpSender(outward, "b", meter)
    receiver: Any = (ShmReceiver if kind == "shm" else TcpReceiver)(inward, "a", meter)
    sender.send(frame_pb2.COLLECTIVE, 1, 0, 0, lambda: [torch.full((1000,), 7.0)], 1000)
    frame = receiver.receive(0, time.monotonic() + 10)
    end, hold = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hold)
        del frame  # the child's copy: the slot is the parent's to give back
        gc.collect()
        os.read(end, 1)  # stays until the parent closes its end
        os._exit(0)
    os.close(end)
    for number in range(8):  # would fill the slot if the child had given it back
        sender.send(frame_pb2.COLLECTIVE, 2, 0, 0, lambda value=float(number): [torch.full((1000,), value)], 1000)
        receiver.receive(0, time.monotonic() + 10)
    assert bool((frame.tensor == 7.0).all()), "a slot came back that was still looked at"
    sender.close("the parent's end")
    start = time.monotonic()
    try:
        receiver.receive(0, time.monotonic() + 30)
        raise AssertionError("a frame came out of a closed lane")
    except PeerUnavailableError as error:
        assert "in time" not in str(error), "the child kept the lane open"
    print(f"{time.monotonic() - start:.3f} s")
    receiver.close("done")
    os.close(hold)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1])
