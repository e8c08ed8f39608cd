"""A worker trains while the lead does not; the lead then loads one of two variables, and the other stays trained."""

from __future__ import annotations

import torch

import stratagem as sg

strategy = sg.ParameterServerStrategy()
with strategy.scope():
    model = torch.nn.ParameterList(torch.zeros(3) for _ in range(2))
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 1.0))


def step() -> None:
    optimizer.zero_grad()
    (model[0].sum() + model[1].sum()).backward()
    optimizer.step()


def load() -> None:
    with torch.no_grad():
        model[1].fill_(7.0)


for _ in range(0 if sg.is_lead() else 5):
    strategy.run(step)
strategy.load_once(load)
assert [one.tolist() for one in model] == [[-5.0] * 3, [7.0] * 3], [*model]
