"""Units of one epoch: every unit is accepted once, and never leased twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.chief.leasing.leases import EpochLeases
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Plan, UnitBitmap
from stratagem.errors import ProtocolError

A, B = Incarnation("worker:0", 1), Incarnation("worker:1", 2)


def is_closed(leases: EpochLeases) -> bool:
    return leases.closed  # a call: mypy takes a property for the constant it was in the last assert


def take(leases: EpochLeases, incarnation: Incarnation) -> int:
    index = leases.first_pending
    assert index is not None
    leases.acquire(index, incarnation)
    return index


def test_units_go_out_in_plan_order_and_returned_ones_first() -> None:
    leases = EpochLeases(Plan(num_examples=5, batch_size=1))
    assert [take(leases, A), take(leases, B), take(leases, A)] == [0, 1, 2]
    leases.give_back(1)
    leases.give_back(0)
    assert [take(leases, B), take(leases, B), take(leases, B)] == [0, 1, 3]
    assert leases.held_by(A) == [2]
    assert leases.held_by(B) == [0, 1, 3]


def test_the_epoch_is_closed_only_when_every_unit_is_accepted() -> None:
    leases = EpochLeases(Plan(num_examples=5, batch_size=2))
    for _ in range(3):
        take(leases, A)
    assert leases.accept(A, [0, 2]) == [0, 2]
    assert not is_closed(leases)
    assert leases.accept(A, [0, 1, 2]) == [1]
    assert is_closed(leases)
    assert leases.first_pending is None


def test_more_than_is_wanted_is_leased_as_far_as_that_leaves_others_as_much() -> None:
    leases = EpochLeases(Plan(num_examples=100, batch_size=1))
    assert leases.ask(A, [], 2, 30, 100) == [*range(30)], "half of 100, if it were so many"
    assert leases.ask(B, [], 2, 30, 100) == [*range(30, 47)], "70 are left: a quarter"
    assert leases.ask(B, [*range(30, 46)], 2, 30, 50) == [46, 47], "units that it does not know of first"
    assert leases.ask(A, range(30), 2, 0, 50) == [48, 49]
    assert leases.ask(A, [*range(30), 48, 49], 2, 30, 50) == [], "the part is over"


def test_an_epoch_without_units_is_closed() -> None:
    assert EpochLeases(Plan(num_examples=3, batch_size=4, drop_last=True)).closed


def test_an_acceptance_by_somebody_else_is_refused() -> None:
    leases = EpochLeases(Plan(num_examples=2, batch_size=1))
    take(leases, A)
    with pytest.raises(ProtocolError, match=r"worker:1 .* accepted unit 0, which is leased to worker:0"):
        leases.accept(B, [0])
    with pytest.raises(ProtocolError, match="the epoch has 2 units"):
        leases.accept(A, [2])


def test_revoked_units_go_out_again() -> None:
    leases = EpochLeases(Plan(num_examples=3, batch_size=1), UnitBitmap.of([0, 1, 2]))
    assert is_closed(leases)
    leases.revoke([1])
    assert not is_closed(leases)
    assert take(leases, B) == 1


@given(st.integers(0, 12), st.lists(st.tuples(st.sampled_from(["lease", "accept", "give"]), st.integers(0, 1))))
def test_any_interleaving_accepts_every_unit_once(num_units: int, events: list[tuple[str, int]]) -> None:
    leases = EpochLeases(Plan(num_examples=num_units, batch_size=1))
    incarnations = [A, B]
    accepted: list[int] = []
    for what, who in events:
        held = leases.held_by(incarnations[who])
        if what == "lease" and leases.first_pending is not None:
            take(leases, incarnations[who])
        elif what == "accept":
            accepted += leases.accept(incarnations[who], held[:1])
        elif what == "give" and held:
            leases.give_back(held[-1])
        assert not set(leases.held_by(A)) & set(leases.held_by(B))
    for incarnation in incarnations:
        accepted += leases.accept(incarnation, leases.held_by(incarnation))
    while leases.first_pending is not None:
        accepted += leases.accept(A, [take(leases, A)])
    assert sorted(accepted) == list(range(num_units))
    assert is_closed(leases)
