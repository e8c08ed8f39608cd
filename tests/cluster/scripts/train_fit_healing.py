"""Calls ``fit`` in a ring that may lose workers and take them in again, and writes down what each worker has of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stratagem as sg
from tests.cluster.scripts import faults
from tests.cluster.scripts.train_healing import let_others_come_to_the_meeting, wait_for_newcomer

EPOCHS = 6
BATCH = 12


class Watch(sg.callbacks.Callback):
    """Makes faults happen before their steps, waits for a newcomer before one, and notes what was trained.

    Args:
        meet: number of the step, of those of the whole training.
        out: beginning of the names of files that workers write.
    """

    def __init__(self, meet: int, out: Path) -> None:
        self.meet, self.out = meet, out
        self.steps: list[tuple[int, int]] = []
        self.rates: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        strategy = self.model.strategy
        assert isinstance(strategy, sg.MultiWorkerMirroredStrategy)
        faults.at_step(str(strategy.task), self.model.num_steps)
        if self.model.num_steps == self.meet:
            wait_for_newcomer(strategy, self.out)
        self.steps.append((self.model.position.epoch, batch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.rates.append(self.model.learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--meet", type=int, required=True)
    options = parser.parse_args()
    torch.manual_seed(5)
    x = torch.randn(63, 7)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    strategy = sg.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = sg.Model(nn.Sequential(nn.Linear(7, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 3)))
    model.compile(lambda parameters: torch.optim.Adam(parameters, 1e-2), "cross_entropy", ["accuracy"])
    watch = Watch(options.meet, options.out)
    plateau = sg.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0)
    let_others_come_to_the_meeting(strategy, options.out)
    history = model.fit(
        x, y, batch_size=BATCH, epochs=EPOCHS, validation_data=(x[:9], y[:9]), callbacks=[watch, plateau], verbose=0
    )
    sums = [float(value.double().sum()) for value in model.state_dict().values()]
    news = {"history": history.history, "steps": watch.steps, "rates": watch.rates, "weights": sums}
    Path(f"{options.out}.{strategy.task.index}").write_text(json.dumps(news))


if __name__ == "__main__":
    main()
