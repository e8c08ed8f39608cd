"""Training without ``prepare``, with half of it, or past it: a linear model and SGD, built in the scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import stratagem as sg
from tests.conformance.scenarios.refusals import said

X = torch.arange(8.0).view(8, 1)
Prepare = Callable[[nn.Module, torch.optim.Optimizer], Any]


def outputs(model: Any) -> Any:
    """Wherever the model is."""
    return model(X.to(model.weight.device))


def built(strategy: sg.Strategy) -> tuple[nn.Linear, torch.optim.SGD]:
    """In the scope, as the documents of tf.distribute do it."""
    with strategy.scope():
        model = nn.Linear(1, 1)
        return model, torch.optim.SGD(model.parameters(), 0.01)


def attempt(strategy: sg.Strategy, prepare: Prepare) -> dict[str, Any]:
    """What a step after ``prepare`` says, and whether it has changed the model."""
    model, optimizer = built(strategy)
    before: torch.Tensor = model.weight

    def step() -> None:
        optimizer.zero_grad()
        outputs(model).mean().backward()
        optimizer.step()

    def train() -> None:
        nonlocal model, optimizer, before
        model, optimizer = prepare(model, optimizer)
        before = model.weight.detach().clone()
        strategy.run(step)

    return {"said": said(train), "changed": not torch.equal(before, model.weight.detach())}


def prepare(strategy: sg.Strategy) -> dict[str, Any]:
    """Nothing prepared, or one of the two; parameters that came later; gradients without an optimizer, and none."""

    def late(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        prepared = strategy.prepare(model, optimizer)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        return prepared

    cases: dict[str, Prepare] = {
        "nothing": lambda model, optimizer: (model, optimizer),
        "model": lambda model, optimizer: (strategy.prepare(model), optimizer),
    }
    if isinstance(strategy, sg.MirroredStrategy):
        cases["optimizer"] = lambda model, optimizer: (model, strategy.prepare(optimizer))
    if len(strategy.local_devices) == 1:
        cases["late"] = late
    found = {name: attempt(strategy, case) for name, case in cases.items()}
    model, _ = built(strategy)
    found["by hand"] = {
        "said": said(lambda: strategy.run(lambda: outputs(model).mean().backward())),
        "changed": False,
    }
    model.requires_grad_(False)
    found["frozen"] = {
        "said": said(lambda: strategy.run(lambda: outputs(model).mean())),
        "changed": False,
    }
    return found


def own_gradients(strategy: sg.Strategy) -> dict[str, Any]:
    """Gradients that the script sets by itself: those of each replica, and, where replicas can, their mean."""

    def train(reduced: bool) -> list[float]:
        model, optimizer = built(strategy)
        model, optimizer = strategy.prepare(model, optimizer)

        def step() -> None:
            context = sg.get_replica_context()
            assert context is not None
            loss = outputs(model).mean() * (1 + context.replica_id_in_sync_group)
            parameters = list(model.parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = context.all_reduce("mean", gradient) if reduced else gradient
            optimizer.step()

        for _ in range(2):
            strategy.run(step)
        return [float(value.detach()) for value in strategy.local_results(model.weight)]

    found: dict[str, Any] = {"own": said(lambda: train(False))}
    if strategy.servers is None:
        found["reduced"] = train(True)
    return found
