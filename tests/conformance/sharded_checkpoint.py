"""The script of a job on parameter servers whose variables are cut into shards: trains a step, saves or restores."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import stratagem as sg
from stratagem.training.saving.checkpoint import Checkpoint


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--restore", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    strategy = sg.ParameterServerStrategy(variable_partitioner=sg.FixedShardsPartitioner(options.shards))
    torch.manual_seed(0)
    model = nn.Linear(3, 13)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer = strategy.prepare(model, optimizer)
    checkpoint = Checkpoint(strategy=strategy, model=model, optimizer=optimizer)
    if options.restore:
        checkpoint.restore(options.restore)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    strategy.run(step)
    torch.save([model.state_dict(), optimizer.state_dict()["state"]], options.out)
    if options.save:
        checkpoint.save(options.save / "step", step=1)


if __name__ == "__main__":
    main()
