"""Two workers of one process form a ring over real servers: over IPv6, and where a lane cannot be had."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stratagem.cluster.communication import CommunicationOptions
from stratagem.cluster.config import ServerConfig
from stratagem.cluster.membership import Member, Membership
from stratagem.cluster.task import Incarnation
from stratagem.errors import ClusterTimeoutError, PeerUnavailableError
from stratagem.rpc.lane_listener import LaneListener
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.security import OPEN
from stratagem.rpc.server import add_servicer, serve
from stratagem.worker.ring import ring_member
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.lane_plan import RankInfo
from stratagem.worker.ring.peers import Peers
from stratagem.worker.ring.ring_group import RingGroup
from stratagem.worker.ring.ring_member import RingMember
from stratagem.worker.ring.ring_service import RingService
from stratagem.worker.servicer import SERVICE, WorkerServicer
from tests.polling import until

CPU = torch.device("cpu")
OVER_TCP = CommunicationOptions(transport="tcp", chunk_bytes=1 << 16)


def session_of(index: int, members: list[Member]) -> Any:
    """What the chief says, without a chief."""
    return SimpleNamespace(
        task=f"worker:{index}",
        incarnation=index + 1,
        security=OPEN,
        membership=Membership(True, tuple(members)),
        on_membership=lambda callback: None,
        wait_ready=lambda timeout_s: None,
        wait_stopped=lambda timeout_s: None,
        raise_if_stopped=lambda: None,
    )


@contextlib.contextmanager
def formed(host: str, doors: list[LaneListener], options: CommunicationOptions) -> Iterator[list[RingMember]]:
    """The ring of two workers whose servers listen at ``host``; ``doors`` let sockets in."""
    known: list[Member] = []
    with contextlib.ExitStack() as undo:
        members, ring_services = [], []
        for index, listener in enumerate(doors):
            ring_service = RingService(host, lambda: Membership(True, tuple(known)), BytesMeter())
            ring_service.listener = listener
            running = serve(
                ServerConfig(
                    task="worker:0", bind=f"[{host}]:0" if ":" in host else f"{host}:0", max_message_bytes=1 << 20
                ),
                lambda server, ring_service=ring_service: add_servicer(SERVICE, WorkerServicer(ring_service), server),  # type: ignore[misc]
                services=[SERVICE.full_name],
            )
            undo.callback(running.stop, 0)
            known.append(Member(f"worker:{index}", running.address, index + 1, True))
            ring_services.append(ring_service)
        for index, ring_service in enumerate(ring_services):
            members.append(RingMember(ring_service, session_of(index, known), BytesMeter()))
            undo.callback(members[-1].close, "the test is over")
        pool = undo.enter_context(futures.ThreadPoolExecutor(2))
        list(pool.map(lambda member: member.form(options, CPU, 60.0), members))
        yield members


def ring_of(members: list[RingMember]) -> list[Communicator]:
    """Their communicators."""
    return [one for member in members if (one := member.ring_service.communicator) is not None]


def sums(ring: list[Communicator]) -> list[float]:
    """What an all-reduce of 1 and 2 gives the ranks."""
    with futures.ThreadPoolExecutor(2) as pool:
        tensors = (torch.full((100,), float(one.rank + 1)) for one in ring)
        return [float(total[7]) for total in pool.map(lambda one, tensor: one.all_reduce(tensor), ring, tensors)]


def test_over_ipv6_the_sockets_are_ipv6_too() -> None:
    with formed("::1", [LaneListener("::1"), LaneListener("::1")], OVER_TCP) as members:
        assert [one.group.name for one in ring_of(members)] == ["ring over tcp"] * 2
        assert sums(ring_of(members)) == [3.0, 3.0]


@pytest.mark.parametrize(("transport", "is_said"), [("shm", True), ("tcp", False)])
def test_options_of_lanes_that_a_ring_in_shared_memory_does_not_have_are_said(
    transport: Any, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = CommunicationOptions(transport=transport, wire_dtype="bfloat16", stripes=2)
    with formed("127.0.0.1", [LaneListener("127.0.0.1"), LaneListener("127.0.0.1")], options):
        pass
    assert ("wire_dtype, stripes: no effect over shm" in caplog.text) == is_said


def test_a_rank_that_is_late_is_named() -> None:
    with formed("127.0.0.1", [LaneListener("127.0.0.1"), LaneListener("127.0.0.1")], OVER_TCP) as members:
        first, second = ring_of(members)
        assert [member.waiting() for member in members] == [None, None]
        with futures.ThreadPoolExecutor(1) as pool:
            early = pool.submit(first.all_reduce, torch.ones(3))
            until(lambda: (found := members[0].waiting()) is not None and found[1] > 0.2)
            assert (members[0].waiting() or [""])[0] == "worker:1 in all_reduce sum of 3 float32"
            assert members[1].waiting() is None
            second.all_reduce(torch.ones(3))
            early.result()
        assert [member.waiting() for member in members] == [None, None]


def test_who_waits_for_a_ring_says_whom_it_cannot_reach(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A firewall before the first rank: the others waited without a word, and it said that not all had come."""
    caplog.set_level("INFO")
    for module in ("peers", "ring_service"):
        monkeypatch.setattr(f"stratagem.worker.ring.{module}.PATIENCE_S", 0.1)
    unheard = socket.socket()  # listens to nobody, and no other process can while it has the port
    unheard.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{unheard.getsockname()[1]}"
    known = [Member("worker:0", address, 1, True), Member("worker:1", "127.0.0.1:2", 2, True)]
    said = Membership(True, tuple(known))
    service, cut_off = (RingService("127.0.0.1", lambda: said, BytesMeter()) for _ in range(2))
    with pytest.raises(PeerUnavailableError, match="not every rank has arrived yet: worker:1 to come"):
        service.meet(Incarnation("worker:0", 1), 0, 1, RankInfo("worker:0"))
    service.close()
    member = RingMember(cut_off, session_of(1, known), BytesMeter())
    with pytest.raises(ClusterTimeoutError, match=rf"worker:0 cannot be reached .*, and can it reach {address}\?"):
        member.form(OVER_TCP, CPU, 1.0)
    member.close("the test is over")
    unheard.close()
    assert f"Waiting for the ring to form at worker:0 ({address}): worker:0 cannot be reached" in caplog.text


