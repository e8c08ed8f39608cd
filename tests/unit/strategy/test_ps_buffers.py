"""Buffers that begin anew in a worker that starts again are told of, once."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from stratagem.strategy.ps.buffers import LostBuffers
from tests.unit.strategy.test_ps_schedules import Chief


class Bank(nn.Module):
    """Remembers what it saw; the rest nobody changes, or no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.bank: torch.Tensor
        self.register_buffer("bank", torch.ones(2, 4))
        self.register_buffer("positions", torch.arange(4.0))
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.register_buffer("turned", torch.zeros(1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            cast(torch.Tensor, self.seen).add_(1)
            self.bank = torch.cat([self.bank[1:], x[:1]])
        return x * cast(torch.Tensor, self.positions) + self.bank.sum()


def norms(pretrained: bool) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False))
    if pretrained:
        made(torch.randn(8, 4))
    return made


def bank(pretrained: bool) -> nn.Module:
    return Bank()


class Range(nn.Module):
    """Observes the range of what it sees, as quantization does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.tensor(torch.inf))
        self.register_buffer("most", torch.tensor(-torch.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            for buffer, seen in zip(self.buffers(), x.aminmax(), strict=True):
                buffer.copy_(seen)
        return x


def observed(pretrained: bool) -> nn.Module:
    return Range()


@pytest.mark.parametrize(
    ("make", "pretrained", "named"),
    [
        (norms, False, "1.running_mean, 1.running_var, 1.num_batches_tracked"),
        (norms, True, "1.running_mean, 1.running_var, 1.num_batches_tracked"),
        (bank, False, "bank"),
        (observed, False, "least, most"),
    ],
)
def test_a_worker_that_starts_again_says_which_are_those_of_before(
    caplog: pytest.LogCaptureFixture, make: Any, pretrained: bool, named: str
) -> None:
    chief = cast(Any, Chief())

    def train(model: nn.Module, task: str) -> None:
        before = LostBuffers(model, chief, task, 2)
        before(0)
        model.eval()(torch.randn(8, 4))  # it evaluates first
        model.train()
        for _ in range(3):
            before(0)
            model(torch.randn(8, 4))

    first, other, restored, again = (make(pretrained) for _ in range(4))
    for model, task in ((first, "worker:0"), (other, "worker:1")):
        train(model, task)
    restored.load_state_dict(first.state_dict())
    train(restored, "worker:0")
    assert not caplog.text
    train(again, "worker:0")
    assert caplog.text.count(f"buffers begin anew ({named})") == 1 and "sg.CheckpointManager" in caplog.text


def test_what_training_leaves_as_it_is_has_nothing_to_lose(caplog: pytest.LogCaptureFixture) -> None:
    chief = Chief()
    for model in (nn.Linear(4, 3), norms(False).eval(), Bank().eval()):
        for _ in range(2):
            before = LostBuffers(model, cast(Any, chief), "worker:0", 0)
            for _ in range(110):
                before(0)
                model(torch.randn(8, 4))
                for buffer in model.buffers():
                    buffer.copy_(buffer.clone())  # as where a share was empty
    assert not caplog.text and not chief.said
