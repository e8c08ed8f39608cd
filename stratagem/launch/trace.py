"""A timeline of a running job: what every worker and ps did for some steps, on one clock, for Perfetto."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import grpc

from stratagem.errors import PeerUnavailableError, StratagemError
from stratagem.launch.status import fetch_status
from stratagem.measuring.measures import MEASURES
from stratagem.rpc.channels import connect
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.generated import observer_pb2, observer_pb2_grpc
from stratagem.rpc.security import OPEN, Security

NUM_PINGS = 8
POLL_S = 0.1
_CLOCK = observer_pb2.StartTraceRequest(only_clock=True)
_SAME = re.compile(r"update \d+ of unit .*|step \d+, collective .*")
"""What a commit or a collective is called on every task that has part in it."""


@dataclasses.dataclass(frozen=True)
class TaskTrace:
    task: str
    spans: Sequence[Any]
    """As the Observer gives them, on the task's clock."""
    offset_ns: int
    """The task's clock minus ours."""
    error_ns: int
    """By how much that may be wrong: half of the fastest round trip."""
    spent: Mapping[str, float]
    """Seconds that its counters grew by meanwhile."""
    num_dropped: int = 0


def record(
    address: str, num_steps: int, timeout_s: float, security: Security = OPEN, with_torch: bool = False
) -> list[TaskTrace]:
    """Traces every live worker and ps of the job until each worker has done ``num_steps`` steps, or for ``timeout_s``
    seconds: then what has come is enough. ``with_torch``: the workers' operators of torch too; the profiler takes a
    second or more to start. PeerUnavailableError: the chief or a task does not answer."""
    with contextlib.ExitStack() as cleanup:
        stubs = {}
        for task in fetch_status(address, 5.0, security).tasks:
            if task.task.startswith(("worker:", "ps:")) and task.state == "live" and task.address:
                channel = cleanup.enter_context(connect(task.address, task.task, security))
                stubs[task.task] = observer_pb2_grpc.ObserverStub(channel)
        if not stubs:
            raise PeerUnavailableError(f"no worker or ps of the job at {address} is live: there is nothing to trace")
        clocks = {name: _clock(stub, name) for name, stub in stubs.items()}
        until = {}
        try:
            for name, stub in stubs.items():
                with_operators = with_torch and name.startswith("worker:")  # the profiler begins with the next step
                reply = _call(stub.StartTrace, observer_pb2.StartTraceRequest(torch=with_operators), name)
                if name.startswith("worker:"):
                    until[name] = reply.num_steps + num_steps + with_operators
            until_steps(stubs, until, timeout_s)
        finally:
            replies = _stop(stubs)
    return [
        TaskTrace(name, reply.spans, *clocks[name], dict(reply.spent), reply.num_dropped)
        for name, reply in replies.items()
    ]


def events(traces: Sequence[TaskTrace]) -> dict[str, Any]:
    """The traces in the Trace Event Format, which Perfetto and chrome://tracing open; microseconds from the first span.
    Arrows go from a worker's push to the commits of it, and from the rank that came last to a collective to the
    others."""
    starts = [span.start_ns - trace.offset_ns for trace in traces for span in trace.spans]
    zero = min(starts, default=0)
    found: list[dict[str, Any]] = []
    parts: dict[str, list[tuple[float, float, int, int, str]]] = collections.defaultdict(list)
    for process, trace in enumerate(traces, 1):
        found.append(_name("process_name", process, 0, trace.task))
        tracks: dict[str, int] = {}
        for span in trace.spans:
            is_measure = span.name in MEASURES and not span.torch
            track = span.thread if is_measure or span.torch else f"{span.thread}: collectives and commits"
            if track not in tracks:
                tracks[track] = len(tracks) + 1
                found.append(_name("thread_name", process, tracks[track], track))
            at, took = (span.start_ns - trace.offset_ns - zero) / 1e3, span.duration_ns / 1e3
            kind, place = "torch" if span.torch else "stratagem", {"pid": process, "tid": tracks[track]}
            found.append({"ph": "X", "cat": kind, "name": span.name, "ts": at, "dur": took, **place})
            if not is_measure and not span.torch and (same := _SAME.search(span.name)):
                parts[same[0]].append((at, took, process, tracks[track], trace.task))
    numbers = itertools.count(1)
    for alike in parts.values():
        found += _arrows(numbers, alike)
    about = {
        trace.task: {"clock_error_us": trace.error_ns / 1e3, "spent_s": trace.spent, "num_dropped": trace.num_dropped}
        for trace in traces
    }
    return {"traceEvents": found, "displayTimeUnit": "ms", "metadata": {"stratagem": about}}


def _arrows(numbers: Iterator[int], same: Sequence[tuple[float, float, int, int, str]]) -> Iterable[dict[str, Any]]:
    """Perfetto takes no arrow whose id is not a number."""
    pushes = [part for part in same if part[4].startswith("worker:")]
    commits = [part for part in same if part[4].startswith("ps:")]
    first = max(pushes or same)
    for at, took, process, track, _ in commits or pushes:
        if (process, track) != first[2:4]:
            known = {"cat": "stratagem", "name": "sends", "id": next(numbers)}
            yield {"ph": "s", **known, "ts": first[0], "pid": first[2], "tid": first[3]}
            reached = at if commits else at + took
            yield {"ph": "f", "bp": "e", **known, "ts": reached, "pid": process, "tid": track}


def until_steps(stubs: Mapping[str, Any], until: Mapping[str, int], timeout_s: float) -> None:
    """Waits at most ``timeout_s`` seconds until each worker has completed so many steps, by its own count."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(
        _call(stubs[name].StartTrace, _CLOCK, name).num_steps < steps for name, steps in until.items()
    ):
        time.sleep(POLL_S)


def _stop(stubs: Mapping[str, Any]) -> dict[str, Any]:
    """Ends the trace on every task, also where one of them is gone: the others would go on for good."""
    replies, failures = {}, []
    for name, stub in stubs.items():
        try:
            replies[name] = _call(stub.StopTrace, observer_pb2.StopTraceRequest(), name)
        except StratagemError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return replies


def _clock(stub: Any, task: str) -> tuple[int, int]:
    """By how much a task's clock is before ours, and the error of that."""
    found = []
    for _ in range(NUM_PINGS):
        asked = time.perf_counter_ns()
        reply = _call(stub.StartTrace, _CLOCK, task)
        heard = time.perf_counter_ns()
        found.append(((heard - asked) // 2, reply.clock_ns - (asked + heard) // 2))
    error_ns, offset_ns = min(found)
    return offset_ns, error_ns


def _call(method: Any, request: Any, task: str) -> Any:
    try:
        return method(request, timeout=10.0)
    except grpc.RpcError as error:
        raise error_from_rpc(error, task) from None


def _name(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}
