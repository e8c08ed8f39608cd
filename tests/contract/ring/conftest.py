"""Groups of every kind, in every size, for one suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from stratagem.worker.ring.group import Group
from tests.contract.ring.groups import FACTORIES, connected

SIZES = (1, 2, 3, 4)
AS_THREE = ("ring over tcp", "ring over grpc", "shm, signals on sockets")
"""Kinds of which four ranks show what three do, and what four of others do."""
CASES = [
    pytest.param((kind, size), marks=[pytest.mark.thorough] * (kind in AS_THREE and size == 4))
    for kind in FACTORIES
    for size in SIZES
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}, {case[1]}")
def groups(request: pytest.FixtureRequest) -> Iterator[Sequence[Group]]:
    """The ranks of one group."""
    with connected(*request.param) as made:
        yield made
