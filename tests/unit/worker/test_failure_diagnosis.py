"""Who is to blame where every rank that is asked answers: three ranks, each of which waits for the next."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.cluster.membership import Member, Membership
from stratagem.errors import CollectiveError
from stratagem.worker.ring import failure_diagnosis
from stratagem.worker.ring.communicator import Position
from stratagem.worker.ring.failure_diagnosis import FailureDiagnosis
from stratagem.worker.ring.group import OutOfStepError
from stratagem.worker.ring.members import Members, RankPosition

RANKS = tuple(Member(f"worker:{rank}", "", rank + 1, live=True) for rank in range(3))


def diagnosis_of_rank_0(asked: threading.Event) -> FailureDiagnosis:
    def position(rank: int, timeout_s: float, ordinal: int) -> RankPosition:
        if rank == 1:
            asked.set()
        return RankPosition("step 7", waiting_on=rank - 1)

    peers: Any = SimpleNamespace(
        meeting=(1, 1), members=Members(RANKS, 1), rank=0, position=position, abort=lambda *_: None
    )
    session: Any = SimpleNamespace(
        task="worker:0", membership=Membership(members=RANKS), wait_membership=lambda *_: False
    )
    return FailureDiagnosis(session, peers, lambda reason: None, lambda ordinal: "")


def test_a_circle_of_waits_is_not_blamed_on_a_third_when_one_of_the_two_that_are_cut_off_says_so() -> None:
    asked = threading.Event()
    diagnosis = diagnosis_of_rank_0(asked)

    def worker_2_finds_out() -> None:
        assert asked.wait(10)
        diagnosis.told("worker:1 has ended or does not answer worker:2")

    other = threading.Thread(target=worker_2_finds_out)
    other.start()
    error = diagnosis.explain(CollectiveError("late", 2), Position())
    other.join()
    assert "worker:1 has ended or does not answer worker:2" in str(error)


def test_a_circle_of_waits_that_nobody_explains_names_every_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_diagnosis, "BLAME_S", 0.2)
    error = diagnosis_of_rank_0(threading.Event()).explain(CollectiveError("late", 2), Position())
    links = "worker:2 (at step 7), which waits for worker:1 (at step 7), which waits for worker:0: late"
    assert f"worker:0 waits for {links}" in str(error)


def test_a_rank_that_the_others_have_given_up_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_diagnosis, "CHIEF_S", 0.0)
    diagnosis = diagnosis_of_rank_0(threading.Event())
    error = diagnosis.explain(OutOfStepError("rank 0 was stalled", 0), Position())
    assert str(error) == f"aborted at {Position()}: rank 0 was stalled"


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(
    ("ordinal", "own", "is_told"),
    [(30, "barrier", True), (30, "all_reduce sum of 8 float32", False), (31, "barrier", False)],
)
def test_a_loop_that_one_rank_left_early_is_asked_for(ordinal: int, own: str, is_told: bool, waits: bool) -> None:
    """What it calls next is of another kind; the error gave fingerprints alone."""
    diagnosis = diagnosis_of_rank_0(threading.Event())
    at = str(Position(30, 11, "all_reduce sum of 32 float32"))
    reply = RankPosition(at, 30, waiting_on=0 if waits else None)
    diagnosis._peers.position = lambda *_: reply  # type: ignore[method-assign]
    error = diagnosis.explain(OutOfStepError("fingerprints", 2), Position(ordinal, 11, own))
    what = "waits for worker:0" if waits else "does not take part"
    assert f"worker:2 is at {at} and {what}: fingerprints" in str(error)
    assert ("leave its loop early, with break or return" in str(error)) == is_told


@pytest.mark.parametrize("waiting_on", [None, 0])
def test_a_rank_that_closed_its_lane_and_answers_is_given_time_to_say_why(
    waiting_on: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_diagnosis, "TURN_S", 60.0)  # so long a machine does not stand still
    diagnosis = diagnosis_of_rank_0(threading.Event())
    peers: Any = diagnosis._peers
    blamed = threading.Event()

    def worker_2_finds_out() -> None:
        if not blamed.wait(0.2):
            diagnosis.told("as collective 3, worker:1 called barrier", True)

    def position(*_: object) -> RankPosition:
        threading.Thread(target=worker_2_finds_out).start()
        return RankPosition("step 7", waiting_on=waiting_on)

    peers.position, peers.abort = position, lambda *_: blamed.set()
    error = diagnosis.explain(CollectiveError("worker:2 closed the lane", 2), Position())
    assert "as collective 3, worker:1 called barrier" in str(error)


def test_who_got_a_message_of_another_collective_names_what_both_called_as_that() -> None:
    """Though both are elsewhere by then."""
    diagnosis = diagnosis_of_rank_0(threading.Event())
    peers: Any = diagnosis._peers
    diagnosis._called = lambda ordinal: "gather to rank 2" if ordinal == 4 else ""
    theirs = {0: "", 4: "scatter from rank 2"}
    peers.position = lambda rank, timeout_s, ordinal: RankPosition("step 7", 6, "", 0, theirs[ordinal])
    error = diagnosis.explain(OutOfStepError("not the same collective", 2, 4), Position(5, 7, "barrier"))
    assert "as collective 4, worker:2 called scatter from rank 2, worker:0 gather to rank 2" in str(error)
