"""What the lead of a ring tells the chief of the steps that are done."""

from __future__ import annotations

import types
from typing import Any, cast

from stratagem.cluster.units import Plan
from stratagem.strategy.multi_worker_mirrored import MultiWorkerMirroredStrategy


def test_who_becomes_the_lead_tells_what_the_one_before_it_may_not_have_told() -> None:
    """Of a job whose lead died, a second of its examples was in no count, and again when it was back as rank 0."""
    told: list[tuple[int, list[int]]] = []
    chief = types.SimpleNamespace(report_units=lambda _, epoch, units: told.append((epoch, units)))
    ring = types.SimpleNamespace(rank=0)
    runtime = types.SimpleNamespace(chief=chief)
    strategy = types.SimpleNamespace(_runtime=runtime, communicator=ring, is_lead=False)
    dataset = types.SimpleNamespace(plan=Plan(num_examples=12, batch_size=2, num_slices=1, seed=0))
    report = MultiWorkerMirroredStrategy._report(cast(Any, strategy), 1, cast(Any, dataset))
    assert report is not None
    report(0, [4, 5, 6])  # the last one makes up for a loss: no unit of its own
    report(1, [0])
    assert not told
    ring.rank, strategy.is_lead = 1, True
    report(1, [1])
    report(1, [2])
    assert told == [(0, [4, 5]), (1, [0, 1]), (1, [2])]
