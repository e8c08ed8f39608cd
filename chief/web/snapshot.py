"""The job as the page shows it: small, with rates instead of sums. Pure, no I/O."""

from __future__ import annotations

import dataclasses
from typing import Any

from stratagem.chief.monitoring.why.finding import JobVerdict
from stratagem.chief.monitoring.why.reading import Reading, TaskReading
from stratagem.measuring import measures
from stratagem.measuring.measures import labels
from stratagem.rpc.status_view import StatusView, TaskState

_NOT_SHOWN = ("measures", "earlier", "notes", "window_s", "measures_age_s")
_SHARES = (measures.RECEIVE, measures.QUEUE, measures.HELD, measures.MERGE, measures.APPLY, measures.REPLY)
MAX_WAITS = 60
WORTH = 0.005
"""What takes less of the time is no wait."""
MAX_LANES = 200
MAX_HOT = 5


def snapshot(status: StatusView, reading: Reading, verdict: JobVerdict) -> dict[str, Any]:
    """A status with measures as plain values; its fields keep their names, those of `stratagem status --json`."""
    job = {field.name: getattr(status, field.name) for field in dataclasses.fields(StatusView) if field.name != "tasks"}
    return {
        "job": {**job, "exposed": status.exposed, "loss": status.loss},
        "verdict": verdict.as_json(),
        "tasks": [_task(task) for task in status.tasks],
        "workers": [_steps(task) for task in reading.working],
        "waits": _waits(reading),
        "ps": [_server(task, reading) for task in reading.of("ps") if task.window_s > 0],
        "lanes": _lanes(reading),
        "checkpoints": _checkpoints(reading),
    }


def _task(task: TaskState) -> dict[str, Any]:
    shown = [field.name for field in dataclasses.fields(TaskState) if field.name not in _NOT_SHOWN]
    return {name: getattr(task, name) for name in shown} | {"state_words": task.state_words}


def _steps(worker: TaskReading) -> dict[str, Any]:
    """Where a step's time goes: seconds a step, by phase."""
    phases = {phase: worker.get(phase) / worker.steps for phase in measures.PHASES if phase != measures.OUTSIDE}
    return {
        "task": worker.task,
        "steps": worker.steps,
        "phases": {phase: round(value, 7) for phase, value in phases.items() if value > 0},
    }


def _waits(reading: Reading) -> list[dict[str, Any]]:
    """Who waits on whom: the part of its time in the last seconds, and what it waits for now."""
    found: list[dict[str, Any]] = []
    known = {task.task for task in reading.tasks}
    slowest = max(reading.working, key=lambda worker: worker.own_s, default=None)
    for task in reading.of("worker"):
        gate = task.share(measures.GATE_WAIT)
        if slowest is not None and slowest is not task and gate >= WORTH:  # at the bound it is for the slowest
            found.append({"from": task.task, "to": slowest.task, "share": round(gate, 4)})
        total = task.total_s or task.window_s
        for peer, waited in labels(task.values, measures.PEER_WAIT).items():
            if total > 0 and waited / total >= WORTH:
                found.append({"from": task.task, "to": peer, "share": round(min(1.0, waited / total), 4)})
        if task.waiting_on and task.waiting_s >= 1:
            named = [word.strip(",") for word in task.waiting_on.split() if word.strip(",") in known]
            found += [
                {"from": task.task, "to": peer, "share": 1.0, "now_s": round(task.waiting_s, 1)} for peer in named
            ]
    return sorted(found, key=lambda wait: -wait["share"])[:MAX_WAITS]


def _server(ps: TaskReading, reading: Reading) -> dict[str, Any]:
    def per_s(name: str) -> float:
        return round(ps.get(name) / ps.window_s, 4)

    rows, groups = labels(ps.values, measures.ROW_SHARE), labels(ps.values, measures.GROUP_APPLY)
    return {
        "task": ps.task,
        "updates_per_s": per_s(measures.COMMITS),
        "received_bytes_per_s": round(reading.received_bytes(ps) / ps.window_s),
        "shares": {name: per_s(name) for name in _SHARES},
        "staleness": _by_range(labels(ps.values, measures.STALENESS)),
        "rows": sorted(((share, row) for row, share in rows.items()), reverse=True)[:MAX_HOT],
        "hot": sorted(((share / ps.window_s, group) for group, share in groups.items()), reverse=True)[:MAX_HOT],
    }


def _by_range(counts: dict[str, float]) -> dict[str, float]:
    """Each commit is counted once, under the smallest bound that holds it: beside the others that reads as a range."""
    found, first = {}, 0
    for bound in measures.STALENESS_BOUNDS:
        found[str(bound) if bound == first else f"{first}–{bound}"] = counts.get(str(bound), 0.0)
        first = bound + 1
    return found | {f"{first} or more": counts.get("more", 0.0)}


def _lanes(reading: Reading) -> list[dict[str, Any]]:
    order = {task.task: number for number, task in enumerate(reading.tasks)}
    found: list[dict[str, Any]] = []
    for task in reading.tasks:
        sent, received, trips = map(task.lanes, (measures.SENT, measures.RECEIVED, measures.ROUND_TRIP))
        for lane in sorted(sent.keys() | received.keys()) if task.window_s > 0 else ():
            peer, kind = lane
            found.append(
                {
                    "task": task.task,
                    "peer": peer,
                    "kind": kind,
                    "sent_per_s": round(sent.get(lane, 0.0) / task.window_s),
                    "received_per_s": round(received.get(lane, 0.0) / task.window_s),
                    "round_trip_s": trips.get(lane),
                    "why": task.notes.get(f"lane|{peer}", ""),
                }
            )
    busiest = sorted(found, key=lambda lane: -lane["sent_per_s"] - lane["received_per_s"])[:MAX_LANES]
    # Rows stay where they are.
    return sorted(busiest, key=lambda lane: (order[lane["task"]], lane["peer"], lane["kind"]))


def _checkpoints(reading: Reading) -> dict[str, float]:
    chief = next(iter(reading.of("chief")), TaskReading("chief:0"))
    return {
        "taken": chief.get(measures.CHECKPOINTS),
        "held_share": round(chief.get(measures.CHECKPOINT) / chief.window_s, 4) if chief.window_s > 0 else 0.0,
    }
