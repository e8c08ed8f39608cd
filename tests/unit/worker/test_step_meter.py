"""What a worker says about itself while it trains, waits, and while somebody asks."""

from __future__ import annotations

import threading

import torch

from stratagem.worker.step_meter import StepMeter


def test_who_is_waited_for_is_asked_when_somebody_wants_to_know() -> None:
    meter = StepMeter()
    late = ["ps:0", "ps:1"]
    with meter.exposed(lambda: f"{', '.join(late)} to apply step 7", 7):
        assert (meter.progress().waiting_on, meter.progress().waiting_step) == ("ps:0, ps:1 to apply step 7", 7)
        late.remove("ps:0")
        with meter.exposed("rows"):
            assert (meter.progress().waiting_on, meter.progress().waiting_step) == ("rows", 0)
        assert meter.progress().waiting_on == "ps:1 to apply step 7"
        meter.peer = lambda: ("worker:1 in barrier", 4.0)
        assert (meter.progress().waiting_on, meter.progress().waiting_s) == ("worker:1 in barrier", 4.0)
        meter.peer = lambda: None
    assert (meter.progress().waiting_on, meter.progress().waiting_step) == ("", 0)


def test_a_wait_inside_a_wait_counts_once() -> None:
    meter = StepMeter()
    meter.start_clock()
    with meter.exposed("the epoch"):
        for _ in range(3):
            with meter.exposed("weights"):
                threading.Event().wait(0.02)
    meter.step_done(1)
    assert 0.06 <= meter.total_exposed_s <= meter.total_s


def test_training_does_not_wait_while_somebody_reads_a_loss_that_takes_long() -> None:
    meter = StepMeter()
    asked, told = threading.Event(), threading.Event()

    class Slow(torch.Tensor):
        """As on a GPU that is busy."""

        def __float__(self) -> float:
            asked.set()
            assert told.wait(10)
            return 0.5

    meter.newest_loss = torch.zeros(()).as_subclass(Slow)
    said: list[float] = []
    readers = [
        threading.Thread(target=lambda: said.append(meter.progress().loss)),
        threading.Thread(target=lambda: said.append(meter.report()["loss"])),
    ]
    for reader in readers:
        reader.start()
    assert asked.wait(10)
    done = threading.Thread(target=meter.step_done, args=(4,))
    done.start()
    done.join(10)
    assert not done.is_alive() and not said
    told.set()
    for reader in readers:
        reader.join(10)
    assert said == [0.5, 0.5] and meter.progress().examples == 4
