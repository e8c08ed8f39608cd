from __future__ import annotations

from collections.abc import Iterator

import pytest

import stratagem as sg
from tests.unit.strategy.mirrored_replicas import Replicas


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    made = Replicas()
    yield made
    made.replica_threads.close()


@pytest.fixture
def strategy() -> Iterator[sg.MirroredStrategy]:
    """Of two replicas."""
    made = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    yield made
    made.close()
