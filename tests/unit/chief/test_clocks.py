"""The staleness bound: nobody runs more than s steps ahead of a worker that holds a unit."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from stratagem.chief.leasing.clocks import Clocks
from stratagem.cluster.task import Incarnation

LIVES = [Incarnation(f"worker:{i}", i + 1) for i in range(3)]


def clocks_at(*steps: int) -> Clocks:
    clocks = Clocks()
    for incarnation in LIVES[: len(steps)]:
        clocks.report(incarnation, 0)
    for incarnation, clock in zip(LIVES, steps, strict=False):
        clocks.report(incarnation, clock)
    return clocks


def test_a_worker_waits_for_those_more_than_s_steps_behind() -> None:
    clocks = clocks_at(4, 1, 3)
    assert clocks.waits_for(LIVES[0], 2, LIVES) == [LIVES[1]]
    assert clocks.waits_for(LIVES[0], 3, LIVES) == []
    assert clocks.waits_for(LIVES[1], 1, LIVES) == []


def test_a_worker_without_a_unit_does_not_count() -> None:
    clocks = Clocks()
    clocks.report(LIVES[1], 0)
    clocks.report(LIVES[0], 5)
    assert clocks.waits_for(LIVES[0], 1, LIVES) == [LIVES[1]]
    assert clocks.waits_for(LIVES[0], 1, [LIVES[0]]) == []


def test_unbounded_staleness_never_waits() -> None:
    clocks = Clocks()
    clocks.report(LIVES[1], 0)
    clocks.report(LIVES[0], 99)
    assert clocks.waits_for(LIVES[0], math.inf, LIVES) == []


def test_a_newcomer_starts_at_the_slowest_worker_that_holds_a_unit() -> None:
    clocks = clocks_at(7, 2)
    assert clocks.report(Incarnation("worker:2", 9), 0, LIVES) == 2
    assert clocks.report(Incarnation("worker:2", 10), 0, [LIVES[0]]) == 7


def test_after_a_restart_of_the_chief_nobody_overtakes_a_worker_that_has_not_spoken() -> None:
    clocks = Clocks()
    clocks.expect(LIVES[0])
    clocks.expect(LIVES[1])
    clocks.report(LIVES[0], 5)
    assert clocks.waits_for(LIVES[0], 3, LIVES) == [LIVES[1]]
    clocks.report(LIVES[1], 2)
    assert clocks.waits_for(LIVES[0], 3, LIVES) == []
    clocks.forget(LIVES[1])
    assert clocks.waits_for(LIVES[0], 0, LIVES) == []


@given(st.integers(1, 4), st.lists(st.integers(0, 2), max_size=60))
def test_clocks_of_holders_never_drift_further_apart_than_the_bound(staleness: int, turns: list[int]) -> None:
    clocks = Clocks()
    finished = dict.fromkeys(LIVES, 0)
    for incarnation in LIVES:
        clocks.report(incarnation, 0)
    for turn in turns:
        incarnation = LIVES[turn]
        clock = clocks.report(incarnation, finished[incarnation], LIVES)
        if not clocks.waits_for(incarnation, staleness, LIVES):
            assert clock - min(finished.values()) <= staleness
            finished[incarnation] += 1
    slowest = min(finished, key=lambda incarnation: finished[incarnation])
    clocks.report(slowest, finished[slowest], LIVES)
    assert clocks.waits_for(slowest, staleness, LIVES) == []
