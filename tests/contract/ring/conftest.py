"""Groups of every kind, in every size, for one suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from stratagem.worker.ring.group import Group
from tests.contract.ring.groups import FACTORIES, connected

SIZES = (1, 2, 3, 4)
QUICK = {"ring over tcp": (1, 3), "ring over grpc": (1, 2), "shm, signals on sockets": (1, 3)}
"""Of the kinds of which few sizes show what is theirs: the others show the rest."""
CASES = [
    pytest.param((kind, size), marks=[pytest.mark.thorough] * (size not in QUICK.get(kind, (1, 2, 4))))
    for kind in FACTORIES
    for size in SIZES
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}, {case[1]}")
def groups(request: pytest.FixtureRequest) -> Iterator[Sequence[Group]]:
    """The ranks of one group."""
    with connected(*request.param) as made:
        yield made
