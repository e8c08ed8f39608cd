"""Gradients that a script changes between two steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import stratagem as sg


@pytest.mark.parametrize("change", ["write", "replace"])
@pytest.mark.parametrize("build", [sg.MirroredStrategy, sg.CentralStorageStrategy])
def test_all_replicas_go_on_with_them(build: Callable[[list[str]], sg.Strategy], change: str) -> None:
    def trained(strategy: sg.Strategy) -> torch.Tensor:
        torch.manual_seed(0)
        own = torch.nn.Linear(4, 1, bias=False).double()
        model, optimizer = strategy.prepare(own, torch.optim.SGD(own.parameters(), 0.1))

        def step(batch: torch.Tensor) -> None:
            (model(batch) - 1).square().mean().backward()
            optimizer.step()

        try:
            for batch in strategy.distribute_dataset([torch.randn(4, 4).double() for _ in range(4)]):
                strategy.run(step, args=(batch,))
                assert own.weight.grad is not None
                if change == "write":
                    own.weight.grad.mul_(0.5)
                else:
                    own.weight.grad = own.weight.grad * 0.5
        finally:
            strategy.close()
        return own.weight.detach()

    torch.testing.assert_close(trained(build(["cpu:0", "cpu:1"])), trained(sg.OneDeviceStrategy("cpu")))
