"""Groups of every kind, in every size, for one suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from stratagem.worker.ring.group import Group
from tests.contract.ring.groups import FACTORIES, connected

SIZES = (1, 2, 3, 4)
CASES = [(kind, size) for kind in FACTORIES for size in SIZES]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}, {case[1]}")
def groups(request: pytest.FixtureRequest) -> Iterator[Sequence[Group]]:
    """The ranks of one group."""
    with connected(*request.param) as made:
        yield made
