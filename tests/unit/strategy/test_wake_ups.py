"""Who is woken by what."""

from __future__ import annotations

import threading

from stratagem.strategy.replicas.wake_ups import SelectiveCondition

DEADLINE_S = 30.0


def test_who_cannot_go_on_is_not_woken() -> None:
    changed, value, has_asked = SelectiveCondition(), 0, threading.Event()
    askers: list[int] = []

    def is_two() -> bool:
        askers.append(threading.get_ident())
        has_asked.set()
        return value == 2

    def wait() -> None:
        with changed, changed:  # as nested as it may be, it is let go of while one waits
            assert changed.wait_for(is_two, DEADLINE_S)

    thread = threading.Thread(target=wait)
    thread.start()
    assert has_asked.wait(DEADLINE_S)
    for number in (1, 1, 1, 2):
        with changed:
            value = number
            changed.notify_all()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert askers.count(threading.get_ident()) == 4
    assert askers.count(thread.ident or 0) <= 4, "before it waits, in Condition.wait_for, and when it is two"


def test_it_waits_no_longer_than_it_should() -> None:
    changed = SelectiveCondition()
    with changed:
        assert not changed.wait_for(lambda: False, 0.0)
        changed.notify_all()
