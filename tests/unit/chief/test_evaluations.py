"""Units of evaluation data between workers that come and go: each is counted exactly once, on one version."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.chief.leasing import evaluations
from stratagem.chief.leasing.evaluations import Evaluations, Pin
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Plan, Topic, Unit
from stratagem.errors import ConfigurationError, LimitError
from tests.unit.chief.calls import calls

A, B = Incarnation("worker:0", 1), Incarnation("worker:1", 2)
NAME = Topic("evaluation 1", 0)
PLAN = Plan(10, 3, False, shuffle=False)


def ask(book: Evaluations, incarnation: Incarnation, want: int = 1, held: tuple[int, ...] = ()) -> list[int]:
    return [lease.unit.index for lease in book.ask(NAME, incarnation, held, want).granted]


def test_units_are_lent_once_and_those_of_a_lost_reply_again() -> None:
    book = Evaluations()
    evaluation = book.open(NAME, PLAN)
    assert ask(book, A, 2) == [0, 1] and ask(book, B) == [2]
    assert ask(book, A, 2, held=(0,)) == [1, 3]
    assert [lease.num_examples for lease in book.ask(NAME, A, (), 9).granted] == [3, 3, 1]
    assert book.ask(NAME, B, (2,), 1).waits_for == (A,)
    for index in range(4):
        evaluation.leases.mark_accepted(index)
    assert book.ask(NAME, B, (), 1).end


def test_those_who_leave_or_die_give_back() -> None:
    book = Evaluations()
    evaluation = book.open(NAME, PLAN)
    assert ask(book, A, 2) == [0, 1] and ask(book, B, 2) == [2, 3]
    book.leave(NAME, A)
    assert evaluation.askers == {B}
    book.forget(B)
    assert not evaluation.askers and ask(book, A, 9) == [0, 1, 2, 3]
    book.leave(Topic("evaluation 7", 0), A)


def test_other_data_are_refused() -> None:
    book = Evaluations()
    book.open(NAME, PLAN)
    with pytest.raises(ConfigurationError, match="10 examples in batches of 3 in the job and over 9 examples"):
        book.open(NAME, Plan(9, 3, False, shuffle=False))


def test_there_are_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "MAX_EVALUATIONS", 1)
    book = Evaluations()
    book.open(NAME, PLAN)
    with pytest.raises(LimitError, match="evaluate less often"):
        book.open(Topic("evaluation 1", 1), PLAN)
    assert book.open(NAME, PLAN) and len(book) == 1


def test_other_weights_begin_anew() -> None:
    book = Evaluations()
    evaluation = book.open(NAME, PLAN)
    assert not evaluation.pin({"ps:0": (1, 5)})
    assert ask(book, A, 2) == [0, 1]
    evaluation.leases.mark_accepted(0)
    assert not evaluation.pin({"ps:0": (1, 5)}) and evaluation.attempt == 1
    assert evaluation.pin({"ps:0": (2, 5)}) and evaluation.attempt == 2
    assert ask(book, B, 9) == [0, 1, 2, 3]


def test_a_restarted_chief_goes_on() -> None:
    book = Evaluations()
    pin = Pin.from_record(Pin(PLAN, 2, {"ps:0": (1, 5)}).to_record())
    book.restore(NAME, pin, [Unit(0, 0, 1)], is_over=False)
    evaluation = book.open(NAME, PLAN)
    assert not evaluation.pin({"ps:0": (1, 5)}) and evaluation.attempt == 2
    assert ask(book, A, 9) == [0, 2, 3]
    over = Topic("evaluation 1", 1)
    book.restore(over, pin, [], is_over=True)
    assert book.ask(over, A, (), 1).end and book.open(over, PLAN).is_proven


def test_to_take_over_what_is_over_costs_a_chief_the_same_however_long_it_was() -> None:
    book = Evaluations()
    pins = [Pin(Plan(size, 1, False, shuffle=False), 1, {}) for size in (3, 30_000)]
    few, many = (calls(functools.partial(book.restore, NAME, pin, [], is_over=True)) for pin in pins)
    assert many == few
    assert book[NAME].leases.closed


@given(st.lists(st.tuples(st.sampled_from(["ask", "count", "leave"]), st.sampled_from([A, B])), max_size=40))
def test_each_unit_is_counted_once(events: list[tuple[str, Incarnation]]) -> None:
    book = Evaluations()
    evaluation = book.open(NAME, PLAN)
    held: dict[Incarnation, list[int]] = {A: [], B: []}
    counted: list[int] = []

    def count(incarnation: Incarnation) -> None:
        index = held[incarnation].pop(0)
        if evaluation.leases.mark_accepted(index):
            counted.append(index)

    for what, incarnation in events:
        if what == "ask":
            held[incarnation] += ask(book, incarnation, 1, tuple(held[incarnation]))
        elif what == "count" and held[incarnation]:
            count(incarnation)
        elif what == "leave":
            book.leave(NAME, incarnation)  # what it has computed may still come, as after a lost reply
    while not book.ask(NAME, A, tuple(held[A]), 1).end:
        held[A] = [lease.unit.index for lease in book.ask(NAME, A, (), 9).granted] or held[A]
        if held[A]:
            count(A)
        else:
            book.forget(B)
    assert sorted(counted) == [0, 1, 2, 3]
