"""A ring over real servers loses a rank: those who are left form the next generation, once the chief says so."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem.cluster.communication import CommunicationOptions
from stratagem.cluster.config import ServerConfig
from stratagem.cluster.membership import Member, Membership
from stratagem.cluster.task import Incarnation
from stratagem.errors import CollectiveError, PeerUnavailableError, StratagemError
from stratagem.measuring.flight import FLIGHT
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.server import add_servicer, serve
from stratagem.rpc.tcp_lane import TcpSender
from stratagem.worker.ring import peers as peers_module
from stratagem.worker.ring import ring_member
from stratagem.worker.ring import ring_service as ring_service_module
from stratagem.worker.ring.building import Opener
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.lane_plan import RankInfo
from stratagem.worker.ring.peers import MembersChangedError, Peers
from stratagem.worker.ring.ring_member import RingMember
from stratagem.worker.ring.ring_service import RingService
from stratagem.worker.servicer import SERVICE, WorkerServicer
from tests.polling import until

CPU = torch.device("cpu")


class Chief:
    """What the chief tells everybody."""

    def __init__(self, min_workers: int) -> None:
        self.membership = Membership(True, (), min_workers=min_workers, generation=1)
        self.changed = threading.Condition()
        self.callbacks: list[Callable[[Membership], None]] = []
        self.members: list[RingMember] = []

    def say(self, members: Sequence[Member], generation: int) -> None:
        with self.changed:
            self.membership = dataclasses.replace(self.membership, members=tuple(members), generation=generation)
            self.changed.notify_all()
        for callback in self.callbacks:
            callback(self.membership)

    def leave(self, *tasks: str, generation: int) -> None:
        """These are there no longer; the same generation: they have finished."""
        live = (dataclasses.replace(one, live=one.live and one.task not in tasks) for one in self.membership.members)
        self.say(list(live), generation)


class SessionOf:
    """A worker's session, without a stream."""

    def __init__(self, chief: Chief, index: int) -> None:
        self.task, self.incarnation = f"worker:{index}", index + 1
        self._chief = chief

    @property
    def membership(self) -> Membership:
        return self._chief.membership

    @membership.setter
    def membership(self, value: Membership) -> None:
        raise NotImplementedError

    @property
    def security(self) -> Security:
        return OPEN

    def on_membership(self, callback: Callable[[Membership], None]) -> None:
        self._chief.callbacks.append(callback)

    def wait_ready(self, timeout_s: float) -> Membership:
        return self.membership

    def wait_membership(self, accept: Callable[[Membership], bool], timeout_s: float) -> bool:
        with self._chief.changed:
            return self._chief.changed.wait_for(lambda: accept(self.membership), timeout_s)

    def raise_if_stopped(self) -> None:
        """Nobody is stopped."""

    def wait_stopped(self, timeout_s: float | None) -> StratagemError | None:
        return None


@contextlib.contextmanager
def ring_of(
    size: int, transport: str, min_workers: int = 2, then: Callable[[Communicator], object] = lambda one: None
) -> Iterator[tuple[Chief, list[Communicator]]]:
    """A formed ring, whose workers went on with ``then`` at once."""
    chief = Chief(min_workers)
    with contextlib.ExitStack() as undo:
        members, known = chief.members, []
        for index in range(size):
            ring_service = RingService("127.0.0.1", lambda: chief.membership, BytesMeter())
            running = serve(
                ServerConfig(task="worker:0", max_message_bytes=1 << 20),
                lambda server, ring_service=ring_service: add_servicer(SERVICE, WorkerServicer(ring_service), server),  # type: ignore[misc]
                services=[SERVICE.full_name],
            )
            undo.callback(running.stop, 0)
            known.append(Member(f"worker:{index}", running.address, index + 1, True))
            members.append(RingMember(ring_service, SessionOf(chief, index), BytesMeter()))
            undo.callback(members[-1].close, "the test is over")
        chief.say(known, 1)
        options = CommunicationOptions(transport=transport, chunk_bytes=1 << 16)  # type: ignore[arg-type]

        def begin(member: RingMember) -> Communicator:
            communicator = member.form(options, CPU, 60.0)
            then(communicator)
            return communicator

        with futures.ThreadPoolExecutor(size) as pool:
            yield chief, list(pool.map(begin, members))


