"""Counts with sg.Model how often each example was applied, when several batches make one update: row i of each variable
has gradient 1 in example i, and the learning rate makes it a whole step."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import stratagem as sg
from stratagem.training.model import Model
from tests.cluster.scripts.count_examples import Counter


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=4)
    options = parser.parse_args()
    strategy = sg.strategy_from_environment()
    # A mean over the slices of a step: each has its share.
    rate = float(options.accumulate * strategy.num_replicas_in_sync)

    def total(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
        return outputs.sum()

    with strategy.scope():
        model = Model(Counter(options.examples))
    model.compile(lambda p: torch.optim.SGD(p, rate), total, accumulate_steps=options.accumulate)
    indices = torch.arange(options.examples)
    model.fit(indices, indices, batch_size=4, epochs=options.epochs, verbose=0)
    if strategy.is_lead:
        torch.save(model.state_dict(), options.out)


if __name__ == "__main__":
    main()
