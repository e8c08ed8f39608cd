"""Updates that are skipped beside what a strategy remembers from step to step."""

from __future__ import annotations

import pytest
import torch

import stratagem as sg


@pytest.mark.parametrize("compression", ["int8", "powersgd", "topk"])
def test_a_skipped_update_owes_nothing_to_the_next(compression: str) -> None:
    strategy = sg.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], compression=compression)
    with strategy.scope():
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = strategy.prepare(model, optimizer, nan="skip")

    def step(factor: float) -> None:
        optimizer.zero_grad()
        (model(torch.ones(4, 8)) * factor).sum().backward()
        optimizer.step()

    def moved(factor: float) -> bool:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        strategy.run(step, args=(factor,))
        return not all(map(torch.equal, before, model.parameters()))

    assert [moved(factor) for factor in (1.0, float("inf"), 1.0, 1.0)] == [True, False, True, True]
    strategy.close()
