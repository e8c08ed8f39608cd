"""What a worker says about itself while it trains, waits, and while somebody asks."""

from __future__ import annotations

import collections
import itertools
import threading

import pytest
import torch

import stratagem as sg
from stratagem.measuring import measures, process_use
from stratagem.rpc.generated import chief_pb2
from stratagem.worker import step_meter
from stratagem.worker.step_meter import StepMeter, active_meter


def test_who_is_waited_for_is_asked_when_somebody_wants_to_know() -> None:
    meter = StepMeter()
    late = ["ps:0", "ps:1"]
    with meter.exposed(lambda: f"{', '.join(late)} to apply step 7", 7):
        assert (meter.progress()["waiting_on"], meter.progress()["waiting_step"]) == ("ps:0, ps:1 to apply step 7", 7)
        late.remove("ps:0")
        with meter.exposed("rows"):
            assert (meter.progress()["waiting_on"], meter.progress()["waiting_step"]) == ("rows", 0)
        assert meter.progress()["waiting_on"] == "ps:1 to apply step 7"
        meter.peer = lambda: ("worker:1 in barrier", 4.0)
        assert (meter.progress()["waiting_on"], meter.progress()["waiting_s"]) == ("worker:1 in barrier", 4.0)
        meter.peer = lambda: None
    assert (meter.progress()["waiting_on"], meter.progress()["waiting_step"]) == ("", 0)


def test_what_a_script_reports_never_makes_a_heartbeat_too_long() -> None:
    meter = StepMeter()
    meter.metrics.update({f"layer{number}/norm_of_the_gradient": 1.0 for number in range(3000)})
    progress = chief_pb2.Progress(**meter.progress())
    assert (
        16 << 10 < progress.ByteSize() <= step_meter.MAX_REPORTED_BYTES + 100
        and "layer0/norm_of_the_gradient" in progress.metrics
    )
    assert len(meter.report()["metrics"]) == 3000


def test_a_wait_inside_a_wait_counts_once() -> None:
    meter = StepMeter()
    meter.start_clock()
    with meter.exposed("the epoch"):
        for _ in range(3):
            with meter.exposed("weights"):
                threading.Event().wait(0.02)
    meter.step_done(1)
    report = meter.report()
    assert 0.06 <= report["exposed_communication_s"] <= report["step_time_s"]


def test_the_wait_for_a_peer_that_goes_on_counts_as_its_phase_does() -> None:
    meter, name = StepMeter(), measures.labelled(measures.PEER_WAIT, "ps:0")
    meter.start_clock()
    with meter.exposed("weights", peer="ps:0"):
        threading.Event().wait(0.02)
        during = meter.values()
    after = meter.values()
    assert during[name] == during[measures.WAIT] >= 0.02
    assert during[name] <= after[name] == after[measures.WAIT]


def test_training_does_not_wait_while_somebody_reads_a_loss_that_takes_long() -> None:
    meter = StepMeter()
    asked, told = threading.Event(), threading.Event()

    class Slow(torch.Tensor):
        """As on a GPU that is busy."""

        def __float__(self) -> float:
            asked.set()
            assert told.wait(60)
            return 0.5

    meter.newest_loss = torch.zeros(()).as_subclass(Slow)
    said: list[float] = []
    readers = [
        threading.Thread(target=lambda: said.append(meter.progress()["loss"])),
        threading.Thread(target=lambda: said.append(meter.report()["loss"])),
    ]
    for reader in readers:
        reader.start()
    assert asked.wait(60)
    done = threading.Thread(target=meter.step_done, args=(4,))
    done.start()
    done.join(60)
    assert not done.is_alive() and not said
    told.set()
    for reader in readers:
        reader.join(60)
    assert said == [0.5, 0.5] and meter.progress()["examples"] == 4


def test_without_reduce_mean_the_loss_is_the_one_that_was_reported() -> None:
    """`fit` reports it. `status`, the page's curve, Prometheus and the summary had none of such a job."""
    meter = StepMeter()
    assert meter.report()["loss"] is None and not meter.progress()["has_loss"]
    meter.metrics["loss"] = 0.25
    assert meter.report()["loss"] == 0.25 and meter.progress()["loss"] == 0.25 and meter.progress()["has_loss"]
    meter.newest_loss = torch.tensor(0.5)
    assert meter.report()["loss"] == 0.5


class Clock:
    """Nanoseconds of a machine where time passes when it is told to."""

    def __init__(self) -> None:
        self.now = self.ran = self.num_asked = 0

    def perf_counter_ns(self) -> int:
        return self.now

    def thread_time_ns(self) -> int:
        self.num_asked += 1
        return self.ran

    def works(self, took: int, ran: int) -> None:
        self.now, self.ran = self.now + took, self.ran + ran


