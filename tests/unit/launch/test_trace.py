"""Until when a job is traced."""

from __future__ import annotations

import itertools
import types

import pytest

from stratagem.launch import trace
from stratagem.rpc.generated import observer_pb2


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
