"""The one runner: cases take turns A B B A …, each checks its own samples, medians and spreads make the rows."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.machine import library_versions

Value = str | int | float | None
Identity = Mapping[str, Value]
"""The columns that name a row: benchmark, system, workload, …"""
Sample = Mapping[str, float | None]
"""One measurement of one row: metric name to value; None where a system does not tell."""
Versions = Mapping[str, str]
"""Library to version."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One system under one load. A measurement gives one sample for each of its rows."""

    identities: Sequence[Identity]
    measure: Callable[[], tuple[Sequence[Sample], Versions]]
    """Measures once: a sample for each identity, in order. Raises when what was computed is wrong."""

    @classmethod
    def of_one_row(cls, identity: Identity, measure: Callable[[], tuple[Sample, Versions]]) -> Case:
        """A case whose measurement gives a single sample."""

        def measure_all() -> tuple[Sequence[Sample], Versions]:
            sample, versions = measure()
            return [sample], versions

        return cls([identity], measure_all)

    @classmethod
    def of_ours(cls, identity: Identity, measure: Callable[[], Sample]) -> Case:
        """A case of one row, whose versions are those of our own side."""
        return cls.of_one_row(identity, lambda: (measure(), library_versions()))


@dataclasses.dataclass(frozen=True)
class Row:
    """The samples of one identity, summed up."""

    identity: Identity
    medians: Mapping[str, float | None]
    spreads: Mapping[str, tuple[float, float] | None]
    """Lowest and highest sample of each metric."""
    num_blocks: int
    versions: Versions

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
    cases: Sequence[Case],
    num_blocks: int,
    on_sample: Callable[[Identity, Sample], None] = lambda identity, sample: None,
) -> list[Row]:
    """Measures every case ``num_blocks`` times, interleaved, and sums up.

    Raises:
        ValueError: ``num_blocks`` is below 1, or a case gives another number of samples than it has rows.
    """
    if num_blocks < 1:
        raise ValueError(f"expected at least one block, got {num_blocks}")
    measured: list[list[Sequence[Sample]]] = [[] for _ in cases]
    versions: list[dict[str, str]] = [{} for _ in cases]
    for index in turns(len(cases), num_blocks):
        samples, used = cases[index].measure()
        for identity, sample in zip(cases[index].identities, samples, strict=True):
            on_sample(identity, sample)
        measured[index].append(samples)
        versions[index] |= used
    return [
        sum_up(identity, taken, used)
        for case, blocks, used in zip(cases, measured, versions, strict=True)
        for identity, *taken in zip(case.identities, *blocks, strict=True)
    ]


def sum_up(identity: Identity, samples: Sequence[Sample], versions: Versions) -> Row:
    """Median and spread of each metric; a metric that any sample lacks has neither."""
    medians: dict[str, float | None] = {}
    spreads: dict[str, tuple[float, float] | None] = {}
    for name in samples[0]:
        values = [value for sample in samples if (value := sample[name]) is not None]
        complete = len(values) == len(samples)
        medians[name] = statistics.median(values) if complete else None
        spreads[name] = (min(values), max(values)) if complete else None
    return Row(identity, medians, spreads, len(samples), versions)
