"""Trains a net with dropout step by step under any strategy, saving at a step or going on from a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.training.saving.checkpoint import Checkpoint


def make(dropout: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The net and its optimizer."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 3)))  # as layers of no width have
    return model, torch.optim.Adam(model.parameters(), 1e-2)


def batch_of(step: int) -> list[torch.Tensor]:
    """The examples of a step, the same for all."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(12, 7, generator=generator), torch.randint(0, 3, (12,), generator=generator)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default=None)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--dataset", action="store_true", help="five steps an epoch, shuffled; else by batch_of")
    parser.add_argument("--save", type=Path, help="where the last step is saved")
    parser.add_argument("--restore", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    strategy = sg.strategy_from_environment(options.strategy)
    with strategy.scope():
        model, optimizer = make(dropout=0.2 if options.dataset else 0.0)
        model, optimizer = strategy.prepare(model, optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        checkpoint = Checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, step=0)
        if options.dataset:
            data = TensorDataset(*(torch.cat(parts) for parts in zip(*map(batch_of, range(5)), strict=True)))
            # A DataLoader without a generator draws from the global one at the start of each epoch, and once more when
            # an epoch is resumed in its middle.
            loader = DataLoader(data, batch_size=12, shuffle=True, generator=torch.Generator())
            dataset = strategy.distribute_dataset(loader)
            checkpoint = Checkpoint(
                model=model, optimizer=optimizer, scheduler=scheduler, step=0, data=dataset, asynchronous=True
            )
    torch.manual_seed(int(str(getattr(strategy, "task", "worker:0"))[-1]))  # every worker drops out others
    if options.restore:
        print("restored", checkpoint.restore(options.restore))

    def batches() -> Iterator[list[torch.Tensor]]:
        while True:
            yield from dataset if options.dataset else [batch_of(checkpoint.step)]

    def train_step(batch: list[torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    for batch in batches():
        strategy.run(train_step, args=(batch,))
        scheduler.step()
        checkpoint.step += 1
        if checkpoint.step == options.steps:
            break
    if options.save:
        print("saved", checkpoint.save(options.save / "step", step=checkpoint.step))
        checkpoint.wait()
    if strategy.is_lead and options.out:
        torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], options.out)


if __name__ == "__main__":
    main()
