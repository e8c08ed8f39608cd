"""Until when a job is traced."""

from __future__ import annotations

import contextlib
import itertools
import types
from typing import Any

import pytest

from stratagem.errors import PeerUnavailableError
from stratagem.launch import trace
from stratagem.rpc.generated import observer_pb2, observer_pb2_grpc
from stratagem.rpc.status_view import StatusView, TaskState


def test_steps_are_counted_by_the_workers_from_where_they_were_when_the_trace_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace, "POLL_S", 0.0)
    steps = {"worker:0": itertools.count(3), "worker:1": itertools.count(0)}
    asked: list[tuple[str, bool]] = []

    def stub(name: str) -> types.SimpleNamespace:
        def start(request: observer_pb2.StartTraceRequest, timeout: float) -> observer_pb2.StartTraceReply:
            asked.append((name, request.only_clock))
            return observer_pb2.StartTraceReply(num_steps=next(steps[name]))

        return types.SimpleNamespace(StartTrace=start)

    stubs = {name: stub(name) for name in steps}
    trace.until_steps(stubs, {"worker:0": 5, "worker:1": 1}, 60.0)
    expected = [("worker:0", True)] * 3 + [("worker:1", True), ("worker:0", True), ("worker:1", True)]
    assert asked == expected
    trace.until_steps(stubs, {"worker:0": 10**6}, 0.0)  # not in time
    assert asked == expected


@pytest.mark.parametrize("dies_at", ["start", "stop"])
def test_a_task_that_is_gone_leaves_no_trace_going_on_at_the_others(
    monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    traced: set[str] = set()

    def stub(name: str) -> types.SimpleNamespace:
        def start(request: observer_pb2.StartTraceRequest, timeout: float) -> observer_pb2.StartTraceReply:
            if not request.only_clock:
                traced.add(name)
                if (name, dies_at) == ("worker:1", "start"):
                    raise PeerUnavailableError("worker:1 is gone")
            return observer_pb2.StartTraceReply()

        def stop(request: observer_pb2.StopTraceRequest, timeout: float) -> observer_pb2.StopTraceReply:
            if name == "worker:1":
                raise PeerUnavailableError("worker:1 is gone")
            traced.discard(name)
            return observer_pb2.StopTraceReply()

        return types.SimpleNamespace(StartTrace=start, StopTrace=stop)

    def connect(address: str, task: str, security: Any) -> Any:
        return contextlib.nullcontext(task)

    tasks = tuple(TaskState(name, "live", "host:1") for name in ("worker:0", "worker:1", "ps:0"))
    monkeypatch.setattr(trace, "fetch_status", lambda *_: StatusView(tasks))
    monkeypatch.setattr(trace, "connect", connect)
    monkeypatch.setattr(observer_pb2_grpc, "ObserverStub", stub)
    with pytest.raises(PeerUnavailableError, match="worker:1 is gone"):
        trace.record("host:1", 0, 0.0)
    assert traced == {"worker:1"}
