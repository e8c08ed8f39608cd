"""Trains a small net on fixed data under any strategy and saves the weights, for comparison with one process."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.cluster.scripts import faults

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
}


class Net(torch.nn.Module):
    """With a parameter that no step uses: it and its optimizer state must stay untouched."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(7, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        self.unused = torch.nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.body(x)
        return output


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--examples", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip-norm", type=float)
    parser.add_argument("--decay", action="store_true")
    parser.add_argument("--anneal", action="store_true", help="a schedule that is stepped with each update")
    parser.add_argument("--poison-step", type=int, default=-1)
    parser.add_argument("--nan", default="error")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--strategy", default=None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--state-out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(3)
    x, y = torch.randn(options.examples, 7), torch.randint(0, 3, (options.examples,))
    model = Net()
    optimizer = OPTIMIZERS[options.optimizer](model.parameters())
    if options.strategy == "sharded":
        strategy: sg.Strategy = sg.ParameterServerStrategy(
            variable_partitioner=sg.FixedShardsPartitioner(options.shards)
        )
    else:
        strategy = sg.strategy_from_environment(options.strategy)
    task = str(getattr(strategy, "task", "worker:0"))
    strategy.prepare(model, optimizer, clip_norm=options.clip_norm, nan=options.nan)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if options.decay else None
    annealing = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if options.anneal else None
    if annealing is not None:
        strategy.prepare(annealing)
    loader = DataLoader(TensorDataset(x, y), batch_size=options.batch_size, shuffle=True)
    dataset = strategy.distribute_dataset(loader)

    def train_step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if step % options.accumulate == 0:
            optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        if step == options.poison_step and task == "worker:0":
            loss = loss * float("nan")
        loss.backward()
        if (step + 1) % options.accumulate == 0:
            optimizer.step()
            if annealing is not None:
                annealing.step()
        return loss.detach()

    step = 0
    for epoch in range(options.epochs):
        for batch in dataset:
            faults.at_step(task, step)
            loss = strategy.reduce_mean(strategy.run(train_step, args=(batch,)))
            step += 1
        if scheduler is not None:
            scheduler.step()
        if strategy.is_lead and step:
            print(f"epoch {epoch} loss {float(loss):.6f}")
    if strategy.is_lead:
        if options.out:
            torch.save(model.state_dict(), options.out)
        if options.state_out:
            torch.save(optimizer.state_dict(), options.state_out)


if __name__ == "__main__":
    main()
