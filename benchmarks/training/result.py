"""What one training job reports: a JSON file named by the environment. Standard library only."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.window import Window

RESULT_VARIABLE = "STRATAGEM_BENCHMARK_RESULT"
"""Environment variable: the file that the job writes."""
ROOT_VARIABLE = "STRATAGEM_BENCHMARK_ROOT_PID"
"""Environment variable: the process whose descendants are the job."""


class InvalidResultError(Exception):
    """A job ended, but what it computed is not training: its time says nothing."""


@dataclasses.dataclass(frozen=True)
class JobResult:
    """One timed window."""

    num_steps: int
    """Worker-steps in the window, summed over the workers."""
    elapsed_s: float
    cpu_s: float
    """CPU seconds of all processes of the job in the window."""
    loopback_bytes: int
    first_loss: float
    """Mean of the first losses of the job."""
    last_loss: float
    """Mean of the last losses of the window."""
    weights_finite: bool
    exposed_comm: float | None
    """Part of the step time in which a worker waited for communication, 0 to 1; None: not measured."""
    versions: Mapping[str, str]

    def check(self, num_steps: int) -> None:
        """Refuses a window that is not ``num_steps`` of real training.

        Raises:
            InvalidResultError: a wrong number of steps, a loss that did not fall, or weights that are not finite.
        """
        if self.num_steps != num_steps:
            raise InvalidResultError(f"expected {num_steps} worker-steps, the job made {self.num_steps}")
        if not self.weights_finite:
            raise InvalidResultError("expected finite weights after training, found NaN or Inf")
        if not (math.isfinite(self.last_loss) and self.last_loss < self.first_loss):
            raise InvalidResultError(f"expected a falling loss, it went from {self.first_loss} to {self.last_loss}")


def mean_of_ends(losses: Sequence[float], width: int = 5) -> tuple[float, float]:
    """Mean of the first and of the last ``width`` losses; of fewer when they would overlap, NaN without any."""
    width = min(width, max(1, len(losses) // 2))
    first, last = losses[:width], losses[-width:]
    return (sum(first) / width, sum(last) / width) if losses else (math.nan, math.nan)


def write_steps(num_steps: int) -> None:
    """Every worker (or whoever counts for all of them) says how many steps it made in the window."""
    with _steps_path(Path(os.environ[RESULT_VARIABLE])).open("a") as file:
        file.write(f"{num_steps}\n")


def write_result(
    window: Window,
    losses: Sequence[float],
    weights_finite: bool,
    exposed_comm: float | None,
    versions: Mapping[str, str],
) -> None:
    """The one process that timed the window says what it saw."""
    first_loss, last_loss = mean_of_ends(losses)
    fields = {**dataclasses.asdict(window), "first_loss": first_loss, "last_loss": last_loss}
    fields |= {"weights_finite": weights_finite, "exposed_comm": exposed_comm, "versions": dict(versions)}
    Path(os.environ[RESULT_VARIABLE]).write_text(json.dumps(fields))


def read_result(path: Path) -> JobResult:
    """The result of a job that has ended, with the steps of all its workers."""
    num_steps = sum(int(line) for line in _steps_path(path).read_text().split())
    return JobResult(num_steps=num_steps, **json.loads(path.read_text()))


def _steps_path(path: Path) -> Path:
    return path.with_suffix(".steps")


def root_pid() -> int:
    """The process whose descendants are this job."""
    return int(os.environ[ROOT_VARIABLE])