def test_the_phases_of_computing_follow_one_another_and_nothing_is_counted_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(step_meter, "_now", clock.perf_counter_ns)
    meter = StepMeter()
    meter.start_clock()
    meter.got_data()
    with meter.exposed("rows", phase=measures.ROWS_WAIT):
        meter.computes(measures.BACKWARD)  # a hook of another thread: what waits goes on waiting
        clock.works(1_000_000, 0)
    told = [measures.FORWARD]
    for phase, after in (
        (measures.BACKWARD, ""),
        (measures.FORWARD, measures.BACKWARD),
        (measures.SCRIPT, measures.OPTIMIZER),  # no optimizer has begun: a scaler skipped its step
        (measures.OPTIMIZER, ""),
        (measures.SCRIPT, measures.OPTIMIZER),
        (measures.FORWARD, measures.BACKWARD),
    ):
        meter.computes(phase, after)
        clock.works(1_000_000, 0)
        told.append(phase_of(meter))
    expected = ("forward", "backward", "forward", "forward", "optimizer", "script", "script")
    assert told == [f"{one}_s" for one in expected]
    meter.step_done(1)
    assert phase_of(meter) == measures.FORWARD  # of a step without a batch of ours
    meter.wants_data()
    values = meter.values()
    expected_s = {**collections.Counter(told[1:]), measures.ROWS_WAIT: 1}
    assert {p: round(1e3 * values[p]) for p in measures.PHASES if values.get(p)} == expected_s


@pytest.mark.parametrize(
    ("num_loops", "num_steps", "step_ns"), [(1, 1000, 2_000_000), (1, 6, 400_000_000), (300, 3, 2_000_000)]
)
def test_the_cpu_time_of_many_short_steps_is_that_of_a_few(
    num_loops: int, num_steps: int, step_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(step_meter, "time", clock)
    monkeypatch.setattr(step_meter, "_now", clock.perf_counter_ns)
    meter = StepMeter()
    for _ in range(num_loops):
        clock.works(1_000_000, 0)
        meter.start_clock()
        for _ in range(num_steps):
            clock.works(step_ns // 4, step_ns // 8)
            meter.got_data()
            clock.works(step_ns, step_ns // 2)
            meter.step_done(1)
            meter.wants_data()
        meter.stop_clock()
    values, all_steps = meter.values(), num_loops * num_steps
    assert values[measures.STEP_CPU] == pytest.approx(all_steps * step_ns / 2e9, rel=0.08)
    assert values[measures.DATA_CPU] == pytest.approx(all_steps * step_ns / 8e9, rel=0.08)
    assert clock.num_asked <= min(3 * all_steps + 1, 100)


def test_without_a_core_is_what_the_training_thread_is_in_its_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had lacked until then, importing torch, was set against its first steps: of a worker that waited for
    data `stratagem why` said that it gets no core 100 % of the time, and that nothing is to be gained."""
    waited_s = 7
    monkeypatch.setattr(process_use, "_books", lambda task: (0, waited_s * 10**9))
    meter = StepMeter()
    told = [meter.values()[measures.STARVED_MAIN]]
    for change in (meter.start_clock, None, meter.stop_clock, None, meter.start_clock, meter.start_clock, None):
        if change is None:
            waited_s += 2
        else:
            change()
        told.append(meter.values()[measures.STARVED_MAIN])
    assert told == [0, 0, 2, 2, 2, 2, 2, 4]


def test_what_one_thread_notes_while_another_counts_takes_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(step_meter, "_now", clock.perf_counter_ns)
    meter = StepMeter()
    meter.start_clock()
    counted = []
    for phase, now in (("", 3_000), (measures.BACKWARD, 2_000), ("", 5_000), (measures.OPTIMIZER, 4_500), ("", 9_000)):
        clock.now = now
        if phase:
            meter.computes(phase)
        else:
            meter.got_data()
            counted.append(meter.values())
    for before, after in itertools.pairwise(counted):
        assert all(after[name] >= value for name, value in before.items())
    assert sum(counted[-1].get(phase, 0.0) for phase in measures.PHASES) == pytest.approx(9e-6)


def test_what_nobody_asks_for_is_counted_all_the_same() -> None:
    meter = StepMeter()
    for _ in range(10 * step_meter.MAX_NOTED):
        meter.computes(measures.BACKWARD)
        with meter.within(measures.SAVE):
            assert len(meter._noted) <= step_meter.MAX_NOTED + 1
    with meter._lock:  # as a destructor finds it that runs while its thread counts: it must not wait for itself
        meter.computes(measures.BACKWARD)


def test_a_backward_that_fails_does_not_take_the_time_of_the_next_step() -> None:
    strategy = sg.OneDeviceStrategy()
    meter = active_meter()
    assert meter is not None
    model = torch.nn.Linear(1, 1)
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def fails(_: torch.Tensor) -> None:
        raise ValueError("no gradient")

    x = torch.ones(1, 1, requires_grad=True)
    x.register_hook(fails)
    meter.start_clock()
    meter.got_data()
    with pytest.raises(ValueError, match="no gradient"):
        (model(x) * 2).sum().backward()
    optimizer.step()
    assert phase_of(meter) in (measures.FORWARD, measures.SCRIPT)
    strategy.run(lambda: model(torch.ones(1, 1)).sum().backward())
    assert phase_of(meter) == measures.FORWARD


def phase_of(meter: StepMeter) -> str:
    meter.values()  # counts what was noted
    return meter._phase


def test_steps_that_a_newcomer_takes_over_took_it_no_time() -> None:
    """`stratagem why` divided its time by them: worker:0 computed "31.6 x slower" than a newcomer."""
    meter = StepMeter()
    meter.start_clock()
    meter.take_over(400)
    meter.got_data()
    meter.step_done(8)
    assert meter.progress()["step"] == 401 and meter.values()[measures.STEPS] == 1
