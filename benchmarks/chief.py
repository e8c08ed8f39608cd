"""The ``chief`` benchmark: what one chief costs and how soon it answers, with so many workers that only lease units."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from benchmarks.jobs import Task, python_module, run_job
from benchmarks.runner import Case, Sample, Value


@dataclasses.dataclass(frozen=True)
class ChiefResult:
    """One job: a window of seconds in which workers lease units, "train" them and report them."""

    elapsed_s: float
    num_units: int
    """Units that the chief accepted in the window."""
    num_calls: int
    """Calls of all workers in the window; heartbeats travel in the sessions and are not among them."""
    chief_cpu_s: float
    p50_s: float
    """Of the calls: from the request until the answer is there."""
    p99_s: float
    is_exact: bool
    """In the end the chief had accepted each unit that a worker trained, and no other."""


class WrongCountError(Exception):
    """The chief did not count what the workers had trained."""


def chief_cases(counts: tuple[int, ...], rate: float, seconds: float) -> list[Case]:
    """One case for each number of workers.

    Args:
        counts: numbers of workers.
        rate: units a second that each worker trains, if it has them.
        seconds: length of the window.
    """
    return [_case(num_workers, rate, seconds) for num_workers in counts]


def _case(num_workers: int, rate: float, seconds: float) -> Case:
    identity: dict[str, Value] = {
        "benchmark": "chief",
        "system": "stratagem",
        "workers": num_workers,
        "offered_units_per_s": num_workers * rate,
    }
    command = python_module("chief_job", str(num_workers), str(rate), str(seconds))

    def measure() -> Sample:
        text = run_job([Task(command)], Path.read_text)
        return to_sample(ChiefResult(**json.loads(text)))

    return Case.of_ours(identity, measure)


def to_sample(result: ChiefResult) -> Sample:
    """The metrics of one job.

    Raises:
        WrongCountError: what the chief accepted is not what was trained.
    """
    if not result.is_exact or not result.num_units:
        raise WrongCountError("expected the chief to accept exactly the units that workers trained, it has others")
    return {
        "units_per_s": result.num_units / result.elapsed_s,
        "cpu_ms_per_unit": result.chief_cpu_s / result.num_units * 1e3,
        "chief_cpu": result.chief_cpu_s / result.elapsed_s,
        "calls_per_s": result.num_calls / result.elapsed_s,
        "p50_ms": result.p50_s * 1e3,
        "p99_ms": result.p99_s * 1e3,
    }
