"""Trains in a ring that may lose workers, and writes down what each worker sees: whose examples are in each gradient,
what they add up to, when each step was done, and whether the replicas agree in the end."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.cluster.scripts import faults
from tests.polling import until

BATCH = 16


class Counted(nn.Module):
    """A model, and a number for each example whose gradient is the example's weight in the mean."""

    def __init__(self, num_examples: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = nn.Sequential(nn.Linear(7, 64), nn.Tanh(), nn.Linear(64, 3))
        self.counter = nn.Parameter(torch.zeros(num_examples))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.network(x)
        return out


def wait_for_newcomer(strategy: sg.MultiWorkerMirroredStrategy, out: Path) -> None:
    healing = strategy.communicator.healing
    assert healing is not None
    out.with_suffix(".meets").touch()
    until(lambda: healing.sees_newcomer, lambda: "nobody came")


def let_others_come_to_the_meeting(strategy: sg.MultiWorkerMirroredStrategy, out: Path) -> None:
    """In a worker that was started again, before its first batch: it may start more quickly than they get there."""
    started = out.with_suffix(f".started-{strategy.task.index}")
    if started.exists():
        until(out.with_suffix(".meets").exists, lambda: "nobody waits")
    started.touch()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--scales", action="store_true", help="Batches of BATCH / 4 for each replica.")
    parser.add_argument("--schedule", action="store_true", help="By a scheduler that is not prepared.")
    parser.add_argument("--barrier-every", type=int, default=0, help="Batches, as this worker counts them.")
    parser.add_argument("--meet", type=int, nargs="*", default=[], help="Steps before which a newcomer is waited for.")
    options = parser.parse_args()
    torch.manual_seed(5)
    x = torch.randn(options.examples, 7)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    strategy = sg.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = Counted(options.examples)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    strategy.prepare(model, optimizer)
    batch_size = BATCH // 4 * strategy.num_replicas_in_sync if options.scales else BATCH
    data = strategy.distribute_dataset(
        DataLoader(TensorDataset(x, y, torch.arange(options.examples)), batch_size, shuffle=True)
    )

    steps = options.epochs * len(data)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, steps) if options.schedule else None

    changes: list[tuple[int, int, int]] = []

    def scale(before: int, now: int) -> None:
        changes.append((before, now, len(seen)))
        optimizer.param_groups[0]["lr"] *= now / before  # one worker that did not would part from the others

    strategy.on_membership_change(scale)

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        rows, labels, which = batch
        loss = nn.functional.cross_entropy(model(rows), labels) + model.counter[which].mean()
        loss.backward()
        gradient = model.counter.grad
        assert gradient is not None
        seen.append((gradient != 0).nonzero().view(-1).tolist())
        totals.append(float(gradient.sum()))
        optimizer.step()
        if schedule is not None:
            schedule.step()
        return loss.detach()

    if options.meet:
        let_others_come_to_the_meeting(strategy, options.out)
    seen: list[list[int]] = []
    totals: list[float] = []
    sizes, losses, times = [], [], []
    first = 0
    for _ in range(data.epoch, options.epochs):
        for batch in data:
            number = strategy.communicator.step - 1
            first = number - len(seen)
            if number in options.meet:
                wait_for_newcomer(strategy, options.out)
            faults.at_step(str(strategy.task), number)
            losses.append(float(strategy.reduce_mean(strategy.run(step, args=(batch,)))))
            sizes.append(strategy.num_replicas_in_sync)
            times.append(time.time())
            if options.barrier_every and len(times) % options.barrier_every == 0:
                strategy.barrier()
    news = {
        "first": first,
        "seen": seen,
        "totals": totals,
        "sizes": sizes,
        "changes": changes,
        "losses": losses,
        "times": times,
        "pid": os.getpid(),
        "agree": strategy.replicas_agree(model),
        "is_lead": strategy.is_lead,
    }
    Path(f"{options.out}.{strategy.task.index}").write_text(json.dumps(news))


if __name__ == "__main__":
    main()
