"""Under parameter servers one worker alone saves checkpoints in ``fit``."""

from __future__ import annotations

import argparse

import torch
from torch import nn

import stratagem as sg


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--alone", type=int, help="index of the worker that saves")
    arguments = parser.parse_args()
    strategy = sg.strategy_from_environment()
    with strategy.scope():
        model = sg.Model(nn.Linear(3, 2))
        model.compile("SGD", "cross_entropy")
    task = sg.TFConfigClusterResolver().task
    saves = task is not None and task.index == arguments.alone
    saving = [sg.callbacks.ModelCheckpoint(arguments.out)] if saves else []
    model.fit(torch.randn(64, 3), torch.arange(64) % 2, verbose=0, callbacks=saving)


if __name__ == "__main__":
    main()
