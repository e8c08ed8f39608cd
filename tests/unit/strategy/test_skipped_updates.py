"""Updates that are skipped beside what a strategy remembers from step to step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import stratagem as sg
from stratagem import arguments


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


@pytest.mark.parametrize(
    "build", [sg.get_strategy, lambda: sg.OneDeviceStrategy("cpu"), lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"])]
)
def test_a_skipped_update_tells_of_nan_in_buffers(
    build: Callable[[], sg.Strategy], caplog: pytest.LogCaptureFixture
) -> None:
    """Of the replica that has it; a mask with -inf is none."""
    arguments.warn_once.cache_clear()
    strategy = build()
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    model.register_buffer("mask", torch.full((2,), -torch.inf))
    prepared, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1), nan="skip")

    def step(inputs: torch.Tensor, factor: float) -> None:
        optimizer.zero_grad()
        (prepared(inputs).sum() * factor).backward()
        optimizer.step()

    clean = torch.ones(4, 2)
    for inputs, factor, is_told in ((clean, torch.nan, False), (clean * torch.nan, 1.0, True), (clean, 1.0, True)):
        replicas = [clean] * (len(strategy.local_devices) - 1) + [inputs]
        strategy.run(step, args=(sg.PerReplica(tuple(replicas)), factor))
        assert ("NaN in 0.running_mean, 0.running_var, which" in caplog.text) == is_told
    assert caplog.text.count("NaN in") == 1
    assert caplog.text.count("skipped an update with") == (2 if strategy.places_models else 0)
