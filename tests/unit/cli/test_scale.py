"""What `stratagem scale` says is lacking."""

from __future__ import annotations

import pytest

from stratagem.cli import scale
from stratagem.cli.scale import lacking
from stratagem.errors import PeerUnavailableError
from stratagem.rpc.status_view import StatusView, TaskState
from tests.unit.cli.test_commands import invoke


def test_who_ended_when_fewer_were_wanted_has_to_be_started_again() -> None:
    """A Job of Kubernetes whose pod has ended well starts none again: it was waited for without a word of that."""
    live = (TaskState("worker:0", "live", incarnation=1), TaskState("ps:0", "live", incarnation=2))
    gone = (TaskState("worker:1", "waiting", "h:3", 3), TaskState("ps:1", "done", incarnation=4))
    status = StatusView((*live, *gone), num_ps=1, scaling="waiting for ps:1 to join")
    words = "start it again (Kubernetes: delete its Job, apply it)"
    late = "waiting for worker:1 to join; waiting for ps:1 to join"
    assert lacking(status, 2, 2) == f"{late}; ps:1, worker:1 ended while not wanted: {words}"
    assert lacking(status, 0, 1) == ""
    never = StatusView((*live, TaskState("worker:1", "waiting")), num_ps=1)
    assert lacking(never, 2, 0) == "waiting for worker:1 to join"
    awaited = StatusView((*live, TaskState("worker:1", "waiting", incarnation=3)), num_ps=1)  # by a new chief
    assert lacking(awaited, 2, 0) == "waiting for worker:1 to join"


def test_a_chief_that_is_started_again_is_asked_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    num_away = 3

    def ask(address: str, num_workers: int, num_ps: int, *_: object) -> None:
        asked.append((num_workers, num_ps))
        if len(asked) <= num_away:
            raise PeerUnavailableError("connection refused")

    monkeypatch.setattr(scale, "ask_to_scale", ask)
    monkeypatch.setattr(scale, "POLL_S", 0.0)
    live = tuple(TaskState(f"worker:{index}", "live", incarnation=index) for index in range(2))
    monkeypatch.setattr(scale, "fetch_status", lambda *_: StatusView(live, num_ps=1))
    code, out, err = invoke("scale", "--chief", "h:1", "--workers", "2")
    assert code == 0 and "2 workers, 1 ps" in out, err
    assert asked == [(2, 0)] * 4, "once it has answered it is not asked again"
    asked.clear()
    code, _, err = invoke("scale", "--chief", "h:1", "--workers", "2", "--wait-s", "0")
    assert code != 0 and "connection refused" in err and len(asked) == 1
    asked.clear()
    num_away = 10**9
    monkeypatch.setattr(scale, "AWAY_S", 0.0)
    code, _, err = invoke("scale", "--chief", "h:1", "--workers", "2")
    assert code != 0 and "connection refused" in err and len(asked) == 1
