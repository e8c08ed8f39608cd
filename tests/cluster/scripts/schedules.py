"""Trains over batches of which the last one is too small for every worker, and over a part of others, which are read
ahead; all schedulers have gone through each."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg

strategy = sg.ParameterServerStrategy(staleness=0)
with strategy.scope():
    table, model = sg.nn.Embedding(4, 3), torch.nn.Linear(3, 1)
    lazy = torch.optim.SparseAdam(table.parameters(), 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    untrained = torch.nn.Linear(2, 1)
    strategy.prepare(untrained, torch.optim.SGD(untrained.parameters(), 0.1))
    table, model, lazy, optimizer, scheduler = strategy.prepare(table, model, lazy, optimizer, scheduler)
data = strategy.distribute_dataset(DataLoader(TensorDataset(torch.ones(37, 3)), batch_size=6))
long = strategy.distribute_dataset(DataLoader(TensorDataset(torch.ones(60, 3)), batch_size=6, num_workers=2))


def step(batch: list[torch.Tensor]) -> None:
    optimizer.zero_grad()
    lazy.zero_grad()
    model(batch[0] + table(torch.tensor([1]))).mean().backward()
    lazy.step()
    optimizer.step()
    scheduler.step()


for epoch in range(1, 4):
    for batch in data:
        strategy.run(step, args=(batch,))
    assert scheduler.last_epoch == 7 * epoch, (epoch, scheduler.last_epoch)

for epoch in range(1, 4):
    for number, batch in enumerate(long, 1):
        strategy.run(step, args=(batch,))
        if number == 3:
            break  # what was leased by then goes back, and these steps are never made
    assert scheduler.last_epoch == 21 + 3 * epoch, (epoch, scheduler.last_epoch)
