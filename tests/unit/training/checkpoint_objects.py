"""What a training script would save, small."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stratagem.training.saving.checkpoint import Checkpoint


class Script:
    """A model with BatchNorm and dropout, Adam, a schedule and a counter, deterministic by its seed."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 3])
        self.checkpoint = Checkpoint(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, epoch=0, **options
        )

    def train(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            loss: torch.Tensor = self.model(torch.randn(5, 4)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of the weights and buffers."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two states have the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