def sums(ring: Sequence[Communicator], size: int = 1000) -> list[float]:
    """What an all-reduce of powers of 2, one a worker, gives these ranks."""
    with futures.ThreadPoolExecutor(len(ring)) as pool:
        worker = [int(one.healing.me[7]) for one in ring if one.healing is not None]
        tensors = [torch.full((size,), float(2**index)) for index in worker]
        return [float(total[7]) for total in pool.map(lambda one, tensor: one.all_reduce(tensor), ring, tensors)]


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_those_who_are_left_go_on_down_to_one(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    with ring_of(3, transport, min_workers=1) as (chief, ring):
        assert sums(ring) == [7.0] * 3
        with futures.ThreadPoolExecutor(1) as pool:  # the others wait in the middle of a collective
            waiting = pool.submit(sums, [ring[0], ring[2]], 1 << 20)
            ring[1].group.close("killed")
            chief.leave("worker:1", generation=2)
            assert waiting.result(60) == [5.0] * 2
        assert [(one.rank, one.size, one.generation) for one in (ring[0], ring[2])] == [(0, 2, 1), (1, 2, 1)]
        assert sums([ring[0], ring[2]]) == [5.0] * 2
        ring[0].group.close("killed")
        chief.leave("worker:0", generation=3)
        assert sums([ring[2]]) == [4.0]
    assert "last collectives" not in caplog.text  # nothing was lost that the log should tell of
    assert any("CollectiveError in" in line for line in FLIGHT.lines())


@pytest.mark.parametrize("is_awaited", [True, False])
def test_the_memory_of_a_group_that_failed_goes_before_any_garbage_is_collected(is_awaited: bool) -> None:
    """Each death left the shared memory of a generation in the processes of the others, until Python looked."""

    def segments() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:stratagem")

    def reduce(one: Communicator) -> float:
        ones = torch.ones(1 << 20)
        return float(one.atomic(lambda: one.submit(lambda: one.all_reduce(ones), is_awaited).result())[7])

    gc.collect()
    before = segments()
    with ring_of(3, "shm") as (chief, ring), futures.ThreadPoolExecutor(3) as pool:
        assert list(pool.map(reduce, ring)) == [3.0] * 3
        assert segments() == before + 3 * 3, "one of each rank, mapped by all in this process"
        gc.disable()
        try:
            left = [pool.submit(reduce, one) for one in ring[:2]]
            until(lambda: all(one.is_inside for one in ring[:2]))
            ring[2].group.close("killed")
            chief.leave("worker:2", generation=2)
            assert [one.result(60) for one in left] == [2.0] * 2
            del left
            until(lambda: segments() == before + 2 * 2, deadline_s=10.0)
        finally:
            gc.enable()


def test_who_has_not_heard_that_the_ring_formed_goes_on_with_who_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank died with its last answer: one compared what each had completed, the other began to train."""
    meet, said = Peers.meet, threading.Event()

    def unheard(peers: Peers, info: RankInfo, deadline: float) -> Sequence[RankInfo]:
        replies = meet(peers, info, deadline)
        if peers.rank == 1 and peers.meeting == (1, 2):
            chief: Chief = peers._session._chief  # type: ignore[attr-defined]
            until(lambda: all(chief.members[rank].ring_service.communicator is not None for rank in (0, 2)))
            chief.leave("worker:0", generation=2)
            said.set()
            raise MembersChangedError
        return replies

    def reduce(one: Communicator) -> None:
        if one.healing is not None and not one.healing.me.startswith("worker:0/"):
            totals.append(float(one.all_reduce(torch.ones(1))))

    totals: list[float] = []
    monkeypatch.setattr(Peers, "meet", unheard)
    with ring_of(3, "tcp", then=reduce) as (_, ring):
        assert said.is_set() and totals == [2.0, 2.0]
        assert sums(ring[1:]) == [6.0, 6.0]
        assert [one.generation for one in ring[1:]] == [0, 1], "both in the first group that they have in common"


def test_who_has_finished_is_not_lost() -> None:
    with ring_of(3, "tcp") as (chief, ring):
        ring[0].group.close("its script ended")
        chief.leave("worker:0", generation=1)
        with pytest.raises(CollectiveError, match=r"worker:0 has finished its script, and worker:[12] has not"):
            sums(ring[1:])


def test_who_was_quicker_to_leave_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    """It told the chief goodbye before the others had heard its last message."""
    with ring_of(3, "tcp", min_workers=0) as (chief, ring), futures.ThreadPoolExecutor(3) as pool:
        leaving = [pool.submit(member.leave) for member in chief.members[:2]]
        until(lambda: all(one.position.what == "barrier" for one in ring[:2]))
        chief.leave("worker:2", generation=1)
        leaving.append(pool.submit(chief.members[2].leave))
        for each in leaving:
            each.result(60)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_too_few_are_an_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ring_member, "HEAR_S", 0.3)
    monkeypatch.setattr(ring_member, "HEAL_S", 0.5)
    with ring_of(2, "tcp") as (chief, ring):
        ring[0].group.close("killed")
        chief.leave("worker:0", generation=2)
        with pytest.raises(CollectiveError, match="1 workers are left, and a ring continues with at least 2"):
            sums(ring[1:])
    assert caplog.text.count("the last collectives and commits here") == 1


def cut_off(ring: Sequence[Communicator], rank: int) -> None:
    """Breaks the connection of a rank to the next one, as a reset on its way does; both know it then."""
    lane, other = ring[rank].group._right_lane, ring[(rank + 1) % len(ring)].group._left_lane  # type: ignore[attr-defined]
    if isinstance(lane, TcpSender):
        lane._sock.shutdown(socket.SHUT_RDWR)
    else:
        lane._call.cancel()
        until(lambda: lane._inbox.error is not None and other._inbox.error is not None)


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_connection_that_breaks_between_two_that_live_is_made_again(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ring_of(3, transport) as (_, ring):
        assert sums(ring) == [7.0] * 3
        for index in range(3):  # in between
            cut_off(ring, index)
            assert sums(ring, 1 << 16) == [7.0] * 3
        with futures.ThreadPoolExecutor(2) as pool:  # while two wait for the third one
            waiting = pool.submit(lambda: [sums(ring[:2]), sums(ring[:2])])
            until(lambda: all("all_reduce" in one.position.what for one in ring[:2]))
            cut_off(ring, 0)
            assert [sums(ring[2:]), sums(ring[2:])] == [[7.0], [7.0]]
            assert waiting.result(60) == [[7.0] * 2, [7.0] * 2]
        assert [one.generation for one in ring] == [4] * 3
        assert all(one.healing is not None and not one.healing.losses for one in ring)
    assert "the ring continues after a connection broke: rank 0 of 3, generation 1" in caplog.text
    assert "last collectives" not in caplog.text


@pytest.fixture
def told_twice(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nobody hears what is said of broken lanes when it is said first; what was said."""
    abort, said = Peers.abort, []

    def unheard(peers: Peers, reason: str, is_out_of_step: bool, timeout_s: float) -> None:
        said.append(reason)
        if len(said) > 1:
            abort(peers, reason, is_out_of_step, timeout_s)

    monkeypatch.setattr(Peers, "abort", unheard)
    monkeypatch.setattr(peers_module, "PATIENCE_S", 0.2)
    monkeypatch.setattr(ring_service_module, "PATIENCE_S", 0.2)
    return said


def test_a_connection_that_breaks_while_others_take_newcomers_in_is_made_again(told_twice: list[str]) -> None:
    """They waited for the first rank to take in, and it for them."""

    def take_in(one: Communicator) -> None:
        assert one.healing is not None
        one.healing.take_in(one, lambda: None)

    with ring_of(3, "tcp") as (_, ring), futures.ThreadPoolExecutor(3) as pool:
        assert sums(ring) == [7.0] * 3
        assert ring[0].healing is not None
        ring[0].healing._num_done -= 1  # it had not heard the end of that
        cut_off(ring, 0)
        taking = [pool.submit(take_in, one) for one in ring[1:]]
        assert sums(ring[:1]) == [7.0] and len(told_twice) > 1
        taking.append(pool.submit(take_in, ring[0]))
        for each in taking:
            each.result(60)
        assert sums(ring) == [7.0] * 3


def test_who_cannot_open_a_lane_says_so_until_all_have_heard(
    told_twice: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others waited in the first barrier, or for the lane, as long as one may stand still."""
    sender, failed = Opener.sender, threading.Event()
    monkeypatch.setattr(ring_member, "OPEN_S", 1000.0)

    def failing(opener: Opener, *arguments: Any) -> Any:
        if opener._peers.rank == 2 and not failed.is_set():
            failed.set()
            raise PeerUnavailableError("worker:0 cannot be reached")
        return sender(opener, *arguments)

    monkeypatch.setattr(Opener, "sender", failing)
    with ring_of(3, "tcp") as (_, ring):
        assert sums(ring) == [7.0] * 3 and failed.is_set() and len(told_twice) > 1
    assert "The ring could not open its lanes (tcp): worker:0 cannot be reached" in caplog.text, "and in its own log"


def test_a_rank_that_dies_while_the_lanes_open_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine was gone, and no connection broke: the others waited in the first barrier until the time-out."""
    made, form, held, chiefs = Opener.made, RingMember.form, list[Any](), list[Chief]()

    class Died(BaseException):
        pass

    def dies(opener: Opener, group: Any) -> None:
        if opener._peers.rank == 0 and opener._peers.meeting == (1, 1):
            held.append(group)  # its lanes stay open
            chiefs.append(opener._peers._session._chief)  # type: ignore[attr-defined]
            raise Died
        made(opener, group)

    def form_mortal(member: RingMember, *arguments: Any) -> Any:
        try:
            return form(member, *arguments)
        except Died:
            until(lambda: all(one.ring_service._forming is not None for one in chiefs[0].members[1:]))
            chiefs[0].leave("worker:0", generation=2)

    monkeypatch.setattr(Opener, "made", dies)
    monkeypatch.setattr(RingMember, "form", form_mortal)
    with ring_of(3, "tcp") as (_, ring):
        assert sums(ring[1:]) == [6.0, 6.0]
    held[0].close("the test is over")


def test_of_two_that_are_cut_off_from_each_other_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    open_lane, is_cut = Peers.open_lane, threading.Event()

    def cut(peers: Peers, rank: int, *arguments: Any) -> Any:
        if is_cut.is_set() and {peers.rank, rank} == {1, 2}:
            raise PeerUnavailableError(f"worker:{rank} cannot be reached")
        return open_lane(peers, rank, *arguments)

    monkeypatch.setattr(Peers, "open_lane", cut)
    with ring_of(3, "tcp") as (chief, ring), futures.ThreadPoolExecutor(2) as pool:
        is_cut.set()
        cut_off(ring, 1)
        going_on = pool.submit(sums, ring[:2])
        with pytest.raises(CollectiveError, match="worker:2 and worker:1 do not reach each other: worker:2 leaves"):
            sums(ring[2:])
        chief.leave("worker:2", generation=2)
        assert going_on.result(60) == [3.0] * 2


def test_a_ring_forms_once_it_is_known_where_all_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chief was started again and had not heard from one yet: the others called nobody until the time-out."""
    say, looked = Chief.say, set[str]()

    def homeless(chief: Chief, members: Sequence[Member], generation: int) -> None:
        def go_on() -> None:
            until(lambda: len(looked) == 3)
            say(chief, members, generation)

        say(chief, [dataclasses.replace(members[0], address=""), *members[1:]], generation)
        threading.Thread(target=go_on).start()

    monkeypatch.setattr(Chief, "say", homeless)
    monkeypatch.setattr(SessionOf, "wait_stopped", lambda session, _: looked.add(session.task))
    with ring_of(3, "tcp") as (_, ring):
        assert sums(ring) == [7.0] * 3


def test_ranks_in_other_collectives_do_not_try_again_over_other_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_member, "HEAR_S", 100.0)  # so long a rank waits that thinks of its connection
    with ring_of(3, "tcp") as (_, ring), futures.ThreadPoolExecutor(3) as pool:
        wrong = [pool.submit(one.all_reduce, torch.ones(3 + (one.rank == 1))) for one in ring]
        for each in wrong:
            with pytest.raises(CollectiveError, match="the ranks are not in the same collective"):
                each.result(60)
        assert [one.generation for one in ring] == [0] * 3


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_nobody_meets_again_for_a_rank_that_stands_still(transport: str) -> None:
    with ring_of(3, transport) as (_, ring), futures.ThreadPoolExecutor(2) as pool:
        for one in ring:
            one.group.timeout_s = 0.5
        for each in [pool.submit(one.all_reduce, torch.ones(3)) for one in ring[:2]]:
            with pytest.raises(CollectiveError, match=r"worker:2 is at .* and does not take part"):
                each.result(60)
        assert [one.generation for one in ring] == [0] * 3


@pytest.mark.thorough
def test_two_between_whom_the_network_drops_large_packets_are_named() -> None:
    with ring_of(3, "tcp") as (_, ring), futures.ThreadPoolExecutor(3) as pool:
        drop_large_packets(ring[2].group._left_lane._sock)  # type: ignore[attr-defined]
        for one in ring:
            one.group.timeout_s = 5.0
        calls = [pool.submit(one.all_reduce, torch.ones(4_000_000)) for one in ring]  # no socket takes a third of it
        until(lambda: ring[1].group.waiting_on() == 2)  # whom it sends to, not who has to send to it
        errors = [str(call.exception(60)) for call in calls]
        assert all("worker:1" in error and "worker:2" in error for error in errors), errors
        assert not any("waits for worker:0" in error for error in errors), errors
        assert all("large packets: look at its MTU" in error for error in errors), errors


def drop_large_packets(sock: socket.socket) -> None:
    """As a network does on the way to ``sock``: its filter lets 900 bytes through, headers included."""
    program = [(0x80, 0, 0, 0), (0x25, 0, 1, 900), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)]  # classic BPF
    memory = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    attach_filter = 26  # SO_ATTACH_FILTER
    sock.setsockopt(socket.SOL_SOCKET, attach_filter, struct.pack("HP", len(program), ctypes.addressof(memory)))


def test_connections_that_break_again_and_again_are_an_error() -> None:
    with ring_of(2, "tcp") as (_, ring):

        def break_off() -> None:
            cut_off(ring, 0)
            ring[0].collective("nothing", lambda tag: ring[0].group.barrier(tag))

        with futures.ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(ring[0].atomic, break_off), pool.submit(ring[1].barrier)]
            for each in ends:
                with pytest.raises(CollectiveError, match="that was the 5th time in a row"):
                    each.result(60)
        assert [one.generation for one in ring] == [5, 5]


def test_what_is_said_of_the_group_before_does_not_break_the_one_after() -> None:
    with ring_of(2, "tcp") as (chief, ring):
        cut_off(ring, 0)
        assert sums(ring) == [3.0] * 2
        service = chief.members[1].ring_service
        assert service.diagnosis is not None
        generation, number = service.diagnosis.meeting
        service.abort(Incarnation("worker:0", 1), (generation, number - 2), "of before", False)
        assert sums(ring) == [3.0] * 2 and [one.generation for one in ring] == [1, 1]
        service.abort(Incarnation("worker:0", 1), (generation, number), "of now", False)
        assert sums(ring) == [3.0] * 2 and [one.generation for one in ring] == [2, 2]
