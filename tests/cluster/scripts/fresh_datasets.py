"""Distributes a dataset for each epoch, and trains on batches when theirs is gone. Says how many this worker keeps."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.utils.data import DataLoader

import stratagem as sg
from stratagem.worker.leases import LeaseClient

NUM_EPOCHS = 5
examples: Any = torch.ones(8, 1)

strategy = sg.get_strategy()
with strategy.scope():
    model = torch.nn.Linear(1, 1)
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))


def step(x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


for _ in range(NUM_EPOCHS):
    for batch in strategy.distribute_dataset(DataLoader(examples, batch_size=2)):
        strategy.run(step, (batch,))
iterator = iter(strategy.distribute_dataset(DataLoader(examples, batch_size=2)))
batches = [next(iterator), next(iterator)]
del iterator, batch
gc.collect()
for batch in batches:
    strategy.run(step, (batch,))
print("kept", sum(isinstance(each, LeaseClient) for each in gc.get_objects()))
