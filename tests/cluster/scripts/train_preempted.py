"""Trains a small model with dropout, by ``fit`` or by a loop of its own, and goes on when it is started again.

Faults of the schedule (TEST_FAULTS) are due before the steps of the whole training, over all lives.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.strategy.base import Strategy
from tests.cluster.scripts import faults

EPOCHS = 4
BATCH = 12


class Faults(sg.callbacks.Callback):
    """Makes the faults of the schedule happen before their steps."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        faults.at_step(task_of(self.model.strategy), self.model.num_steps)


def task_of(strategy: Strategy) -> str:
    return str(getattr(strategy, "task", "worker:0"))


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 16), nn.Dropout(0.25), nn.Tanh(), nn.Linear(16, 3))


def by_fit(strategy: Strategy, x: torch.Tensor, y: torch.Tensor, folder: Path) -> nn.Module:
    with strategy.scope():
        model = sg.Model(network())
    model.compile(lambda parameters: torch.optim.Adam(parameters, 1e-2), "cross_entropy", ["accuracy"])
    backup = sg.callbacks.BackupAndRestore(folder, save_freq=2)
    model.fit(
        x, y, batch_size=BATCH, epochs=EPOCHS, validation_data=(x[:9], y[:9]), callbacks=[Faults(), backup], verbose=0
    )
    return model.module


def by_hand(strategy: Strategy, x: torch.Tensor, y: torch.Tensor, folder: Path, every: int) -> nn.Module:
    with strategy.scope():
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    model, optimizer = strategy.prepare(model, optimizer)
    data = strategy.distribute_dataset(DataLoader(TensorDataset(x, y), BATCH, shuffle=True))
    checkpoint = sg.Checkpoint(strategy=strategy, model=model, optimizer=optimizer, data=data, steps=0)
    manager = sg.CheckpointManager(checkpoint, folder)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    with sg.PreemptionCheckpointHandler(manager) as handler:
        for _ in range(data.epoch, EPOCHS):
            for batch in data:
                faults.at_step(task_of(strategy), handler.total_run_calls)
                checkpoint.steps += 1
                handler.run(step, args=(batch,))
                if every and checkpoint.steps % every == 0:
                    manager.save()
    print(f"{checkpoint.steps} steps, {handler.total_run_calls} calls")
    assert isinstance(model, nn.Module)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--by", choices=["fit", "hand"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=0, help="steps between what the script saves by hand; 0: never")
    options = parser.parse_args()
    torch.manual_seed(5)
    x = torch.randn(63, 7)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    strategy = sg.strategy_from_environment()
    if options.by == "fit":
        model = by_fit(strategy, x, y, options.folder)
    else:
        model = by_hand(strategy, x, y, options.folder, options.every)
    if strategy.is_lead:
        torch.save(model.state_dict(), options.out)


if __name__ == "__main__":
    main()
