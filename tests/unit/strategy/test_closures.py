"""Optimizers that ask a closure for the loss, on replicas with batches of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg


def trained(strategy: sg.Strategy, line_search: str | None, weighted: bool) -> tuple[list[float], torch.Tensor]:
    torch.manual_seed(0)
    inputs, labels = torch.randn(30, 6, dtype=torch.float64), torch.randint(3, (30,))
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn=line_search)
    model, optimizer = strategy.prepare(model, optimizer)

    def step(batch: Any) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            if weighted and len(batch[1]):
                strategy.set_weight(float(len(batch[1])))
            loss = functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        loss: torch.Tensor = optimizer.step(closure) if line_search else optimizer.step(closure=closure)
        return loss

    loader = DataLoader(TensorDataset(inputs, labels), batch_size=13)
    losses = [strategy.reduce_mean(strategy.run(step, args=(batch,))) for batch in strategy.distribute_dataset(loader)]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    strategy.close()
    return [float(loss) for loss in losses], weights


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("weighted", [False, True], ids=["shares", "set_weight"])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_goes_by_the_loss_of_the_global_batch(line_search: str | None, weighted: bool, num_replicas: int) -> None:
    losses, weights = trained(sg.OneDeviceStrategy(), line_search, weighted)
    found, its = trained(sg.MirroredStrategy([f"cpu:{n}" for n in range(num_replicas)]), line_search, weighted)
    assert found == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(its, weights)


@pytest.mark.parametrize("as_keyword", [False, True])
@pytest.mark.parametrize("devices", [["cpu"], ["cpu:0", "cpu:1"]])
def test_gradients_of_a_closure_are_clipped_and_looked_at(devices: list[str], as_keyword: bool) -> None:
    strategy = sg.MirroredStrategy(devices) if len(devices) > 1 else sg.OneDeviceStrategy()
    with strategy.scope():
        plain, skips = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (plain, skips)]
    start = [parameter.detach().clone() for model in (plain, skips) for parameter in model.parameters()]
    plain, raising = strategy.prepare(plain, optimizers[0], clip_norm=0.01)
    skips, skipping = strategy.prepare(skips, optimizers[1], nan="skip")

    def step(model: torch.nn.Module, optimizer: Any, factor: float) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(torch.ones(4, 2)) * factor).sum()
            loss.backward()
            return loss

        optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)

    strategy.run(step, args=(plain, raising, 1e3))
    now = [parameter.detach() for model in (plain, skips) for parameter in model.parameters()]
    moved = torch.cat([(new - old).flatten() for new, old in zip(now[:2], start[:2], strict=True)])
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)
    with pytest.raises(sg.NonFiniteGradientError):
        strategy.run(step, args=(plain, raising, float("nan")))
    strategy.run(step, args=(skips, skipping, float("inf")))
    torch.testing.assert_close(now[2:], start[2:], rtol=0, atol=0)
    strategy.close()
