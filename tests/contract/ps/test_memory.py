"""What a ps has at most, as a process: weights, slots and twice the weights, however many workers push."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stratagem.cluster.membership import Member, Membership
from stratagem.cluster.units import Unit, Update
from stratagem.rpc.generated import chief_pb2, frame_pb2, ps_pb2
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.security import OPEN
from stratagem.rpc.server import RunningServer
from stratagem.rpc.units import update_to_proto
from stratagem.worker.push.ps_client import PsClient
from tests.contract.ps.test_process import SessionOnly, chief, finish, start

__all__ = ["chief"]
pytestmark = pytest.mark.usefixtures("preloaded")

NUM_WORKERS, NUM_STEPS = 6, 2
SIZE = 16 << 20  # 64 MiB, and as much momentum
FRAME = 1 << 20
MOST = 4.0 + NUM_WORKERS * FRAME / SIZE
"""Times the weights: these, momentum, twice the weights in flight, and a frame that each lane holds while it waits."""
SLACK = 0.8
"""What the heap keeps in pieces. Measured 4.9 in all; without room that is waited for it would be 8 and more."""


class Pusher:
    """A worker that pushes gradients over tcp and takes no care of what the ps can bear."""

    def __init__(self, address: str, index: int) -> None:
        self.index = index
        session: Any = SimpleNamespace(
            task=f"worker:{index}",
            incarnation=1,
            security=OPEN,
            membership=Membership(True, (Member("ps:0", address, 3, True),)),
            raise_if_stopped=lambda: None,
            wait_stopped=lambda timeout_s: None,
        )
        self.client = PsClient(session, 0, BytesMeter(), 20.0, 4 * FRAME, "tcp")
        self.client.connect()
        shard = ps_pb2.ShardSpec(variable="w", shape=[SIZE], num_rows=SIZE)
        group = ps_pb2.GroupSpec(group=1, optimizer="SGD", dtype=frame_pb2.FLOAT32, shards=[shard])
        create = ps_pb2.CreateVariablesRequest(groups=[group], can_initialize=not index)
        if self.client.call("CreateVariables", create).initialize:
            values = self.stage(torch.zeros(SIZE), frame_pb2.VALUES)
            self.client.call("AssignValues", ps_pb2.AssignValuesRequest(values=values, groups=[1]), sequenced=True)

    def stage(self, flat: torch.Tensor, kind: int = frame_pb2.GRADIENT) -> ps_pb2.TransferRef:
        """Sends a flat tensor."""
        transfer = self.client.new_transfer()
        for first in range(0, SIZE, FRAME):
            piece = flat[first : first + FRAME]
            self.client.lane.send(kind, transfer, 1, first, functools.partial(_only, piece), FRAME)
        return ps_pb2.TransferRef(transfer=transfer, num_frames=SIZE // FRAME)

    def push(self, gradient: torch.Tensor) -> int:
        """Some updates; each brings the weights. Returns the number of those that were applied."""
        num_applied = 0
        for step in range(NUM_STEPS):
            group = ps_pb2.GroupCommit(group=1)
            group.hyper_parameters.add().update({"lr": 0.5, "momentum": 0.9})
            request = ps_pb2.CommitUpdateRequest(
                update=update_to_proto(Update((Unit(1, self.index, step),), 0)),
                gradients=self.stage(gradient),
                groups=[group],
                action=ps_pb2.APPLY,
                scale=1.0,
                reply_transfer=self.client.new_transfer(),
                num_servers=1,
            )
            call = self.client.start("CommitUpdate", request, sequenced=True)
            num_applied += call.result(lambda frame: None).applied
        return num_applied


def _only(piece: torch.Tensor) -> list[torch.Tensor]:
    return [piece]


def pss(pid: int) -> int:
    """Bytes of a process, of what it shares its part."""
    lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


@contextlib.contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """Inside, looks at a process again and again; the last it says is the most that it had."""
    ended, found = threading.Event(), [pss(pid)]

    def look() -> None:
        while not ended.wait(0.02):
            found.append(max(found[-1], pss(pid)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


@pytest.mark.thorough
def test_six_workers_cost_a_ps_no_more_than_two(chief: tuple[SessionOnly, RunningServer]) -> None:
    servicer, server = chief
    process = start("--chief", server.address)
    try:
        address = servicer.joined.get(timeout=60).address
        base = pss(process.pid)
        pushers = [Pusher(address, index) for index in range(NUM_WORKERS)]
        gradient = torch.ones(SIZE)
        with watched(process.pid) as found, ThreadPoolExecutor(NUM_WORKERS) as pool:
            applied = list(pool.map(lambda pusher: pusher.push(gradient), pushers))
        for pusher in pushers:
            pusher.client.close("the test is over")
        servicer.events.put(chief_pb2.SessionEvent(stop=chief_pb2.Stop(exit_code=0, reason="all done")))
        assert finish(process)[0] == 0
    finally:
        process.kill()
    assert applied == [NUM_STEPS] * NUM_WORKERS
    weights = 4 * SIZE
    assert 3 < (found[-1] - base) / weights < MOST + SLACK, f"{(found[-1] - base) / weights:.2f} times the weights"
