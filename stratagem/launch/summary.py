"""The result of a run as JSON, and what it says about the speed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratagem.checkpoint.durable import replace_text
from stratagem.chief.journal.journal import NAME, replay
from stratagem.chief.monitoring.why.reading import Reading, TaskReading
from stratagem.cluster.task import TaskId
from stratagem.errors import ConfigurationError
from stratagem.launch.actions import Failure, describe_exit
from stratagem.launch.output import essence
from stratagem.launch.plan import LocalJob
from stratagem.launch.supervisor import Supervisor
from stratagem.rpc.plain_json import to_json
from stratagem.rpc.status_view import StatusView


def read_report(path: Path) -> dict[str, Any]:
    """What a worker reported at the end of its script; empty if it did not."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def last_status(status: StatusView | None, journal: Path) -> tuple[StatusView, int, int]:
    """The chief's last answer (None: it never gave one), and what it has noted in its ``journal``, a folder, since: its
    last second may count what a ps lost, and has examples that no worker which was started again reports. And how many
    units it has accepted: the steps of workers that were started again too, whatever these made of each. And how many
    updates were of a part of a batch."""
    status = status or StatusView()
    with contextlib.suppress(ConfigurationError):
        history = replay(journal / NAME)
        status = dataclasses.replace(
            status,
            examples=max(status.examples, history.examples),
            checkpoint=history.checkpoint or status.checkpoint,
            updates_lost=max(status.updates_lost, history.updates_lost),
            updates_undone=max(status.updates_undone, history.updates_undone),
            restored=history.restored or status.restored,
        )
        return status, history.num_units, history.updates_in_part
    return status, 0, 0


def build_summary(
    job: LocalJob,
    supervisor: Supervisor,
    status: StatusView,
    reports: Mapping[TaskId, Mapping[str, Any]],
    exit_code: int,
    duration_s: float,
    tail: list[str],
    checkpoint: str = "",
    lived_s: Mapping[str, float] | None = None,
    num_units: int = 0,
    updates_in_part: int = 0,
) -> dict[str, Any]:
    """The summary that ``--summary`` writes.

    Args:
        status, num_units, updates_in_part: see :func:`last_status`.
        reports: of the workers that finished, in the order of their indices.
        duration_s: from the first start to the last exit, in seconds.
        tail: last lines of stderr of the task that failed first.
        checkpoint: path of the newest checkpoint that stays.
        lived_s: how long the last process of each task ran.
    """
    in_turn = job.chosen_strategy == "ring" or (job.staleness == 0 and job.chosen_strategy == "ps")
    steps = [int(report.get("steps", 0)) for report in reports.values()]
    reported_steps = max(steps, default=0) if in_turn else max(sum(steps), num_units)
    applied = max((task.step for task in status.tasks if task.task.startswith("ps:")), default=0)
    ended = [report for report in reports.values() if report.get("metrics")]
    from_status = next((worker.metrics for worker in status.workers if worker.metrics), {})
    failure = supervisor.failure
    losses = [report["loss"] for report in reports.values() if report.get("loss") is not None]
    return {
        "strategy": job.chosen_strategy,
        "num_workers": job.num_workers,
        "num_ps": job.num_ps,
        "staleness": job.staleness if math.isfinite(job.staleness) else "inf",
        "exit_code": exit_code,
        "duration_s": round(duration_s, 3),
        "life": supervisor.life,
        "steps": max(reported_steps, applied, status.checkpoint_step or 0),
        "examples": status.examples or sum(int(report.get("examples", 0)) for report in reports.values()),
        "loss": losses[0] if losses else status.loss,
        "metrics": dict(ended[0]["metrics"]) if ended else dict(from_status),
        "updates_lost": status.updates_lost,
        "updates_undone": status.updates_undone,
        "updates_in_part": updates_in_part,
        "restored": status.restored,
        "checkpoint": checkpoint,
        "restarts": supervisor.num_restarts,
        "workers_lost": sorted(map(str, supervisor.lost)),
        "tasks": {
            str(task): {"exit_codes": codes, "restarts": supervisor.restarts.get(task, 0)}
            for task, codes in supervisor.exits.items()
        },
        "measures": _measured(status, {str(task): report for task, report in reports.items()}, lived_s or {}),
        "flight": {str(task): report["flight"] for task, report in reports.items() if report.get("flight")},
        "first_failure": failure
        and {
            "task": str(failure.task),
            "code": failure.code,
            "exit": describe_exit(failure.code),
            "reason": failure.reason,
            "last_lines": tail,
        },
    }


def _measured(
    status: StatusView, reports: Mapping[str, Mapping[str, Any]], lived_s: Mapping[str, float]
) -> dict[str, Any]:
    """What a summary keeps of the measures: by task, those of its whole last life."""
    told = {task.task: task for task in status.tasks}
    found: dict[str, Any] = {}
    for name in {**told, **reports}:
        measures, notes = (told[name].measures, told[name].notes) if name in told else ({}, {})
        if values := {**measures, **reports.get(name, {}).get("measures", {})}:
            found[name] = {"values": values, "notes": notes, "window_s": round(lived_s.get(name, 0.0), 3)}
    return found


def failure_words(failure: Failure, tail: list[str]) -> str:
    """The first failure in a paragraph: task, code, why it ended the job, last lines of its stderr."""
    # A worker repeats the last line of its script's traceback after its own name.
    repeated = {f"{failure.task}: {line}" for line in tail}
    lines = [line for line in essence(tail) if line not in repeated]
    said = "" if not lines else "; its last lines:\n  " + "\n  ".join(lines)
    return f"{failure.task} failed first ({describe_exit(failure.code)}; {failure.reason}){said}"


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Writes the summary in one piece; what is there and no file (a pipe, /dev/stdout) stays, and is written to.
    OSError: it cannot be written; nothing is left of it."""
    if path.exists() and not path.is_file():
        path.write_text(to_json(summary, indent=2) + "\n")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, to_json(summary, indent=2) + "\n")


def reading_of_summary(path: Path) -> Reading:
    """What a run has left. ConfigurationError: it cannot be read, or is no summary."""
    try:
        tasks = json.loads(path.read_text())["measures"]
        return Reading(
            tuple(
                TaskReading(name, one["values"], one["window_s"], "done", notes=one["notes"])
                for name, one in sorted(tasks.items())
            ),
            is_over=True,
        )
    except OSError as error:
        raise ConfigurationError(f"cannot read the summary {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigurationError(
            f"expected a summary that `stratagem run --summary {path}` has written, with what was measured"
        ) from None
