"""Trains a table on batches that take a while to read. Says how often rows were waited for, and what the data took."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from torch.utils.data import DataLoader

import stratagem as sg
from stratagem.measuring import measures
from stratagem.worker.push import row_reads
from stratagem.worker.runtime import active_runtime

READ_S = 0.01
num_trips = num_steps = 0
read = row_reads._read


def counted(wanted: Any) -> None:
    global num_trips
    num_trips += 1
    read(wanted)


def collate(examples: list[int]) -> torch.Tensor:
    time.sleep(READ_S)
    return torch.tensor(examples)


row_reads._read = counted
strategy = sg.ParameterServerStrategy()
with strategy.scope():
    table = sg.nn.Embedding(80, 2)
    table, optimizer = strategy.prepare(table, torch.optim.SGD(table.parameters(), 0.1))
examples: Any = range(80)
batches = strategy.distribute_dataset(DataLoader(examples, batch_size=2, collate_fn=collate))
for _ in range(2):
    for ids in batches:
        optimizer.zero_grad()
        table(ids).sum().backward()
        optimizer.step()
        num_steps += 1
runtime = active_runtime()
assert runtime is not None
spent = runtime.meter.values()
print(json.dumps({"trips": num_trips, "steps": num_steps, "data_s": spent[measures.DATA_WAIT], "read_s": READ_S}))
