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
from stratagem.worker.ring.members import Members, RankPosition

RANKS = tuple(Member(f"worker:{rank}", "", rank + 1, live=True) for rank in range(3))


def diagnosis_of_rank_0(asked: threading.Event) -> FailureDiagnosis:
    def position(rank: int, timeout_s: float) -> RankPosition:
        if rank == 1:
            asked.set()
        return RankPosition("step 7", waiting_on=rank - 1)

    peers: Any = SimpleNamespace(
        meeting=(1, 1), members=Members(RANKS, 1), rank=0, position=position, abort=lambda *_: None
    )
    session: Any = SimpleNamespace(task="worker:0", membership=Membership(members=RANKS))
    return FailureDiagnosis(session, peers, lambda reason: None)


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
    assert "worker:0 waits for worker:2, which waits for worker:1, which waits for worker:0: late" in str(error)
