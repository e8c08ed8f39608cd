"""The door of a worker over real gRPC: streams that nobody takes go, and keep nothing."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from stratagem.cluster.config import ServerConfig
from stratagem.cluster.membership import Member, Membership
from stratagem.cluster.task import Incarnation
from stratagem.errors import PeerUnavailableError
from stratagem.rpc.channels import connect
from stratagem.rpc.generated import common_pb2, lane_pb2, worker_pb2_grpc
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.server import add_servicer, serve
from stratagem.worker.ring.lane_plan import RankInfo
from stratagem.worker.ring.ring_service import RingService
from stratagem.worker.servicer import SERVICE, WorkerServicer

PEER = common_pb2.Sender(task="worker:1", incarnation=5)
LIMITS = ServerConfig(task="worker:0", max_message_bytes=1 << 20, max_calls_per_peer=4)


def membership() -> Membership:
    return Membership(True, (Member(PEER.task, "127.0.0.1:1", PEER.incarnation, True),), PEER.task)


@pytest.fixture
def address() -> Iterator[str]:
    ring_service = RingService("127.0.0.1", membership, BytesMeter())
    running = serve(
        LIMITS,
        lambda server: add_servicer(SERVICE, WorkerServicer(ring_service), server),
        services=[SERVICE.full_name],
    )
    yield running.address
    ring_service.close()
    running.stop(0)


def token_for(stub: worker_pb2_grpc.WorkerStub, purpose: str) -> bytes:
    """Of a lane; asked for until the server has room again."""
    request = lane_pb2.OpenLaneRequest(sender=PEER, generation=1, kind=lane_pb2.GRPC, purpose=purpose)
    deadline = time.monotonic() + 30
    while True:
        try:
            return stub.OpenLane(request, timeout=30).token
        except grpc.RpcError as error:
            assert time.monotonic() < deadline, error
            time.sleep(0.01)


def test_streams_that_nobody_took_leave_their_places(address: str) -> None:
    # HTTP/2 gives a connection twice max_calls_per_peer streams: what is beyond would be refused for good.
    channel = connect(address)
    stub = worker_pb2_grpc.WorkerStub(channel)
    exchange: Any = channel.stream_stream("/stratagem.Worker/Exchange", None, None)
    gc.disable()  # nor may they wait for a collection
    try:
        for number in range(4 * LIMITS.max_calls_per_peer):
            over = threading.Event()
            metadata = (("stratagem-token-bin", token_for(stub, str(number))),)
            stream = exchange(iter(over.wait, True), metadata=metadata)
            over.set()
            stream.cancel()
    finally:
        gc.enable()
        channel.close()


def test_who_does_not_hear_the_chief_is_told_that_it_is_lost() -> None:
    """It was told to ask again, and in the end that the first rank does not take part."""
    lost = Membership(True, (Member(PEER.task, "127.0.0.1:1", PEER.incarnation, False),), PEER.task)
    ring_service = RingService("127.0.0.1", lambda: lost, BytesMeter())
    try:
        with pytest.raises(PeerUnavailableError, match=r"worker:1 .* is lost, as the chief has reported here"):
            ring_service.meet(Incarnation(PEER.task, PEER.incarnation), 1, 1, RankInfo(PEER.task))
    finally:
        ring_service.close()


def test_a_group_that_is_being_formed_ends_when_another_rank_gives_up() -> None:
    service, caller = RingService("127.0.0.1", membership, BytesMeter()), Incarnation("worker:1", 5)
    closed: list[str] = []
    service.forms((1, 2), closed.append)
    service.abort(caller, (1, 1), "of the try before", False)
    assert not closed
    service.abort(caller, (1, 2), "no lane", False)
    service.forms((1, 2), closed.append)  # it was said before the group was made
    assert closed == ["no lane", "another rank could not open its lanes"]
    service.forms((1, 3), closed.append)
    service.has_formed()
    service.abort(caller, (1, 3), "a lane broke", False)
    assert len(closed) == 2, "then the diagnosis is told"
    service.close()
