"""Finished steps reach the chief, also those of a time when it was away."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from stratagem.data.placement import StepShare
from stratagem.errors import ConfigurationError, PeerUnavailableError
from stratagem.measuring import measures
from stratagem.strategy.one_process import OneDeviceStrategy
from stratagem.strategy.synchronous_input import StepListener
from stratagem.worker.step_meter import active_meter


class Books:
    """Who is told, and away as long as ``error`` is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.heard: dict[int, list[int]] = {}
        self.num_asked = 0

    def __call__(self, epoch: int, steps: Sequence[int]) -> None:
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        self.heard.setdefault(epoch, []).extend(steps)


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture
def listener(books: Books) -> StepListener:
    listener = StepListener(OneDeviceStrategy(), 1)
    listener.report = books
    return listener


def train(listener: StepListener, epoch: int, steps: Sequence[int], complete: bool = True) -> None:
    listener.start_epoch(epoch)
    for step in steps:
        listener.done(StepShare(epoch, step, (4,), 4))
    listener.end_epoch(complete)


def test_what_could_not_be_told_is_told_later(listener: StepListener, books: Books) -> None:
    books.error = PeerUnavailableError("away")
    train(listener, 0, range(5))
    train(listener, 1, range(3))
    assert not books.heard
    books.error = None
    train(listener, 2, range(2))
    assert books.heard == {0: [0, 1, 2, 3, 4], 1: [0, 1, 2], 2: [0, 1]}


def test_what_nobody_wants_is_not_told_again(listener: StepListener, books: Books) -> None:
    books.error = ConfigurationError("no such dataset")
    train(listener, 0, range(5))
    books.error = None
    train(listener, 1, range(1))
    assert books.heard == {1: [0]}


def test_while_nobody_hears_it_is_not_asked_at_every_step(listener: StepListener, books: Books) -> None:
    books.error = PeerUnavailableError("away")
    train(listener, 0, range(1000), complete=False)
    assert books.num_asked <= 2, "the first step, and the end"


@pytest.mark.parametrize("trains_last", [True, False])
def test_the_step_after_which_a_script_leaves_its_loop_counts(trains_last: bool) -> None:
    """A loop that ended by `break`, or at `max_steps` of an Estimator, had a step less than it made."""
    strategy = OneDeviceStrategy()
    model, optimizer = strategy.prepare(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), 0.1))
    inputs = torch.utils.data.TensorDataset(torch.ones(20, 1))
    dataset = strategy.distribute_dataset(torch.utils.data.DataLoader(inputs, batch_size=4))

    def step(batch: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        model(batch[0]).mean().backward()
        optimizer.step()

    for _ in range(2):
        for number, batch in enumerate(dataset):
            if number < 2 or trains_last:
                strategy.run(step, args=(batch,))
            if number == 2:
                break
    meter = active_meter()
    assert meter is not None
    made = 6 if trains_last else 4
    assert (meter.steps, meter.examples, meter.values()[measures.STEPS]) == (made, 4 * made, made)
