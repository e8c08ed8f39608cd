"""Finished steps reach the chief, also those of a time when it was away."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stratagem.data.placement import StepShare
from stratagem.errors import ConfigurationError, PeerUnavailableError
from stratagem.strategy.one_process import OneDeviceStrategy
from stratagem.strategy.synchronous_input import StepListener


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
