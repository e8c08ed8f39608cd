"""What workers have counted: once for each unit, in pages, until it is closed."""

from __future__ import annotations

import pytest

from stratagem.chief.counting import metric_states
from stratagem.chief.counting.metric_states import MetricState, MetricStates
from stratagem.cluster.units import EARLIER_LOGS, EPOCH_LOGS, IN_CHECKPOINTS, MAX_STATE_BYTES, Topic, Unit
from stratagem.errors import LimitError

FIT = Topic("fit 1", 0)


def unit(index: int) -> Unit:
    return Unit(1, 0, index)


def test_the_first_delta_of_a_unit_stays() -> None:
    book = MetricStates()
    assert book.add(MetricState(FIT, unit(1), b"one"))
    assert not book.add(MetricState(FIT, unit(1), b"another"))
    assert book.add(MetricState(FIT, unit(0), b"zero"))
    assert book.page(FIT, 0, 100) == metric_states.Page((b"zero", b"one"))
    assert book.counts("fit 1", unit(1)) and not book.counts("fit 1", unit(2))


def test_a_unit_of_two_topics_is_counted_as_long_as_one_is_open() -> None:
    book, again = MetricStates(), Topic("fit 1", 1)
    for topic in (FIT, again):
        book.add(MetricState(topic, unit(1), b"one"))
    book.drop(FIT)
    assert book.counts("fit 1", unit(1))
    book.drop(again)
    assert not book.counts("fit 1", unit(1))


def test_pages_hold_at_least_one_state() -> None:
    book = MetricStates()
    for index in range(4):
        book.add(MetricState(FIT, unit(index), bytes([index] * 10)))
    assert book.page(FIT, 0, 25) == metric_states.Page((bytes(10), b"\1" * 10), 2)
    assert book.page(FIT, 2, 1) == metric_states.Page((b"\2" * 10,), 1)
    assert book.page(FIT, 4, 100) == metric_states.Page()


def test_what_was_settled_first_stands_and_what_comes_late_counts_in_the_next() -> None:
    book = MetricStates()
    book.add(MetricState(FIT, unit(0), b"zero"))
    book.record(FIT, (("loss", 1.5),))
    book.record(FIT, (("loss", 2.5),))
    assert book.page(FIT, 0, 100).logs == (("loss", 1.5),) and not book.counts("fit 1", unit(1))
    for one in (book, MetricStates.from_record(book.to_record())):
        assert one.counts("fit 1", unit(0)), "a report that is repeated counts in no other epoch"
    assert not book.add(MetricState(FIT, unit(1), b"late"))
    assert book.place(FIT) == Topic("fit 1", 1)
    assert book.place(Topic("fit 2", 0)) == Topic("fit 2", 0)


def test_what_came_of_epochs_is_that_of_earlier_epochs_in_every_job_that_resumes() -> None:
    book = MetricStates()
    place = Topic(IN_CHECKPOINTS + "OneCycleLR", 0)
    book.record(place, (("more", 2.0),))
    for ordinal, group in enumerate(("fit 1", "fit 1" + EPOCH_LOGS, "fit 1" + EARLIER_LOGS, "fit 1, evaluation 1")):
        book.record(Topic(group, ordinal), (("loss", float(ordinal)),))
    earlier = "fit 1" + EARLIER_LOGS
    expected = {place: (("more", 2.0),), Topic(earlier, 1): (("loss", 1.0),), Topic(earlier, 2): (("loss", 2.0),)}
    assert book.lasting_logs() == expected


def test_units_that_are_computed_again_are_counted_again() -> None:
    book = MetricStates()
    evaluated = Unit(0, 0, 3)
    for each in (unit(0), unit(1), evaluated):
        book.add(MetricState(FIT, each, b"x"))
    book.keep(lambda each: each.index == 0)
    assert book.units(FIT) == [evaluated, unit(0)]
    assert book.add(MetricState(FIT, unit(1), b"again"))


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    book = MetricStates()
    with pytest.raises(LimitError, match="at most 1048576 bytes"):
        book.check(MetricState(FIT, unit(0), bytes(MAX_STATE_BYTES + 1)))
    monkeypatch.setattr(metric_states, "MAX_TOPIC_BYTES", 10)
    book.add(MetricState(FIT, unit(0), bytes(6)))
    book.check(MetricState(FIT, unit(1), bytes(4)))
    with pytest.raises(LimitError, match="larger batches"):
        book.check(MetricState(FIT, unit(1), bytes(5)))
    book.record(FIT, ())
    book.check(MetricState(FIT, unit(1), bytes(5)))


def test_topics_that_are_never_closed_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    book, num_kept = MetricStates(), 0
    monkeypatch.setattr(metric_states, "MAX_OPEN_BYTES", 10_000)
    with pytest.raises(LimitError, match="come to its end"):
        for ordinal in range(1000):
            state = MetricState(Topic("fit 1", ordinal), unit(ordinal), b"x")
            book.check(state)
            num_kept += book.add(state)
    assert 30 < num_kept < 40
    book.keep(lambda each: each.index == 0)
    assert not book.counts("fit 1", unit(1)) and book.counts("fit 1", unit(0))
    book.drop(Topic("fit 1", 0))
    assert not book.counts("fit 1", unit(0))
    book.check(MetricState(FIT, unit(0), bytes(10_000 - 256)))


def test_a_record_says_it_all() -> None:
    book = MetricStates()
    book.add(MetricState(FIT, unit(0), bytes(range(256))))
    book.record(Topic("evaluation 1", 2), (("loss", 0.25), ("accuracy", float("nan"))))
    again = MetricStates.from_record(book.to_record())
    assert again.page(FIT, 0, 1000) == book.page(FIT, 0, 1000)
    logs = again.logs(Topic("evaluation 1", 2))
    assert logs is not None and [name for name, _ in logs] == ["loss", "accuracy"]