def test_a_group_that_not_all_ranks_confirm_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    meet, close = Peers.meet, RingGroup.close

    def late(self: Any, info: Any, deadline: float) -> Any:
        if self.num_meetings:
            raise ClusterTimeoutError("somebody does not come any more")
        return meet(self, info, deadline)

    def closing(self: Any, reason: str) -> None:
        closed.append(reason)
        close(self, reason)

    monkeypatch.setattr(Peers, "meet", late)
    monkeypatch.setattr(RingGroup, "close", closing)
    doors = [LaneListener("127.0.0.1"), LaneListener("127.0.0.1")]
    with pytest.raises(ClusterTimeoutError), formed("127.0.0.1", doors, OVER_TCP):
        pass
    assert closed == ["the ring did not form"] * 2


@pytest.mark.parametrize(
    ("listener", "why"),
    [
        (LaneListener("2001:db8::1"), "cannot listen for tcp lanes at 2001:db8::1"),
        (LaneListener("127.0.0.1", OPEN, 0), "has 0 lanes that are not open yet, which is max_lanes_per_peer"),
    ],
    ids=["no such address", "refused by a limit"],
)
def test_without_sockets_auto_takes_grpc_and_says_why(
    listener: LaneListener, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ring_member, "own_host_id", lambda: threading.current_thread().name)  # two hosts
    monkeypatch.setattr(ring_member, "OPEN_S", 3.0)  # the other rank waits for the visit that does not come
    options = CommunicationOptions(chunk_bytes=1 << 16)
    with caplog.at_level("INFO"), formed("127.0.0.1", [LaneListener("127.0.0.1"), listener], options) as members:
        assert [one.group.name for one in ring_of(members)] == ["ring over grpc"] * 2
        assert sums(ring_of(members)) == [3.0, 3.0]
    assert "no tcp: worker:0: " in caplog.text and why in caplog.text


def test_lanes_of_a_try_that_failed_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_member, "own_host_id", lambda: threading.current_thread().name)  # two hosts
    monkeypatch.setattr(ring_member, "OPEN_S", 3.0)
    door, shut = LaneListener("127.0.0.1", OPEN, 1), LaneListener("2001:db8::1")
    with formed("127.0.0.1", [door, shut], CommunicationOptions(chunk_bytes=1 << 16)) as members:
        assert [one.group.name for one in ring_of(members)] == ["ring over grpc"] * 2
        assert door.expect("the next try", "tcp", "worker:1").port  # the visit of the first one does not count any more
