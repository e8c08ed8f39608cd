"""What a ps has in flight at most: twice the weights, however many workers push."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.memory import read_pss
from stratagem.cluster.communication import Transport
from stratagem.cluster.config import WorkerConfig
from stratagem.cluster.membership import Member, Membership
from stratagem.cluster.units import Unit, Update
from stratagem.ps import store as ps_store
from stratagem.ps import waiting
from stratagem.ps.published import FRAME_BYTES
from stratagem.ps.specs import Limits
from stratagem.ps.store import Store
from stratagem.rpc import frame_memory, slots
from stratagem.rpc.generated import frame_pb2, ps_pb2
from stratagem.rpc.lane import nothing
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.lent_slots import Lender
from stratagem.rpc.security import OPEN
from stratagem.rpc.units import update_to_proto
from stratagem.worker.push.ps_client import PsClient
from tests.contract.ps.serving import serving
from tests.polling import until

NUM_WORKERS, NUM_STEPS = 6, 4
SIZE = 16 << 20  # 64 MiB, and as much momentum
FRAME = FRAME_BYTES // 4
"""Elements. Gradients come in frames as large as those that weights leave in: memory is used again by size."""
MOST = 2 * 4 * SIZE + NUM_WORKERS * 2 * FRAME_BYTES
"""Bytes: twice the weights, and of each lane a frame that waits for room and one that is leaving."""
MOST_SHARED = 2 * 2 * 4 * SIZE + NUM_WORKERS * (3 * FRAME_BYTES + slots.SEGMENT_BYTES) + slots.SEGMENT_BYTES
"""Bytes: two gradients and two versions; of each lane a frame that waits for room, one on its way and one that is being
filled; and of each pool the segment that it has begun."""


class Pusher:
    """A worker that pushes gradients and takes no care of what the ps can bear.

    Args:
        address: of the ps.
        index: of the worker.
        transport: the lane it takes.
        look: called each time that a frame has left.
    """

    def __init__(self, address: str, index: int, transport: Transport, look: Callable[[], None] = nothing) -> None:
        self.index = index
        self._look = look
        session: Any = SimpleNamespace(
            task=f"worker:{index}",
            incarnation=1,
            security=OPEN,
            membership=Membership(True, (Member("ps:0", address, 3, True),)),
            raise_if_stopped=lambda: None,
            wait_stopped=lambda timeout_s: None,
        )
        config = WorkerConfig(task="worker:0", peer_timeout_s=20.0, frame_bytes=4 * FRAME, transport=transport)
        self.client = PsClient(session, 0, BytesMeter(), config)
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
            self._look()
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


@contextlib.contextmanager
def pushed(address: str, num_workers: int, transport: Transport, look: Callable[[], None] = nothing) -> Iterator[None]:
    """What so many workers leave behind that have all pushed at once, and are still there."""
    pushers = [Pusher(address, index, transport, look) for index in range(num_workers)]
    gradient = torch.ones(SIZE)
    with ThreadPoolExecutor(num_workers) as pool:
        applied = list(pool.map(lambda pusher: pusher.push(gradient), pushers))
    yield
    for pusher in pushers:
        pusher.client.close("the test is over")
    assert applied == [NUM_STEPS] * num_workers


def _only(piece: torch.Tensor) -> list[torch.Tensor]:
    return [piece]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, nobody is taken for one that stands still: the bound is for those that do not."""
    monkeypatch.setattr(waiting, "ROOM_S", 600.0)
    monkeypatch.setattr(frame_memory, "PATIENCE_S", 600.0)


@pytest.fixture
def store() -> Store:
    return Store(limits=Limits(), frames_timeout_s=600.0)


@pytest.fixture
def address(store: Store) -> Iterator[str]:
    with serving(store, 32 << 20) as running:
        yield running.address


@pytest.mark.thorough
def test_six_workers_cost_a_ps_no_more_than_two(store: Store, address: str, patient: None) -> None:
    with pushed(address, NUM_WORKERS, "tcp"):
        assert store.state.num_bytes == 2 * 4 * SIZE
        assert 4 * SIZE < store.state.memory.num_bytes <= MOST


@pytest.mark.thorough
def test_six_workers_on_the_host_share_no_more_with_a_ps_than_two(address: str, patient: None) -> None:
    """Of all pages in shared memory, at both ends: one that is mapped twice in a process counts once."""
    before = _shared_bytes()
    seen: list[int] = []
    with pushed(address, NUM_WORKERS, "shm", lambda: seen.append(_shared_bytes())):
        assert 2 * 4 * SIZE < max(seen) - before <= MOST_SHARED


def test_two_workers_on_the_host_ask_once_for_the_memory_of_their_gradients(
    address: str, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    lend = Lender.lend

    def asks(lender: Lender, num_bytes: int) -> Any:
        asked.append(num_bytes)
        return lend(lender, num_bytes)

    monkeypatch.setattr(Lender, "lend", asks)
    with pushed(address, 2, "shm"):
        assert sum(asked) == 2 * (4 * SIZE + FRAME_BYTES)  # of which the last is for a next frame


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.thorough)])
def test_memory_of_what_is_on_its_way_is_given_back_with_the_last_lane(
    store: Store, address: str, transport: Transport
) -> None:
    before = _shared_bytes()
    with pushed(address, 2, transport):
        assert _shared_bytes() - before + store.state.memory.num_bytes > 4 * SIZE
    until(lambda: _shared_bytes() <= before + slots.SEGMENT_BYTES and not store.state.memory.num_bytes)


def test_memory_of_messages_is_given_back_with_the_last_lane(
    store: Store, address: str, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(ps_store, "give_back_freed_memory", lambda: given_back.append(len(store.state.senders.lanes)))
    with pushed(address, 2, "grpc"):
        assert not given_back
    until(lambda: bool(given_back))
    assert set(given_back) == {0} and store.state.memory.num_bytes == 0


def _shared_bytes() -> int:
    return read_pss(Path("/proc/self/smaps_rollup").read_text()).shared_bytes
