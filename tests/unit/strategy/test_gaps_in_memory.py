"""Parameters with gaps in their memory, which a copy of them elsewhere does not have."""

from __future__ import annotations

import torch

import stratagem as sg


class Strided(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.arange(8.0)[::2])
        self.table = torch.nn.Parameter(torch.randn(400, 120).t()[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).sum() + (self.table * x.sum()).square().mean()


def test_replicas_train_them_as_one_device_does() -> None:
    """Refused: "expected the same trainable parameters on every rank"."""

    def trained(strategy: sg.Strategy) -> list[torch.Tensor]:
        torch.manual_seed(0)
        own = Strided()
        model, optimizer = strategy.prepare(own, torch.optim.SGD(own.parameters(), 0.1))

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(4)).backward()
            optimizer.step()

        try:
            for _ in range(4):
                strategy.run(step)
        finally:
            strategy.close()
        return [parameter.detach() for parameter in own.parameters()]

    torch.testing.assert_close(trained(sg.MirroredStrategy(["cpu:0", "cpu:1"])), trained(sg.OneDeviceStrategy("cpu")))
