"""Trains a small model with sg.Model under any strategy, and writes what came of it for each worker."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import nn

import stratagem as sg
from stratagem.training import callbacks
from stratagem.training.model import Model
from tests.cluster.scripts import faults


class Faults(callbacks.Callback):
    """Makes the faults of the schedule happen before their steps."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        faults.at_step(str(getattr(self.model.strategy, "task", "worker:0")), self.model.num_steps)


class StopOnOne(callbacks.Callback):
    """Says stop in the epoch ``epoch``, on the last worker alone."""

    def __init__(self, epoch: int, rank: int) -> None:
        self._epoch = epoch
        self._rank = rank

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        communicator = self.model.strategy.communicator
        if epoch == self._epoch and communicator is not None and communicator.rank == self._rank:
            self.model.stop_training = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--backup", type=Path)
    parser.add_argument("--keep-backup", action="store_true")
    parser.add_argument("--stop-on-one", type=int)
    options = parser.parse_args()
    torch.manual_seed(3)
    x = torch.randn(94, 7)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    weights = torch.rand(94) + 0.1
    strategy = sg.strategy_from_environment(options.strategy)
    in_step = not isinstance(strategy, sg.ParameterServerStrategy)
    norm = nn.BatchNorm1d(16) if in_step else nn.Identity()  # parameter servers do not merge its statistics
    with strategy.scope():
        model = Model(nn.Sequential(nn.Linear(7, 16, bias=False), norm, nn.Tanh(), nn.Linear(16, 3)))
    model.compile(
        lambda parameters: torch.optim.Adam(parameters, 1e-2),
        "cross_entropy",
        {"accuracy": "accuracy", "f1": torchmetrics.F1Score("multiclass", num_classes=3, average="macro")},
        clip_norm=1.0,
        sync_batchnorm=in_step,
    )
    chosen: list[callbacks.Callback] = [callbacks.LearningRateScheduler(lambda epoch: 1e-2 * 0.5**epoch), Faults()]
    if options.checkpoints:
        chosen.append(callbacks.ModelCheckpoint(options.checkpoints / "ckpt_{epoch}"))
    if options.checkpoints and strategy.communicator is not None:  # each worker has other losses of its batches
        best = options.checkpoints / "best-{loss:.9f}"
        chosen.append(callbacks.ModelCheckpoint(best, "loss", save_best_only=True, save_freq=2))
    if options.backup:
        chosen.append(callbacks.BackupAndRestore(options.backup, 2, not options.keep_backup))
    if options.stop_on_one is not None:
        chosen.append(StopOnOne(options.stop_on_one, strategy.num_replicas_in_sync - 1))
    history = model.fit(
        x[:80],
        y[:80],
        batch_size=12,
        epochs=options.epochs,
        class_weight={0: 2.0},
        sample_weight=weights[:80],
        validation_data=(x[80:], y[80:]),
        callbacks=chosen,
    )
    news = {
        "history": history.history,
        "evaluation": model.evaluate(x, y, batch_size=10, return_dict=True),
        "prediction": model.predict(x[:5], batch_size=2).tolist(),
        "num_steps": model.num_steps,
        "is_resumed": model.is_resumed,
        "has_backup": bool(options.backup) and options.backup.exists(),
    }
    task = str(getattr(strategy, "task", "worker:0"))
    Path(f"{options.out}.{task}").write_text(json.dumps(news))
    if strategy.is_lead:
        torch.save(model.state_dict(), f"{options.out}.pt")


if __name__ == "__main__":
    main()
