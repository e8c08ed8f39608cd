"""The step of an optimizer whose variables are on parameter servers."""

from __future__ import annotations

import copy
from typing import Any

import torch

from stratagem.strategy.ps.steps import step_by


def test_hooks_that_a_script_registers_later_come_before_the_step_too() -> None:
    """What they did to the gradient (scaling, centralising) came after it had been sent."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], 1.0)
    sent: list[float] = []

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for each in optimizer.param_groups[0]["params"]:
            each.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    step_by(optimizer, lambda: sent.append(float(parameter.grad)))  # type: ignore[arg-type]
    handles = [optimizer.register_step_pre_hook(halve) for _ in range(2)]
    for _ in range(2):
        parameter.grad = torch.ones(1)
        optimizer.step()
        handles.pop().remove()
    assert sent == [0.125, 0.25]
    assert parameter.item() == 0.0
    assert copy.deepcopy(optimizer).register_step_pre_hook(halve)
