"""Two optimizers in one batch, one of them twice, under any strategy; saves the weights of both models."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default=None)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(5)
    real, noise = torch.randn(22, 4), torch.randn(22, 2)
    generator, critic = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
    strategy = sg.strategy_from_environment(options.strategy)
    make = torch.optim.Adam(generator.parameters(), 1e-2)
    judge = torch.optim.SGD(critic.parameters(), 5e-2, momentum=0.9)
    strategy.prepare(generator, critic, make, judge)
    dataset = strategy.distribute_dataset(DataLoader(TensorDataset(real, noise), batch_size=6, shuffle=True))

    def train_step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        for _ in range(2):
            judge.zero_grad()
            margin = critic(generator(batch[1]).detach()) - critic(batch[0])
            (margin.mean() + critic.weight.square().sum()).backward()
            judge.step()
        make.zero_grad()
        loss: torch.Tensor = -critic(generator(batch[1])).mean()
        loss.backward()
        make.step()
        return loss.detach()

    for _ in range(3):
        for batch in dataset:
            strategy.reduce_mean(strategy.run(train_step, args=(batch,)))
    if strategy.is_lead:
        states = {"make": make.state_dict()["state"], "judge": judge.state_dict()["state"]}
        flat = {
            f"{name}.{index}.{slot}": torch.as_tensor(value)
            for name, state in states.items()
            for index, slots in state.items()
            for slot, value in slots.items()
        }
        torch.save({**generator.state_dict(prefix="g."), **critic.state_dict(prefix="c."), **flat}, options.out)


if __name__ == "__main__":
    main()
