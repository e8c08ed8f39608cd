"""What tests of datasets compare: steps of all replicas, written as text."""

from __future__ import annotations

from collections.abc import Sequence

from tests.conformance.scenarios.examples import Steps
from tests.conformance.strategies import PS_ASYNC, PS_SYNC, Column


def written(text: str) -> Steps:
    """Steps as text: replicas between ``|``, steps between ``;``, as in "0 1 | 2 3 ; 4 | 5"."""
    return [[list(map(int, part.split())) for part in step.split("|")] for step in text.split(";")]


def joined(column: Column, results: Sequence[Steps]) -> Steps:
    """The steps of all workers: in each, what all replicas have, in replica order.

    Slices under parameter servers are the workers' who come first: they are put in the order of their examples. At
    staleness > 0 each unit is a step of its own.
    """
    if column is PS_ASYNC:
        return sorted(step for steps in results for step in steps)
    assert len({len(steps) for steps in results}) == 1, "the workers made different numbers of steps"
    steps = [[examples for part in parts for examples in part] for parts in zip(*results, strict=True)]
    return list(map(sorted, steps)) if column is PS_SYNC else steps


def flat(steps: Steps) -> list[int]:
    """All examples, in order."""
    return [number for step in steps for examples in step for number in examples]
