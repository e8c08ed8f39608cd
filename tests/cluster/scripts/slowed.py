"""Trains on work of a known size until it is told to end; some tasks do more of something, as TEST_SLOWED says."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import stratagem as sg

EXAMPLES, BATCH = 100_000, 8
HOT = 8


class Examples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each costs what it is told to: seconds of sleep, or rounds of work."""

    def __init__(self, sleep_s: float, work: int) -> None:
        self._sleep_s, self._work = sleep_s, work

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        work(self._work)
        return torch.full((16,), index / EXAMPLES), torch.tensor(index % 2)


class Net(torch.nn.Module):
    """Little to compute; ``bulk`` million parameters that only make gradients, in the first of them most; a table of
    ``rows`` long rows, of which the first :data:`HOT` are used."""

    def __init__(self, bulk: float, rows: int) -> None:
        super().__init__()
        self.body = torch.nn.Linear(16, 2)
        self.bulk = torch.nn.Parameter(torch.zeros(max(1, int(bulk * 1e6))))
        self.table = sg.nn.Embedding(rows, 1 << 18) if rows else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.body(x) + self.bulk.square().sum()
        if self.table is not None:
            output = output + self.table((x[:, 0] * EXAMPLES).long() % HOT).mean()
        return output


def work(rounds: int, size: int = 192) -> None:
    """Rounds of about a millisecond of one core."""
    matrix = torch.ones(size, size) / size
    for _ in range(rounds):
        for _ in range(4):
            matrix = matrix @ matrix


def burn() -> None:
    """Pure Python, which lets go of the interpreter's lock only when it is asked."""
    while True:
        sum(range(20_000))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=int, default=40)
    parser.add_argument("--size", type=int, default=192)
    parser.add_argument("--bulk", type=float, default=0.0)
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--loaders", type=int, default=0)
    parser.add_argument("--until", type=Path, help="train until this file is there")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--sharded", action="store_true")
    options = parser.parse_args()
    partitioner = sg.FixedShardsPartitioner(2) if options.sharded else None
    strategy: Any = (
        sg.ParameterServerStrategy(variable_partitioner=partitioner) if partitioner else sg.strategy_from_environment()
    )
    slowed = json.loads(os.environ.get("TEST_SLOWED", "{}"))
    mine = slowed.get(str(getattr(strategy, "task", "worker:0")), slowed.get("worker", {}))
    with strategy.scope():
        model = Net(options.bulk, options.rows)
    optimizer = getattr(torch.optim, options.optimizer)(model.parameters(), lr=1e-4)
    model, optimizer = strategy.prepare(model, optimizer)
    data = Examples(mine.get("data_sleep_s", 0.0) / BATCH, int(mine.get("data_work", 0) / BATCH))
    loader = DataLoader(data, batch_size=BATCH, num_workers=options.loaders)
    if options.save_every:
        checkpoint = sg.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
    for _ in range(int(mine.get("burning", 0))):
        threading.Thread(target=burn, name="preparing", daemon=True).start()

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        work(int(options.work * mine.get("factor", 1)), options.size)
        time.sleep(mine.get("sleep_s", 0.0))
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    dataset = strategy.distribute_dataset(loader)
    for steps, batch in enumerate(dataset, 1):
        strategy.run(step, (batch,))
        if options.save_every and steps % options.save_every == 0:
            checkpoint.save(Path(os.environ["TEST_FAULTS_DIR"]) / "saved" / "step")
        if options.until and options.until.exists():
            break


if __name__ == "__main__":
    main()
