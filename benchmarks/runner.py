"""The one runner: cases take turns A B B A …, each checks its own samples, medians and spreads make the rows."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

Value = str | int | float | None
Sample = Mapping[str, float | None]
"""One measurement: metric name to value; None where a system does not tell."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One system on one workload: one row."""

    identity: Mapping[str, Value]
    """The columns that name the row: benchmark, system, workload, …"""
    measure: Callable[[], tuple[Sample, Mapping[str, str]]]
    """Takes one sample; returns it with the versions of the libraries used. Raises when what was computed is wrong."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The outcome of one case."""

    identity: Mapping[str, Value]
    medians: Mapping[str, float | None]
    spreads: Mapping[str, tuple[float, float] | None]
    """Lowest and highest sample of each metric."""
    num_blocks: int
    versions: Mapping[str, str]

    def as_json(self) -> dict[str, object]:
        """One flat object, spreads and versions apart."""
        spreads = {name: list(spread) for name, spread in self.spreads.items() if spread is not None}
        return {
            **self.identity,
            **self.medians,
            "num_blocks": self.num_blocks,
            "spread": spreads,
            "versions": dict(self.versions),
        }


def turns(num_cases: int, num_blocks: int) -> list[int]:
    """Indices of the cases in the order they run: forward, backward, forward, … so that drift hits all alike."""
    forward = list(range(num_cases))
    return [index for block in range(num_blocks) for index in (forward if block % 2 == 0 else forward[::-1])]


def run_cases(
    cases: Sequence[Case], num_blocks: int, on_sample: Callable[[Case, Sample], None] = lambda case, sample: None
) -> list[Row]:
    """Samples every case ``num_blocks`` times, interleaved, and sums up.

    Raises:
        ValueError: ``num_blocks`` is below 1.
    """
    if num_blocks < 1:
        raise ValueError(f"expected at least one block, got {num_blocks}")
    samples: list[list[Sample]] = [[] for _ in cases]
    versions: list[dict[str, str]] = [{} for _ in cases]
    for index in turns(len(cases), num_blocks):
        sample, used = cases[index].measure()
        samples[index].append(sample)
        versions[index] |= used
        on_sample(cases[index], sample)
    return [sum_up(case, taken, used) for case, taken, used in zip(cases, samples, versions, strict=True)]


def sum_up(case: Case, samples: Sequence[Sample], versions: Mapping[str, str]) -> Row:
    """Median and spread of each metric; a metric that any sample lacks has neither."""
    medians: dict[str, float | None] = {}
    spreads: dict[str, tuple[float, float] | None] = {}
    for name in samples[0]:
        values = [value for sample in samples if (value := sample[name]) is not None]
        complete = len(values) == len(samples)
        medians[name] = statistics.median(values) if complete else None
        spreads[name] = (min(values), max(values)) if complete else None
    return Row(case.identity, medians, spreads, len(samples), versions)
