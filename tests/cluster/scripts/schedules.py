"""Trains over batches of which the last one is too small for every worker; all schedulers have gone through each."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg

strategy = sg.ParameterServerStrategy(staleness=0)
with strategy.scope():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler)
data = strategy.distribute_dataset(DataLoader(TensorDataset(torch.ones(37, 3)), batch_size=6))


def step(batch: list[torch.Tensor]) -> None:
    optimizer.zero_grad()
    model(batch[0]).mean().backward()
    optimizer.step()
    scheduler.step()


for epoch in range(1, 4):
    for batch in data:
        strategy.run(step, args=(batch,))
    assert scheduler.last_epoch == 7 * epoch, (epoch, scheduler.last_epoch)
