"""Goes back to one checkpoint again and again, while tasks are stopped for a moment now and then."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.worker.chief_client import ChiefClient


@contextlib.contextmanager
def lingering(pause_s: float) -> Iterator[None]:
    """Inside, this process waits a moment after each agreement, before it looks at what has come of it."""
    agree = ChiefClient.agree

    def slow(self: ChiefClient, *args: Any, **kwargs: Any) -> int:
        decided = agree(self, *args, **kwargs)
        time.sleep(pause_s)
        return decided

    ChiefClient.agree = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        ChiefClient.agree = agree  # type: ignore[method-assign]


@contextlib.contextmanager
def stopped() -> Iterator[None]:
    """This process is stopped for a second, soon."""
    pid, delay_s = os.getpid(), random.uniform(0, 0.3)
    command = f"sleep {delay_s:.3f}; kill -STOP {pid}; sleep 1; kill -CONT {pid}"
    with subprocess.Popen(["sh", "-c", command]):
        yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--restores", type=int, required=True)
    parser.add_argument("--stopped", help="the worker that is stopped in each restore; without, they linger in turn")
    options = parser.parse_args()
    strategy = sg.ParameterServerStrategy()
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    dataset = strategy.distribute_dataset(DataLoader(data, batch_size=4))
    checkpoint = sg.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
    saved = checkpoint.save(options.folder / "step", step=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for number in range(options.restores):
        if options.stopped:
            slow = stopped() if options.stopped == str(strategy.task) else contextlib.nullcontext()
        else:
            slow = lingering(0.3) if number % 2 == strategy.task.index else contextlib.nullcontext()
        with slow:
            checkpoint.restore(saved)
        if strategy.staleness == 0:  # else the other worker may be ahead by now
            assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
        for batch in dataset:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
            optimizer.step()
        assert not all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    print(f"restored {options.restores} times")


if __name__ == "__main__":
    main()
