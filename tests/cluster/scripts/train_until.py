"""Trains until a file is there: a job that runs for as long as a test looks at it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg

LIMIT_S = 100.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--pause-s", type=float, default=0.02, help="between steps: other tests run beside this one")
    options = parser.parse_args()
    torch.manual_seed(0)
    strategy = sg.strategy_from_environment()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    strategy.prepare(model, optimizer)
    dataset = strategy.distribute_dataset(DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4))

    def train_step(batch: tuple[torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch[0]).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    deadline = time.monotonic() + options.limit_s
    num_steps = 0
    while not options.until.exists() and time.monotonic() < deadline:
        for batch in dataset:
            strategy.run(train_step, args=(batch,))
            num_steps += 1
            time.sleep(options.pause_s)
    print(f"ended after {num_steps} steps", flush=True)


if __name__ == "__main__":
    main()
