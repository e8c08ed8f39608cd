"""What workers decide together, some of which die, come late or come too late."""

from __future__ import annotations

from stratagem.chief.counting.metric_store import Agreements
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Topic

A, B, C = Incarnation("worker:0", 1), Incarnation("worker:1", 2), Incarnation("worker:1", 3)
FIRST, SECOND = Topic("fit 1, ends of epochs", 0), Topic("fit 1, ends of epochs", 1)


def test_founders_are_waited_for_and_the_largest_number_counts() -> None:
    book = Agreements({}, set())
    book.say(A, FIRST, 0)
    assert book.waits_for(FIRST, [A, B], {A, B}) == [B]
    book.say(B, FIRST, 1)
    assert book.waits_for(FIRST, [A, B], {A, B}) == [] and book.outcome(FIRST) == 1


def test_nobody_waits_for_the_dead_or_for_one_who_has_only_just_come() -> None:
    book = Agreements({}, set())
    book.say(A, FIRST, 0)
    assert book.waits_for(FIRST, [A], {A, B}) == []
    assert book.waits_for(FIRST, [A, C], {A, B}) == []
    book.say(C, FIRST, 0)
    book.say(A, SECOND, 0)
    assert book.waits_for(SECOND, [A, C], {A, B}) == [C], "it takes part since it said something"


def test_what_is_decided_stays() -> None:
    book = Agreements({FIRST: 0}, set())
    book.say(C, FIRST, 1)
    assert book.decided(FIRST) == 0
    book.say(C, SECOND, 1)
    assert book.decided(SECOND) is None


def test_nobody_waits_for_one_who_has_left_until_it_speaks_again() -> None:
    left = {(B.task, FIRST.group)}
    book = Agreements({}, left)
    book.say(A, FIRST, 0)
    assert book.waits_for(FIRST, [A, B], {A, B}) == [] and book.outcome(FIRST) == 0
    assert book.waits_for(Topic("fit 2, ends of epochs", 0), [A, B], {A, B}) == [A, B]
    left.clear()
    assert book.waits_for(FIRST, [A, B], {A, B}) == [B]
