"""The flight recorder: the last happenings always, every span while somebody traces."""

from __future__ import annotations

import threading

import pytest
import torch

from stratagem.cluster.units import Unit, Update
from stratagem.measuring import flight, measures
from stratagem.measuring.flight import FLIGHT, FlightRecorder, RunningTotals, TorchProfile
from stratagem.worker.step_meter import StepMeter


def test_the_last_512_happenings_are_kept_and_what_goes_on_says_so() -> None:
    recorder = FlightRecorder()
    for ordinal in range(600):
        with recorder.happening("push", Update((Unit(1, 0, ordinal),), 0)):
            pass
    with recorder.happening("", "step 3, collective 9 (barrier)"):
        lines = recorder.lines()
    assert len(lines) == flight.NUM_KEPT == 512
    assert lines[0].endswith("push update 0 of unit 1/0/89") and "took" in lines[0]
    assert "in progress: step 3, collective 9 (barrier)" in lines[-1]
    assert len(recorder.lines(8)) == 8


def test_what_fails_says_by_what() -> None:
    recorder = FlightRecorder()
    with pytest.raises(KeyError), recorder.happening("push", "update 0"):
        raise KeyError
    assert recorder.lines()[0].endswith("KeyError in push update 0")


def test_torchs_profiler_ends_with_the_step_also_where_that_is_longer_than_the_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It recorded on and on, in memory, to the end of the job; and the next trace began a second one inside."""
    monkeypatch.setattr(flight, "WAIT_S", 0.01)
    recorder, first = FlightRecorder(), TorchProfile()

    def step_begins() -> None:
        if recorder.torch is not None:
            recorder.torch.at_step()

    recorder.start_trace(first)
    step_begins()
    torch.ones(3).add(1)
    assert recorder.stop_trace().operators == []
    recorder.start_trace(TorchProfile())
    assert recorder.torch is first
    step_begins()
    assert recorder.stop_trace().operators == [], "they are of another trace"
    assert first.has_stopped
    recorder.start_trace(TorchProfile())
    assert recorder.torch is not first
    recorder.stop_trace()


def test_a_trace_adds_up_to_what_the_counters_say() -> None:
    meter, totals = StepMeter(), RunningTotals()
    FLIGHT.values = lambda: {**meter.values(), **totals.values()}
    try:
        meter.start_clock()
        FLIGHT.start_trace()
        FLIGHT.start_trace()  # somebody asks for the clock once more: nothing is forgotten
        for _ in range(5):
            meter.got_data()
            with meter.exposed("ps:0", 0, measures.PUSH), meter.within(measures.WAIT, "ps:0"):
                threading.Event().wait(0.002)
            with totals.timed(measures.APPLY):
                threading.Event().wait(0.001)
            meter.step_done(1)
            meter.wants_data()
        traced = FLIGHT.stop_trace()
    finally:
        FLIGHT.values = dict
    sums: dict[str, float] = {}
    for span in traced.spans:
        sums[span.name] = sums.get(span.name, 0.0) + (span.end_ns - span.start_ns) / 1e9
    for name in (measures.WAIT, measures.PUSH, measures.FORWARD, measures.DATA_WAIT, measures.APPLY):
        assert sums[name] == pytest.approx(traced.spent[name], rel=0.02, abs=2e-5), name
    assert traced.num_dropped == 0 and not FLIGHT.traces


def test_a_trace_that_nobody_ends_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "MAX_SPANS", 3)
    recorder = FlightRecorder()
    recorder.start_trace()
    for _ in range(5):
        recorder.span("wait_s", 0, 1)
    traced = recorder.stop_trace()
    assert (len(traced.spans), traced.num_dropped) == (3, 2)


def test_a_trace_leaves_the_scripts_own_profiler_alone(caplog: pytest.LogCaptureFixture) -> None:
    """That ended with no operators at all, without a word."""
    trace = TorchProfile()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        trace.at_step()
        torch.ones(3).add(1)
        trace._is_over.set()
        trace.at_step()
    assert trace.end() == ([], 0) and "the script's own torch.profiler" in caplog.text
    assert "aten::add" in {event.name for event in own.events()}
