"""What the page is told, from a status."""

from __future__ import annotations

from stratagem.chief.monitoring.why.reading import reading_of
from stratagem.chief.monitoring.why.verdict import judge
from stratagem.chief.web.snapshot import snapshot
from stratagem.measuring.measures import FORWARD, RECEIVED, SENT, STALENESS, STEPS, labelled, staleness_bucket
from stratagem.rpc.status_view import StatusView, TaskState


def test_staleness_is_told_by_ranges_as_each_commit_is_counted_once() -> None:
    """It read "≤ 0: 56 %, ≤ 1: 31 %" where 87 % of the commits lacked one update or less."""
    counts = {labelled(STALENESS, staleness_bucket(behind)): float(behind + 1) for behind in (0, 1, 3, 5, 12, 31, 99)}
    status = StatusView((TaskState("ps:0", "live", measures=counts, window_s=15.0),), ready=True)
    reading = reading_of(status)
    (ps,) = snapshot(status, reading, judge(reading))["ps"]
    assert ps["staleness"] == {
        "0": 1.0,
        "1": 2.0,
        "2–3": 4.0,
        "4–7": 6.0,
        "8–15": 13.0,
        "16–31": 32.0,
        "32 or more": 100.0,
    }


def test_a_ps_over_grpc_receives_what_its_workers_sent() -> None:
    """It counts nothing that comes over gRPC: the page showed that it received nothing."""
    sent = {labelled(SENT, "ps:0/grpc"): 3000.0, labelled(SENT, "ps:1/shm"): 90.0, FORWARD: 1.0, STEPS: 5.0}
    tasks = (
        TaskState("worker:0", "live", measures=sent, window_s=10.0),
        TaskState("ps:0", "live", window_s=10.0),
        TaskState("ps:1", "live", measures={labelled(RECEIVED, "worker:0/shm"): 100.0}, window_s=10.0),
    )
    status = StatusView(tasks, ready=True)
    reading = reading_of(status)
    assert [ps["received_bytes_per_s"] for ps in snapshot(status, reading, judge(reading))["ps"]] == [300, 10]
