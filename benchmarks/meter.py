"""The ``meter`` benchmark: what it costs a step that its phases are counted, paired inside one worker."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.jobs import Task, run_job, stratagem_run
from benchmarks.runner import Case, Sample
from benchmarks.training.cases import identity_of
from benchmarks.training.workloads import SEED, WORKLOADS, Workload

BLOCK_STEPS = 5
LANE = "shm"
WARMUP_STEPS = 64
NUM_RESAMPLED = 2000
CENTRAL = 0.9
"""Part of the medians of samples drawn again that lies between ``low`` and ``high``."""


class WrongMeterError(Exception):
    """The blocks were not what they should have been."""


@dataclasses.dataclass(frozen=True)
class PairedResult:
    """Blocks of :data:`BLOCK_STEPS` steps of the lead, in the order they ran: nanoseconds by the clock, and of CPU of
    the whole process."""

    counted: Sequence[tuple[int, int]]
    silent: Sequence[tuple[int, int]]
    num_counted: int
    """Steps that the meter has counted, those of the warm-up included."""


def meter_cases(num_pairs: int) -> list[Case]:
    """One worker and one ps with each workload, and a ring of two."""
    cases = [(WORKLOADS[name], 1, 1) for name in ("cnn", "sparse")]
    return [_case(*each, num_pairs) for each in (*cases, (WORKLOADS["cnn"], 2, 0))]


def to_sample(result: PairedResult, num_pairs: int) -> Sample:
    """What a step takes without the meter, and what more with it; medians over pairs of blocks.

    Raises:
        WrongMeterError: the meter did not count the steps of its blocks, or counted others.
    """
    counted = WARMUP_STEPS + num_pairs * BLOCK_STEPS
    if (len(result.counted), len(result.silent)) != (num_pairs, num_pairs) or abs(result.num_counted - counted) > 1:
        raise WrongMeterError(
            f"expected {num_pairs} pairs and {counted} steps counted, got {len(result.counted)} and "
            f"{len(result.silent)} blocks and {result.num_counted} steps"
        )
    step_us = statistics.median(wall for wall, _ in result.silent) / BLOCK_STEPS / 1e3
    more = [(ours[0] - bare[0], ours[1] - bare[1]) for ours, bare in zip(result.counted, result.silent, strict=True)]
    meter_us, low_us, high_us = median_between([wall / BLOCK_STEPS / 1e3 for wall, _ in more])
    cpu_us, cpu_low_us, cpu_high_us = median_between([cpu / BLOCK_STEPS / 1e3 for _, cpu in more])
    return {
        "step_us": step_us, "meter_us": meter_us, "low_us": low_us, "high_us": high_us,
        "percent": 100 * meter_us / step_us,
        "meter_cpu_us": cpu_us, "cpu_low_us": cpu_low_us, "cpu_high_us": cpu_high_us,
    }  # fmt: skip


def median_between(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and between what :data:`CENTRAL` of the medians lie of as many values drawn from them again."""
    draw = random.Random(SEED)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(NUM_RESAMPLED))
    outside = round(NUM_RESAMPLED * (1 - CENTRAL) / 2)
    return statistics.median(values), medians[outside], medians[-1 - outside]


def _case(workload: Workload, num_workers: int, num_ps: int, num_pairs: int) -> Case:
    options = ["--workers", str(num_workers), "--transport", LANE]
    options += ["--ps", str(num_ps), "--strategy", "ps"] if num_ps else ["--strategy", "ring"]
    arguments = [workload.name, str(WARMUP_STEPS), str(num_pairs), *([] if num_ps else [LANE])]

    def measure() -> Sample:
        text = run_job([Task(stratagem_run("meter_job.py", arguments, *options))], Path.read_text)
        return to_sample(PairedResult(**json.loads(text)), num_pairs)

    return Case.of_ours(identity_of("meter", workload, "stratagem", LANE, num_workers, num_ps), measure)
