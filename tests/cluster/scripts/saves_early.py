"""Counts how often it has had each example, and saves in the middle of the first epoch, never again."""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg

strategy = sg.ParameterServerStrategy()
with strategy.scope():
    model = torch.nn.Embedding(16, 1)
    torch.nn.init.zeros_(model.weight)
    model.register_buffer("num_batches", torch.zeros(()))
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 1.0), gradients="sum")
    batches = strategy.distribute_dataset(DataLoader(TensorDataset(torch.arange(16)), batch_size=2, shuffle=True))
    checkpoint = sg.Checkpoint(model=model, optimizer=optimizer, batches=batches)
manager = sg.CheckpointManager(checkpoint, sys.argv[1])
manager.restore_or_initialize()
for _ in range(batches.epoch, int(sys.argv[2])):
    for batch in batches:
        optimizer.zero_grad()
        (-model(batch[0])).sum().backward()
        optimizer.step()
        model.num_batches += 1
        if model.num_batches == 3:
            manager.save()
print("each example:", sorted(set(model.weight.flatten().tolist())), "batches:", int(model.num_batches))
