"""What is particular to replicas that compute with one copy of the variables."""

from __future__ import annotations

import pytest
import torch

import stratagem as sg


@pytest.mark.parametrize("sparse", [False, True])
def test_a_second_step_has_the_clipped_gradient(sparse: bool) -> None:
    """It was refused: only the first replica's gradient had been clipped."""

    def trained(strategy: sg.Strategy) -> torch.Tensor:
        torch.manual_seed(0)
        own = torch.nn.Embedding(4, 2, sparse=sparse)
        model, optimizer = strategy.prepare(own, torch.optim.SGD(own.parameters(), 0.1), clip_norm=0.01)

        def step(batch: torch.Tensor) -> None:
            model(batch).square().sum(1).mean().backward()
            optimizer.step()
            optimizer.step()

        try:
            for batch in strategy.distribute_dataset([torch.arange(4)] * 2):
                strategy.run(step, args=(batch,))
        finally:
            strategy.close()
        return own.weight.detach()

    central = sg.CentralStorageStrategy(["cpu:0", "cpu:1"])
    torch.testing.assert_close(trained(central), trained(sg.OneDeviceStrategy("cpu")))
