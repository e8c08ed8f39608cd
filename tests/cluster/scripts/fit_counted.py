"""Trains with sg.Model under parameter servers, slowly enough for faults in training and in evaluation, and writes what
each worker knows in the end. One metric counts examples, so that a unit counted twice or not at all shows."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import nn

import stratagem as sg
from stratagem.training import callbacks
from stratagem.training.model import Model
from tests.cluster.scripts import faults

NUM_TRAINED = 48
NUM_EVALUATED = 46


class NumExamples(torchmetrics.Metric):
    """How many examples were counted."""

    number: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("number", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.number += len(targets)

    def compute(self) -> torch.Tensor:
        return self.number


class Faults(callbacks.Callback):
    """Makes the faults of the schedule happen: "worker:1" before a training step, "worker:1 evaluates" before a batch
    of an evaluation. Every batch takes a while."""

    def __init__(self, task: str, pause_s: float) -> None:
        self._task = task
        self._pause_s = pause_s
        self.num_evaluated = 0
        self.num_epochs_lived = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        faults.at_step(self._task, self.model.num_steps)
        time.sleep(self._pause_s)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.num_evaluated += 1
        faults.at_step(f"{self._task} evaluates", self.num_evaluated)
        time.sleep(self._pause_s)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.num_epochs_lived += 1


class StopInEpoch(callbacks.Callback):
    """One worker says stop in the middle of an epoch."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._at = -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._at = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._at == self._epoch:
            self.model.stop_training = True


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_TRAINED + NUM_EVALUATED, 7, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def make_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 3))


def metrics() -> dict[str, Any]:
    return {"accuracy": "accuracy", "auroc": torchmetrics.AUROC("multiclass", num_classes=3), "number": NumExamples()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stop-in-epoch", type=int)
    parser.add_argument("--pause-s", type=float, default=0.02)
    options = parser.parse_args()
    x, y = make_data()
    strategy = sg.strategy_from_environment()
    task = str(getattr(strategy, "task", "worker:0"))
    with strategy.scope():
        model = Model(make_net())
    model.compile(lambda parameters: torch.optim.Adam(parameters, 1e-2), "cross_entropy", metrics())
    watching = Faults(task, options.pause_s)
    halving = callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5 ** (epoch > 0))
    chosen: list[callbacks.Callback] = [halving, watching]
    if options.stop_in_epoch is not None and task == "worker:1":
        chosen.append(StopInEpoch(options.stop_in_epoch))
    history = model.fit(
        x[:NUM_TRAINED],
        y[:NUM_TRAINED],
        batch_size=2,
        epochs=options.epochs,
        validation_data=(x[NUM_TRAINED:], y[NUM_TRAINED:]),
        callbacks=chosen,
    )
    test = [(x[start : start + 10], y[start : start + 10]) for start in range(0, len(x), 10)]
    news = {
        "history": history.history,
        "epochs": history.epoch,
        "num_epochs_lived": watching.num_epochs_lived,
        "num_validated": watching.num_evaluated,
        "evaluation": model.evaluate(x, y, batch_size=2, return_dict=True, callbacks=[watching]),
        "of_an_iterable": model.evaluate(test, return_dict=True),
        "first_batches": model.evaluate(x, y, batch_size=10, steps=3, return_dict=True),
        "num_steps": model.num_steps,
    }
    Path(f"{options.out}.{task}").write_text(json.dumps(news))
    if strategy.is_lead:
        torch.save(model.state_dict(), f"{options.out}.pt")


if __name__ == "__main__":
    main()
