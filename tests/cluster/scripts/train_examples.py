"""A few steps of the examples' models on their data, in order; in a ring every rank's bits are compared after each."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import stratagem as sg
from examples import charlm, digits

WORKLOADS = ("digits", "charlm")


def make(workload: str) -> tuple[nn.Module, Dataset[tuple[torch.Tensor, ...]]]:
    """Model and data: 100 examples, so that batches of 30 end with one of 10."""
    if workload == "digits":
        return digits.make_model(), Subset(digits.load_digits()[0], range(100))
    windows = charlm.Windows(charlm.read_source_text(20_000), 100, context=16, seed=0)
    return charlm.GPT(context=16, width=32, num_layers=2), windows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=30)
    parser.add_argument("--strategy")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    strategy = sg.strategy_from_environment(options.strategy)
    news = {workload: train(strategy, workload, options.epochs, options.batch_size) for workload in WORKLOADS}
    if strategy.is_lead:
        torch.save(news, options.out)


def train(strategy: sg.Strategy, workload: str, epochs: int, batch_size: int) -> dict[str, Any]:
    """Weights, losses, and how often the ranks were found equal."""
    torch.manual_seed(1)
    model, data = make(workload)
    # The bias of attention's keys has no influence, so its gradient is rounding alone, of which Adam would make steps.
    adam = workload == "digits"
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), 1e-3 if adam else 0.1)
    strategy.prepare(model, optimizer)
    dataset = strategy.distribute_dataset(DataLoader(data, batch_size=batch_size, shuffle=True))

    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        output = model(batch[0])
        loss = nn.functional.cross_entropy(output.flatten(0, -2), batch[1].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses, num_agreed = [], 0
    for _ in range(epochs):
        for batch in dataset:
            losses.append(float(strategy.reduce_mean(strategy.run(step, args=(batch,)))))
            if isinstance(strategy, sg.MultiWorkerMirroredStrategy):
                assert strategy.replicas_agree(model), f"the ranks differ after step {len(losses)}"
                num_agreed += 1
    return {"state": model.state_dict(), "losses": losses, "num_agreed": num_agreed}


if __name__ == "__main__":
    main()
