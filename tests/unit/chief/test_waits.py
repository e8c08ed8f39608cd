"""Since when somebody waits, for the status page: a wait may span several calls."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, cast

from stratagem.chief.chief_state import SAME_S, Waits
from stratagem.chief.monitoring.standstill import STANDSTILL_S, Standstill, _stuck
from stratagem.cluster.task import Incarnation

ONE, TWO, THREE = (Incarnation(f"worker:{index}", 1) for index in range(3))


def test_a_call_that_is_made_anew_goes_on_waiting() -> None:
    now = [100.0]
    waits = Waits(lambda: now[0])
    for _ in range(3):
        with waits.of(ONE) as note:
            note("to finish", [TWO])
            assert waits.noted[ONE] == ("worker:1 to finish", 100.0)
            now[0] += 10
            note("to finish", [TWO])
            assert waits.noted[ONE] == ("worker:1 to finish", 100.0)
        assert ONE not in waits.noted
        now[0] += SAME_S / 2


def test_another_wait_begins_anew() -> None:
    now = [100.0]
    waits = Waits(lambda: now[0])
    with waits.of(ONE) as note:
        note("to finish", [TWO, THREE])
        now[0] = 110.0
        note("to finish", [THREE])
        assert waits.noted[ONE] == ("worker:2 to finish", 110.0)
    now[0] += 2 * SAME_S
    with waits.of(ONE) as note:
        note("to finish", [THREE])
        assert waits.noted[ONE] == ("worker:2 to finish", now[0]), "it did not wait in between"
    with waits.of(TWO):
        assert TWO not in waits.noted


def test_a_call_that_its_worker_has_given_up_ends_nothing() -> None:
    """Each is made anew after some seconds, and may come here before the one before it has ended."""
    waits = Waits(lambda: 100.0)
    with contextlib.ExitStack() as newer:
        with waits.of(ONE) as note_of_older:
            note_of_older("to finish", [TWO])
            note = newer.enter_context(waits.of(ONE))
            assert ONE not in waits.noted, "it may have got what it waited for"
            note("to finish", [TWO])
            note_of_older("to come", [THREE])
        assert waits.noted == {ONE: ("worker:1 to finish", 100.0)} and waits.others == {ONE: [TWO]}
    assert not waits.noted and not waits.others


def test_a_standstill_outlives_calls_that_are_made_anew_each_at_its_time() -> None:
    """The clock began anew whenever one of several workers asked again."""
    now, calls = [0.0], [contextlib.ExitStack() for _ in range(3)]
    waits = Waits(lambda: now[0])
    state: Any = SimpleNamespace(
        clock=lambda: now[0],
        sessions=SimpleNamespace(live=lambda _: [ONE, TWO, THREE]),
        lease_book=SimpleNamespace(steps=SimpleNamespace(unfinished=lambda _: [])),
        waits=waits,
    )
    standstill = Standstill(state, cast("Any", SimpleNamespace(waiting_steps={})))
    for tick in range(100):
        now[0] = tick / 4
        for index, (one, other) in enumerate(((ONE, TWO), (TWO, ONE), (THREE, ONE))):
            if tick % 12 == 4 * index:
                calls[index].close()
            elif tick % 12 == 4 * index + 1 or not tick:
                calls[index].enter_context(waits.of(one))("to finish", [other])
        if told := standstill.found():
            break
    assert STANDSTILL_S <= now[0] < STANDSTILL_S + 2.0
    assert "worker:0 waits for worker:1 to finish; worker:1 waits for worker:0 to finish" in told


def test_who_waits_for_others_that_wait_for_it_waits_without_end() -> None:
    assert _stuck({ONE: [TWO], TWO: [THREE]}) == []
    assert _stuck({ONE: [TWO, THREE], TWO: [ONE]}) == [ONE, TWO]
    assert _stuck({ONE: [TWO], TWO: [THREE], THREE: [TWO]}) == [ONE, TWO, THREE], "it waits for these"
    assert _stuck({ONE: [], TWO: [ONE]}) == []
