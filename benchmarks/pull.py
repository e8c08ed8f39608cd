"""The ``pull`` benchmark: what it costs to ask for weights that have not changed, against taking all of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from benchmarks.jobs import Task, run_job, stratagem_run
from benchmarks.runner import Case, Sample
from benchmarks.training.cases import identity_of
from benchmarks.training.workloads import Workload

NUM_PS = 2
LANE = "grpc"
"""Where bytes cost most, and where they can be counted."""


@dataclasses.dataclass(frozen=True)
class PullResult:
    """One job: medians over its pulls for times, the fewest for bytes."""

    cold_s: float
    """Seconds of a pull that names no version: every weight comes."""
    unchanged_s: float
    """Seconds of a pull that names the newest version."""
    cold_bytes: float
    """Bytes over the loopback of one cold pull."""
    unchanged_bytes: float
    weights_equal: bool
    """Whether the cold pull brought back exactly what the ps were given."""


class WrongPullError(Exception):
    """A pull brought other weights, or payload for weights that had not changed."""


def pull_cases(workload: Workload) -> list[Case]:
    """One case: both kinds of pull take turns inside the same job."""
    options = ["--workers", "1", "--ps", str(NUM_PS), "--strategy", "ps", "--transport", LANE]

    def measure() -> Sample:
        text = run_job([Task(stratagem_run("pull_job.py", [workload.name], *options))], Path.read_text)
        return to_sample(PullResult(**json.loads(text)), workload)

    return [Case.of_ours(identity_of("pull", workload, "stratagem", LANE, 1, NUM_PS), measure)]


def to_sample(result: PullResult, workload: Workload) -> Sample:
    """The metrics of one job.

    Raises:
        WrongPullError: the weights that came are wrong, or an unchanged pull moved payload.
    """
    weight_bytes = 4 * workload.num_parameters
    if not result.weights_equal:
        raise WrongPullError("expected a cold pull to bring the weights that the ps were given, it brought others")
    if result.unchanged_bytes > weight_bytes / 10 or result.cold_bytes < weight_bytes:
        raise WrongPullError(
            f"expected {weight_bytes} bytes of weights cold and nearly none unchanged, "
            f"counted {result.cold_bytes} and {result.unchanged_bytes}"
        )
    return {
        "cold_ms": result.cold_s * 1e3,
        "unchanged_ms": result.unchanged_s * 1e3,
        "times_cheaper": result.cold_s / result.unchanged_s,
        "cold_bytes": result.cold_bytes,
        "unchanged_bytes": result.unchanged_bytes,
    }
