"""What `stratagem scale` says is lacking."""

from __future__ import annotations

from stratagem.cli.scale import lacking
from stratagem.rpc.status_view import StatusView, TaskState


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
