"""Averages of weights that the step takes, on replicas of which one has no example of the last batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg


def averaged(strategy: sg.Strategy, fn: Any) -> tuple[int, torch.Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(9, 4)
    with strategy.scope():
        model: Any = torch.nn.Linear(4, 1)
        average: Any = AveragedModel(model, multi_avg_fn=fn)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, average = strategy.prepare(model, optimizer, average)

    def step(batch: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        model(batch[0]).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)

    for batch in strategy.distribute_dataset(DataLoader(TensorDataset(inputs), batch_size=4)):
        strategy.run(step, args=(batch,))
    found = int(average.n_averaged), torch.cat([each.detach().flatten() for each in average.module.parameters()])
    strategy.close()
    return found


@pytest.mark.parametrize("fn", [None, get_ema_multi_avg_fn(0.9)], ids=["mean", "exponential"])
def test_an_average_counts_a_step_of_which_a_replica_has_no_share(fn: Any) -> None:
    """Its counter was put back there: the replicas parted, and whoever read the message looked in vain."""
    count, weights = averaged(sg.MirroredStrategy(["cpu:0", "cpu:1"]), fn)
    expected_count, expected = averaged(sg.OneDeviceStrategy("cpu"), fn)
    assert count == expected_count == 3
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)
