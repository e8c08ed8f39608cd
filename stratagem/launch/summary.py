"""The result of a run as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratagem.chief.journal.journal import NAME, replay
from stratagem.cluster.task import TaskId
from stratagem.errors import ConfigurationError
from stratagem.launch.actions import Failure, describe_exit
from stratagem.launch.output import essence
from stratagem.launch.plan import LocalJob
from stratagem.launch.supervisor import Supervisor
from stratagem.launch.why import measured
from stratagem.rpc.status_view import StatusView


def read_report(path: Path) -> dict[str, Any]:
    """What a worker reported at the end of its script; empty if it did not."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def last_status(status: StatusView | None, journal: Path) -> StatusView:
    """The chief's last answer, and what it has noted since: its last second may count what a ps lost.

    Args:
        status: the answer; None: it never gave one.
        journal: folder of its journal, which it has left.
    """
    status = status or StatusView()
    with contextlib.suppress(ConfigurationError):
        history = replay(journal / NAME)
        return dataclasses.replace(
            status,
            updates_lost=max(status.updates_lost, history.updates_lost),
            updates_undone=max(status.updates_undone, history.updates_undone),
            restored=history.restored or status.restored,
        )
    return status


def build_summary(
    job: LocalJob,
    supervisor: Supervisor,
    status: StatusView,
    reports: Mapping[TaskId, Mapping[str, Any]],
    exit_code: int,
    duration_s: float,
    tail: list[str],
    checkpoint: str = "",
) -> dict[str, Any]:
    """The summary that ``--summary`` writes.

    Args:
        supervisor: after the end.
        status: see :func:`last_status`.
        reports: of the workers that finished, in the order of their indices.
        exit_code: of the launcher.
        duration_s: from the first start to the last exit, in seconds.
        tail: last lines of stderr of the task that failed first.
        checkpoint: path of the newest checkpoint that stays.
    """
    in_turn = job.staleness == 0 and job.chosen_strategy == "ps"
    steps = [int(report.get("steps", 0)) for report in reports.values()]
    reported_steps = max(steps, default=0) if in_turn else sum(steps)
    applied = max((task.step for task in status.tasks if task.task.startswith("ps:")), default=0)
    ended = [report for report in reports.values() if report.get("metrics")]
    from_status = next((worker.metrics for worker in status.workers if worker.metrics), {})
    losses = [report["loss"] for report in reports.values() if report.get("loss") is not None]
    return {
        "strategy": job.chosen_strategy,
        "num_workers": job.num_workers,
        "num_ps": job.num_ps,
        "staleness": job.staleness if math.isfinite(job.staleness) else "inf",
        "exit_code": exit_code,
        "duration_s": round(duration_s, 3),
        "steps": max(reported_steps, applied),
        "examples": max(sum(int(report.get("examples", 0)) for report in reports.values()), status.examples),
        "loss": losses[0] if losses else status.loss,
        "metrics": dict(ended[0]["metrics"]) if ended else dict(from_status),
        "updates_lost": status.updates_lost,
        "updates_undone": status.updates_undone,
        "restored": status.restored,
        "checkpoint": checkpoint,
        "restarts": supervisor.num_restarts,
        "workers_lost": sorted(map(str, supervisor.lost)),
        "tasks": {
            str(task): {"exit_codes": codes, "restarts": supervisor.restarts.get(task, 0)}
            for task, codes in supervisor.exits.items()
        },
        "measures": measured(status, {str(task): report for task, report in reports.items()}, duration_s),
        "flight": {str(task): report["flight"] for task, report in reports.items() if report.get("flight")},
        "first_failure": _failure(supervisor.failure, tail),
    }


def _failure(failure: Failure | None, tail: list[str]) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {
        "task": str(failure.task),
        "code": failure.code,
        "exit": describe_exit(failure.code),
        "reason": failure.reason,
        "last_lines": tail,
    }


def failure_words(failure: Failure, tail: list[str]) -> str:
    """The first failure in a paragraph: task, code, why it ended the job, last lines of its stderr."""
    # A worker repeats the last line of its script's traceback after its own name.
    repeated = {f"{failure.task}: {line}" for line in tail}
    lines = [line for line in essence(tail) if line not in repeated]
    said = "" if not lines else "; its last lines:\n  " + "\n  ".join(lines)
    return f"{failure.task} failed first ({describe_exit(failure.code)}; {failure.reason}){said}"


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Writes the summary in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(summary, indent=2) + "\n")
    os.replace(partial, path)
