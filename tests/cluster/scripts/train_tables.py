"""Trains two tables and a dense head under any strategy and saves all weights, for comparison with one process."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.cluster.scripts import faults

ROWS, BAGS, WIDTH = 41, 23, 4
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "sparse_adam": lambda p: torch.optim.SparseAdam(p, 0.01),
}


class Net(torch.nn.Module):
    """A table that is asked twice in a step, with padding, and one of bags that a few examples use.

    Args:
        pretrained: rows of the table; None: made from a seed.
    """

    def __init__(self, pretrained: torch.Tensor | None) -> None:
        super().__init__()
        self.table = sg.nn.Embedding(ROWS, WIDTH, padding_idx=7, init=sg.nn.Normal(std=0.5), seed=1)
        if pretrained is not None:
            self.table = sg.nn.Embedding.from_pretrained(pretrained, freeze=False, padding_idx=7)
        self.bags = sg.nn.EmbeddingBag(BAGS, WIDTH, mode="sum", init=sg.nn.Uniform(-0.5, 0.5), seed=2)
        self.head = torch.nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.table(ids[:, :2]).sum(1) + self.table(ids[:, 2])
        chosen = (ids[:, 0] % 8 == 0).nonzero().flatten()
        if len(chosen):
            found = found.index_add(0, chosen, self.bags(ids[chosen] % BAGS))
        logits: torch.Tensor = self.head(torch.tanh(found))
        return logits


def whole_state(model: Net) -> dict[str, torch.Tensor]:
    """Every weight, those of tables too, as plain layers have them."""
    state = {f"head.{name}": value for name, value in model.head.state_dict().items()}
    for name in ("table", "bags"):
        state[f"{name}.weight"] = getattr(model, name).whole_weight()
    return state


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--examples", type=int, default=50)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip-norm", type=float)
    parser.add_argument("--shards", type=int, default=0)
    parser.add_argument("--strategy", default=None)
    parser.add_argument("--restore", type=Path)
    parser.add_argument("--pretrained", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(3)
    ids, labels = torch.randint(0, ROWS, (options.examples, 3)), torch.randint(0, 3, (options.examples,))
    if options.shards:
        partitioner = sg.FixedShardsPartitioner(options.shards)
        strategy: sg.Strategy = sg.ParameterServerStrategy(variable_partitioner=partitioner)
    else:
        strategy = sg.strategy_from_environment(options.strategy)
    task = str(getattr(strategy, "task", "worker:0"))
    with strategy.scope():
        model = Net(torch.load(options.pretrained, mmap=True) if options.pretrained else None)
        tables = [*model.table.parameters(), *model.bags.parameters()]
        lazy = OPTIMIZERS[options.optimizer](tables)
        dense = torch.optim.Adam(model.head.parameters(), 1e-2)
    if options.clip_norm is None:
        strategy.prepare(model, lazy, dense)
    else:
        strategy.prepare(model, lazy, dense, clip_norm=options.clip_norm)
    loader = DataLoader(TensorDataset(ids, labels), batch_size=12, shuffle=True)
    dataset = strategy.distribute_dataset(loader)
    checkpoint = sg.Checkpoint(strategy=strategy, model=model, lazy=lazy, dense=dense)
    if options.restore:
        checkpoint.restore(options.restore)

    def train_step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if step % options.accumulate == 0:
            lazy.zero_grad()
            dense.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        if (step + 1) % options.accumulate == 0:
            with torch.sparse.check_sparse_tensor_invariants(False):  # else torch warns, once, that they are off
                lazy.step()
            dense.step()
        return loss.detach()

    step = 0
    for epoch in range(options.epochs):
        for batch in dataset:
            faults.at_step(task, step)
            loss = strategy.reduce_mean(strategy.run(train_step, args=(batch,)))
            step += 1
        if strategy.is_lead and step:
            print(f"epoch {epoch} loss {float(loss):.6f}")
    if strategy.is_lead:
        if options.save:
            print(checkpoint.save(options.save))
        if options.out:
            torch.save(whole_state(model), options.out)


if __name__ == "__main__":
    main()
