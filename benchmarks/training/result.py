"""What one training job reports: a JSON file named by the environment. Standard library only."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.job_files import result_path
from benchmarks.window import Window


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
    num_different_weights: int = 1
    """How many of the replicas that should be equal ended with weights of their own; 1: they are equal."""
    cpu_s_by_role: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """CPU seconds of our own tasks, by role."""

    def check(self, num_steps: int) -> None:
        """Refuses a window that is not ``num_steps`` of real training.

        Raises:
            InvalidResultError: a wrong number of steps, a loss that did not fall, weights that are not finite, or
                synchronous replicas whose weights differ in any bit.
        """
        if self.num_steps != num_steps:
            raise InvalidResultError(f"expected {num_steps} worker-steps, the job made {self.num_steps}")
        if not self.weights_finite:
            raise InvalidResultError("expected finite weights after training, found NaN or Inf")
        if self.num_different_weights > 1:
            raise InvalidResultError(
                f"expected equal replicas, they ended with {self.num_different_weights} sets of weights"
            )
        if not (math.isfinite(self.last_loss) and self.last_loss < self.first_loss):
            raise InvalidResultError(f"expected a falling loss, it went from {self.first_loss} to {self.last_loss}")


def mean_of_ends(losses: Sequence[float], width: int = 5) -> tuple[float, float]:
    """Mean of the first and of the last ``width`` losses; of fewer when they would overlap, NaN without any."""
    width = min(width, max(1, len(losses) // 2))
    first, last = losses[:width], losses[-width:]
    return (sum(first) / width, sum(last) / width) if losses else (math.nan, math.nan)


def write_steps(num_steps: int, weights_checksum: int = 0) -> None:
    """Every worker (or whoever counts for all of them) says how many steps it made in the window.

    Args:
        num_steps: steps of this worker.
        weights_checksum: over the bits of its weights at the end, where all replicas have to be equal.
    """
    with _steps_path(result_path()).open("a") as file:
        file.write(f"{num_steps} {weights_checksum}\n")


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
    result_path().write_text(json.dumps(fields))


def read_result(path: Path) -> JobResult:
    """The result of a job that has ended, with the steps of all its workers."""
    lines = [line.split() for line in _steps_path(path).read_text().splitlines()]
    num_different_weights = len({checksum for _, checksum in lines})
    num_steps = sum(int(steps) for steps, _ in lines)
    fields = json.loads(path.read_text())
    return JobResult(num_steps=num_steps, num_different_weights=num_different_weights, **fields)


def read_results(path: Path) -> list[JobResult]:
    """The results of a job that trained in several ways."""
    return [JobResult(**fields) for fields in json.loads(path.read_text())]


def _steps_path(path: Path) -> Path:
    return path.with_suffix(".steps")
