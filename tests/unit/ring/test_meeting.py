"""The rendezvous at rank 0, and who is in a generation."""

from __future__ import annotations

import itertools
import threading

import pytest

from stratagem.cluster.membership import Member, Membership
from stratagem.cluster.task import Incarnation
from stratagem.errors import ConfigurationError, PeerUnavailableError
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.worker.ring import ring_service
from stratagem.worker.ring.lane_plan import RankInfo
from stratagem.worker.ring.members import members_of
from stratagem.worker.ring.ring_service import MeetingRoom
from tests.polling import until


def test_everybody_hears_what_everybody_said() -> None:
    room: MeetingRoom[str] = MeetingRoom()
    heard: dict[int, list[str] | None] = {}

    def come(rank: int) -> None:
        heard[rank] = room.meet(3, 1, 3, rank, f"rank {rank}", 10.0)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {rank: ["rank 0", "rank 1", "rank 2"] for rank in range(3)}


def test_who_is_alone_is_told_to_ask_again_and_may_repeat() -> None:
    room: MeetingRoom[str] = MeetingRoom()
    assert room.meet(1, 1, 2, 0, "first", 0.01) is None
    assert room.meet(1, 1, 2, 0, "again", 0.01) is None
    assert room.meet(1, 1, 2, 1, "b", 0.01) == ["again", "b"]
    assert room.meet(1, 1, 2, 0, "late", 0.01) == ["again", "b"]  # a lost reply: the round is what it was


def test_an_older_generation_is_sent_away_and_leaves_nothing() -> None:
    room: MeetingRoom[str] = MeetingRoom()
    assert room.meet(1, 1, 2, 0, "old", 0.0) is None
    assert room.meet(2, 1, 2, 1, "new", 0.0) is None
    with pytest.raises(PeerUnavailableError, match="generation 1 is over"):
        room.meet(1, 1, 2, 1, "old", 0.0)
    assert room.meet(2, 1, 2, 0, "new too", 0.0) == ["new too", "new"]


def test_who_waits_in_an_older_generation_hears_of_the_newer_one_at_once() -> None:
    room: MeetingRoom[str] = MeetingRoom()
    said: list[list[str] | None] = []
    old = threading.Thread(target=lambda: said.append(room.meet(1, 1, 2, 0, "old", 600.0)))
    old.start()
    until(lambda: bool(room._said))
    room.meet(2, 1, 2, 0, "new", 0.0)
    old.join()
    assert said == [None]


def test_closing_sends_everybody_home() -> None:
    room: MeetingRoom[str] = MeetingRoom()
    room.close()
    with pytest.raises(PeerUnavailableError):
        room.meet(1, 1, 1, 0, "x", 10.0)


def test_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="below 2"):
        MeetingRoom[str]().meet(1, 1, 2, 2, "x", 0.0)


def membership(*tasks: tuple[str, int, bool]) -> Membership:
    return Membership(True, tuple(Member(task, f"h{number}:1", number, live) for task, number, live in tasks))


def test_ranks_follow_the_indices_and_the_newest_incarnation_is_the_generation() -> None:
    now = membership(("worker:10", 5, True), ("ps:0", 9, True), ("worker:2", 7, True), ("worker:0", 1, False))
    members = members_of(now)
    assert [rank.task for rank in members.ranks] == ["worker:0", "worker:2", "worker:10"]
    assert members.generation == 7
    assert members.rank_of("worker:10") == 2
    assert (members.ranks[0].live, members.ranks[1].host) == (False, "h7")
    assert members.lost(now) == [0]
    assert members.lost(membership(("worker:0", 1, True), ("worker:2", 8, True), ("worker:10", 5, True))) == [1]


def test_who_calls_while_the_members_change_has_one_place_and_not_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_service, "PATIENCE_S", 0.01)
    workers = [Member(f"worker:{index}", "127.0.0.1:1", index + 1, True) for index in range(3)]
    before = Membership(True, tuple(workers), min_workers=1, generation=12)
    after = Membership(True, (workers[0], workers[2]), min_workers=1, generation=13)
    heard = itertools.chain([before], itertools.repeat(after))
    service = ring_service.RingService("127.0.0.1", lambda: next(heard), BytesMeter())
    for _ in range(2):
        with pytest.raises(PeerUnavailableError, match=r"ask again|worker:0 to come"):
            service.meet(Incarnation("worker:2", 3), 13, 1, RankInfo("worker:2"))
    said = service.meet(Incarnation("worker:0", 1), 13, 1, RankInfo("worker:0"))
    assert [one.task for one in said] == ["worker:0", "worker:2"]
    service.close()
