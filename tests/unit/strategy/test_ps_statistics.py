"""Running statistics that begin anew in a worker that starts again are told of, once."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from stratagem.strategy.ps.statistics import warn_of_lost_statistics
from tests.unit.strategy.test_ps_schedules import Chief

SAID = "the running statistics of 1 begin anew"


def net(pretrained: bool = False) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False))
    if pretrained:
        made(torch.randn(8, 4))
    return made


@pytest.mark.parametrize("pretrained", [False, True])
def test_a_worker_that_starts_again_says_that_its_statistics_are_those_of_before(
    caplog: pytest.LogCaptureFixture, pretrained: bool
) -> None:
    chief = cast(Any, Chief())
    first, other = net(pretrained), net(pretrained)
    for model, task in ((first, "worker:0"), (other, "worker:1")):
        begin = warn_of_lost_statistics(model, chief, task, 2)
        for _ in range(3):
            begin(0)
            model(torch.randn(8, 4))
    restored = net(pretrained)
    begin = warn_of_lost_statistics(restored, chief, "worker:0", 2)
    restored.load_state_dict(first.state_dict())
    begin(0)
    assert not caplog.text
    again = net(pretrained).eval()
    begin = warn_of_lost_statistics(again, chief, "worker:0", 2)
    begin(0)  # it evaluates first
    assert not caplog.text
    again.train()
    for _ in range(2):
        begin(0)
    assert caplog.text.count(SAID) == 1 and "sg.CheckpointManager" in caplog.text


def test_layers_that_do_not_count_have_nothing_to_lose(caplog: pytest.LogCaptureFixture) -> None:
    chief = Chief()
    for model in (nn.Linear(4, 3), net().eval()):
        for _ in range(2):
            warn_of_lost_statistics(model, cast(Any, chief), "worker:0", 0)(0)
    assert not caplog.text and not chief.said
