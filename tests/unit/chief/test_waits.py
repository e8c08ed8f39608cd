"""Since when somebody waits, for the status page: a wait may span several calls."""

from __future__ import annotations

from stratagem.chief.chief_state import SAME_S, Waits
from stratagem.chief.monitoring.standstill import _stuck
from stratagem.cluster.task import Incarnation

ONE, TWO, THREE = (Incarnation(f"worker:{index}", 1) for index in range(3))


def test_a_call_that_is_made_anew_goes_on_waiting() -> None:
    now = [100.0]
    waits = Waits(lambda: now[0])
    for _ in range(3):
        with waits.of(ONE):
            waits.note(ONE, "to finish", [TWO])
            assert waits.noted[ONE] == ("worker:1 to finish", 100.0)
            now[0] += 10
            waits.note(ONE, "to finish", [TWO])
            assert waits.noted[ONE] == ("worker:1 to finish", 100.0)
        assert ONE not in waits.noted
        now[0] += SAME_S / 2


def test_another_wait_begins_anew() -> None:
    now = [100.0]
    waits = Waits(lambda: now[0])
    with waits.of(ONE):
        waits.note(ONE, "to finish", [TWO, THREE])
        now[0] = 110.0
        waits.note(ONE, "to finish", [THREE])
        assert waits.noted[ONE] == ("worker:2 to finish", 110.0)
    now[0] += 2 * SAME_S
    with waits.of(ONE):
        waits.note(ONE, "to finish", [THREE])
        assert waits.noted[ONE] == ("worker:2 to finish", now[0]), "it did not wait in between"
    with waits.of(TWO):
        assert TWO not in waits.noted


def test_who_waits_for_others_that_wait_for_it_waits_without_end() -> None:
    assert _stuck({ONE: [TWO], TWO: [THREE]}) == []
    assert _stuck({ONE: [TWO, THREE], TWO: [ONE]}) == [ONE, TWO]
    assert _stuck({ONE: [TWO], TWO: [THREE], THREE: [TWO]}) == [ONE, TWO, THREE], "it waits for these"
    assert _stuck({ONE: [], TWO: [ONE]}) == []
