"""What a worker makes of its cluster."""

from __future__ import annotations

import pytest

from stratagem.cluster.membership import Member, Membership
from stratagem.cluster.spec import ClusterSpec
from stratagem.worker.runtime import told_otherwise

MEMBERS = tuple(Member(task, "127.0.0.1:1", 1, live=True) for task in ("ps:0", "worker:0", "worker:1"))


@pytest.mark.parametrize(
    ("num_told", "membership", "is_told_otherwise"),
    [
        (2, Membership(members=MEMBERS), False),
        (1, Membership(members=MEMBERS), True),
        (3, Membership(members=MEMBERS), True),
        (1, Membership(members=MEMBERS, wanted_workers=2), False),
        (1, Membership(members=MEMBERS, min_workers=1), False),
    ],
)
def test_another_number_of_workers_than_the_chief_has_is_said(
    num_told: int, membership: Membership, is_told_otherwise: bool
) -> None:
    cluster = ClusterSpec(worker=tuple(f"127.0.0.1:{port}" for port in range(1, num_told + 1)))
    said = told_otherwise(cluster, membership)
    assert bool(said) is is_told_otherwise
    assert not said or f"number of workers ({num_told}) than its chief (2)" in said
