"""Units and steps: plain loops, several steps a batch, accumulation, skipped batches."""

from __future__ import annotations

import pytest

from stratagem.cluster.units import Unit, Update
from stratagem.errors import ConfigurationError
from stratagem.worker.unit_tracker import MAX_IDLE, UnitTracker

A, B, C = (Unit(1, 0, index) for index in range(3))


def test_plain_loop() -> None:
    tracker = UnitTracker()
    tracker.take(A)
    tracker.backward()
    assert tracker.step() == Update((A,), 0)
    assert tracker.stepped() == []
    assert tracker.leave() == [A]


def test_a_loop_inside_of_another_one() -> None:
    tracker = UnitTracker()
    tracker.start_epoch()
    tracker.take(A)
    with pytest.raises(ConfigurationError, match=r"starts while a batch of another one is in use.*call its close\(\)"):
        tracker.start_epoch()
    tracker.leave()
    tracker.start_epoch()


def test_two_optimizers_a_batch() -> None:
    tracker = UnitTracker()
    tracker.take(A)
    for ordinal in range(2):
        tracker.backward()
        assert tracker.step() == Update((A,), ordinal)
        tracker.stepped()
    assert tracker.leave() == [A]


def test_accumulation_spans_units() -> None:
    tracker = UnitTracker()
    for unit in (A, B):
        tracker.take(unit)
        tracker.backward()
        assert tracker.leave() == []
    tracker.take(C)
    tracker.backward()
    assert tracker.open_units == (A, B, C)
    for ordinal in range(2):  # of another optimizer, whose gradients are of all three, too
        assert tracker.step() == Update((A, B, C), ordinal)
        assert tracker.stepped() == []
    assert tracker.open_units == (A, B, C)
    assert tracker.leave() == [A, B, C] and tracker.steps_per_unit == 2
    assert not tracker.open_units


def test_a_batch_that_is_left_between_two_steps_does_not_say_how_many_a_batch_has() -> None:
    """A script that caught an error told the chief of one step a batch: halves of dead workers' passed for whole."""
    tracker = UnitTracker()
    tracker.take(A)
    tracker.backward()
    tracker.step()
    tracker.stepped()
    assert tracker.leave(is_whole=False) == [A] and tracker.steps_per_unit == 0


def test_in_step_a_slice_is_over_with_the_update_that_has_it() -> None:
    tracker = UnitTracker(in_step=True)
    tracker.take(A)
    tracker.backward()
    assert tracker.leave() == []
    tracker.take(B)
    assert tracker.step() == Update((A, B), 0)
    assert tracker.stepped() == [A]
    assert tracker.step() == Update((B,), 1) and tracker.stepped() == []
    assert tracker.leave() == [B] and tracker.steps_per_unit == 1


def test_what_accumulates_at_the_end_of_a_loop_makes_an_update() -> None:
    tracker = UnitTracker()
    for unit in (A, B):
        tracker.take(unit)
        tracker.backward()
        assert tracker.leave() == []
    assert tracker.step() == Update((A, B), 0)
    assert tracker.stepped() == []
    assert tracker.step() == Update((A, B), 1)
    assert tracker.end() == [A, B] and tracker.step().units == ()


def test_a_batch_without_backward_is_complete_at_the_end() -> None:
    tracker = UnitTracker()
    tracker.take(A)
    assert tracker.leave() == []
    tracker.take(B)
    tracker.backward()
    assert tracker.step() == Update((B,), 0)
    tracker.stepped()
    assert tracker.end() == [A, B]


def test_batches_taken_ahead_of_time() -> None:
    tracker = UnitTracker()
    for unit in (A, B):
        tracker.take(unit)
        assert tracker.leave() == []
    tracker.take(C)
    closed = []
    for unit in (A, B, C):
        closed += tracker.focus(unit)
        tracker.backward()
        assert tracker.step() == Update((unit,), 0)
        tracker.stepped()
    assert closed == [A, B]
    assert tracker.end() == [C]


def test_gradients_left_over_at_the_end_are_dropped() -> None:
    tracker = UnitTracker()
    tracker.take(A)
    tracker.backward()
    assert tracker.leave() == []
    tracker.take(B)
    tracker.backward()
    assert tracker.end() == [A, B]
    assert tracker.open_units == ()


def test_without_a_dataset_updates_have_no_unit() -> None:
    tracker = UnitTracker()
    tracker.backward()
    assert tracker.step() == Update((), 0)


def test_abandon_forgets_everything() -> None:
    tracker = UnitTracker()
    tracker.take(A)
    tracker.backward()
    tracker.leave()
    tracker.take(B)
    assert tracker.abandon() == (A, B)
    assert tracker.leave() == []
    has_returned = [tracker.has_returned]
    tracker.take(C)
    has_returned.append(tracker.has_returned)
    assert tracker.abandon() == (C,)
    assert [*has_returned, tracker.has_returned] == [True, False, False]  # no backward has reached the last one


def test_work_after_the_end_of_the_loop_has_no_unit() -> None:
    tracker = UnitTracker()
    for unit in (A, B):
        tracker.take(unit)
        tracker.leave()
    assert tracker.end() == [A, B]
    tracker.take(C)  # a unit that a lost worker gave back
    assert tracker.focus(A) == []
    tracker.backward()
    assert tracker.step() == Update((), 0)
    tracker.stepped()
    assert tracker.focus(C) == []
    assert tracker.step() == Update((C,), 0)


def test_a_step_without_a_unit_is_not_counted_for_the_next_one() -> None:
    tracker = UnitTracker()
    tracker.backward()
    tracker.step()
    tracker.stepped()
    tracker.take(A)
    assert tracker.step() == Update((A,), 0)


def test_what_was_left_long_ago_was_skipped() -> None:
    tracker = UnitTracker()
    closed = []
    for index in range(MAX_IDLE + 3):
        tracker.take(Unit(1, 0, index))
        closed += tracker.leave()
    assert closed == [Unit(1, 0, index) for index in range(3)]
