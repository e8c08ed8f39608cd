"""What a summary keeps of the measures, and the reading of a run that has ended from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratagem.chief.monitoring.why.reading import Reading, TaskReading
from stratagem.errors import ConfigurationError
from stratagem.rpc.status_view import StatusView


def measured(status: StatusView, reports: Mapping[str, Mapping[str, Any]], duration_s: float) -> dict[str, Any]:
    """What a summary keeps of the measures: by task, those of its whole last life.

    Args:
        status: the last one.
        reports: of workers that finished, by task.
        duration_s: of the run.
    """
    told = {task.task: task for task in status.tasks}
    found: dict[str, Any] = {}
    for name in {**told, **reports}:
        measures, notes = (told[name].measures, told[name].notes) if name in told else ({}, {})
        if values := {**measures, **reports.get(name, {}).get("measures", {})}:
            found[name] = {"values": values, "notes": notes, "window_s": round(duration_s, 3)}
    return found


def reading_of_summary(path: Path) -> Reading:
    """What a run has left.

    Raises:
        ConfigurationError: it cannot be read, or is no summary.
    """
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
