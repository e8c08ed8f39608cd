"""Which replica a result is of, and what several laws say about replicas that do not meet."""

from __future__ import annotations

from typing import Any

from tests.conformance.law import cannot
from tests.conformance.strategies import PARAMETER_SERVERS, PS_SYNC, Column

NO_COLLECTIVES = cannot(
    PS_SYNC,
    "Workers meet only on the parameter servers: collectives in a step are refused, and `reduce`, `gather` and "
    "`reduce_mean` cover this worker.",
)
LOCAL_GRADIENTS = cannot(
    PARAMETER_SERVERS,
    "The gradient of the global batch exists only on the parameter servers; `.grad` is the worker's own.",
)


def numbers(column: Column, worker: int) -> list[int]:
    """Of the local replicas of a worker, among all in sync."""
    first = worker * column.num_local if column.num_replicas > 1 else 0
    return list(range(first, first + column.num_local))


def steps(column: Column, results: list[Any]) -> list[tuple[int, Any]]:
    """Number and result of the step of every replica."""
    pairs = [pair for worker, found in enumerate(results) for pair in zip(numbers(column, worker), found, strict=True)]
    assert len(pairs) == column.num_workers * column.num_local
    return pairs
