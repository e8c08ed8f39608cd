"""Steps that are given batches of two datasets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg


def _trained(strategy: sg.Strategy, sizes: tuple[int, int], weights: bool = False, **loading: Any) -> torch.Tensor:
    """The weight after a pass over two datasets at once, in batches of 8 and 4."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    loaders = [
        DataLoader(TensorDataset(torch.arange(1.0, num + 1)[:, None]), batch_size=size, **loading)
        for num, size in zip(sizes, (8, 4), strict=True)
    ]

    def step(first: Any, second: Any) -> None:
        optimizer.zero_grad()
        for (batch,) in (first, second):
            if weights:
                strategy.set_weight(len(batch))
            model(batch).square().mean().backward()
        optimizer.step()

    for pair in zip(*map(strategy.distribute_dataset, loaders), strict=True):
        strategy.run(step, args=pair)
    weight: torch.Tensor = model.weight.detach().clone()
    return weight


@pytest.mark.parametrize("weights", [False, True])
def test_batches_whose_shares_are_unlike(weights: bool) -> None:
    mirrored, one = sg.MirroredStrategy(["cpu:0", "cpu:1"]), sg.OneDeviceStrategy("cpu")
    assert torch.allclose(_trained(mirrored, (16, 8), weights), _trained(one, (16, 8), weights))
    if weights:
        assert torch.allclose(_trained(mirrored, (11, 8), weights), _trained(one, (11, 8), weights))
        return
    with pytest.raises(sg.ConfigurationError, match=r"several datasets, and a replica's share differs .*set_weight"):
        _trained(mirrored, (11, 8))
    assert torch.allclose(_trained(mirrored, (11, 4), drop_last=True), _trained(one, (11, 4), drop_last=True))


def test_a_batch_that_is_a_dataclass_with_slots() -> None:
    @dataclasses.dataclass(slots=True)
    class Batch:
        x: torch.Tensor

    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    for batch in strategy.distribute_dataset([Batch(torch.arange(3.0))]):
        mean = strategy.reduce_mean(strategy.run(lambda part: part.x.mean(), args=(batch,)))
        assert mean.item() == 1.0, "not weighted by the shares of 2 and 1"
    strategy.close()


def test_the_mean_of_results_of_batches_whose_shares_are_unlike() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])

    def means(first: torch.Tensor, second: torch.Tensor, weighs: bool) -> float:
        def step(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            if weighs:
                strategy.set_weight(len(one))
            return one.mean()

        datasets = [strategy.distribute_dataset([batch]) for batch in (first, second)]
        (pair,) = zip(*datasets, strict=True)
        mean: float = strategy.reduce_mean(strategy.run(step, args=pair)).item()
        return mean

    assert means(torch.arange(4.0), torch.arange(2.0), False) == 1.5
    assert means(torch.arange(3.0), torch.arange(2.0), True) == 1.0
    with pytest.raises(sg.ConfigurationError, match=r"of which a replica's share differs.*set_weight\(n\)"):
        means(torch.arange(3.0), torch.arange(2.0), False)
    strategy.close()
