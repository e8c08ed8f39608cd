"""Counts how often each example was applied, on every ps: example i has gradient 1 at row i, the update is w -= g.

After e epochs every row of every variable must be exactly -e, whatever was killed, resent or torn.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.cluster.scripts import faults


class TableCounter(torch.nn.Module):
    """A table, whose rows lie on all ps."""

    def __init__(self, num_examples: int) -> None:
        super().__init__()
        self.table = sg.nn.Embedding(num_examples, 1, init=sg.nn.Constant(0.0))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.table(indices).sum()
        return total


class Counter(torch.nn.Module):
    """Two variables, so that two ps hold one each and an update can be torn."""

    def __init__(self, num_examples: int) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(num_examples))
        self.second = torch.nn.Parameter(torch.zeros(num_examples))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.first[indices].sum() + self.second[indices].sum()


def ahead(batches: Iterable[Any], num_ahead: int) -> Iterator[Any]:
    """The same batches, taken ``num_ahead`` earlier than they are needed."""
    taken: collections.deque[Any] = collections.deque()
    for batch in batches:
        taken.append(batch)
        if len(taken) > num_ahead:
            yield taken.popleft()
    yield from taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--until", type=Path, help="go on with further epochs until this file is there")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument(
        "--optimizers", type=int, default=1, help="2: one for each variable; they step one after the other"
    )
    parser.add_argument("--ahead", type=int, default=0, help="batches that the script takes ahead of time")
    parser.add_argument("--leave-after", type=int, default=0, help="batches after which others than the lead leave")
    parser.add_argument("--leave-once", action="store_true", help="they go through the passes after the first")
    parser.add_argument("--data-workers", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--table", action="store_true", help="count in a table")
    parser.add_argument("--restore", type=Path, help="go on from the newest checkpoint in there")
    parser.add_argument(
        "--keep", type=Path, help="go on from the newest checkpoint in there, and save after each epoch"
    )
    parser.add_argument("--save", type=Path, help="save a checkpoint of step 7 at the end")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    strategy = sg.strategy_from_environment()
    task = str(getattr(strategy, "task", "worker:0"))
    with strategy.scope():
        model = TableCounter(options.examples) if options.table else Counter(options.examples)
    parts = [[parameter] for parameter in model.parameters()] if options.optimizers > 1 else [model.parameters()]
    optimizer, *others = [torch.optim.SGD(part, 1.0) for part in parts]
    faults.at_step(task, -1)
    strategy.prepare(model, optimizer, *others, gradients="sum")
    data = DataLoader(
        TensorDataset(torch.arange(options.examples)),
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.data_workers,
    )
    dataset = strategy.distribute_dataset(data)
    if options.restore:
        sg.Checkpoint(strategy=strategy, model=model, optimizer=optimizer).restore(options.restore)
    manager = None
    if options.keep:
        kept = sg.Checkpoint(strategy=strategy, model=model, optimizer=optimizer, data=dataset)
        manager = sg.CheckpointManager(kept, options.keep)
        manager.restore_or_initialize()

    def train_step(batch: list[torch.Tensor], is_last: bool) -> None:
        model(batch[0]).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            for other in others:
                faults.at_step(task, step + 1)  # of the batch that comes next; here between its steps
                other.step()
                other.zero_grad()

    step = 0
    epochs = itertools.takewhile(lambda _: not options.until.exists(), itertools.count()) if options.until else None
    for epoch in epochs or range(dataset.epoch, options.epochs):
        for number, batch in enumerate(ahead(dataset, options.ahead)):
            faults.at_step(task, step)
            if options.pause_s:
                time.sleep(options.pause_s)
            strategy.run(train_step, args=(batch, (number + 1) % options.accumulate == 0))
            step += 1
            if number + 1 == options.leave_after and not strategy.is_lead and not (epoch and options.leave_once):
                break
        if manager is not None:
            manager.save()
    if options.save:
        sg.Checkpoint(strategy=strategy, model=model, optimizer=optimizer).save(options.save, step=7)
    if options.out and strategy.is_lead:
        weights = {"table": model.table.whole_weight()} if isinstance(model, TableCounter) else model.state_dict()
        torch.save(weights, options.out)
    print(f"{task}: {step} steps, {len(faults.RESENT)} resends", file=sys.stderr)


if __name__ == "__main__":
    main()
