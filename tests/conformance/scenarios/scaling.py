"""One weight w from 0 with SGD of rate 1, and losses w · x: what w becomes says what its gradient was.

The examples are 1 to 6 in batches of 5 and 1: shares that are uneven, and empty ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.errors import NonFiniteGradientError
from tests.conformance.law import runs_late
from tests.conformance.scenarios.contexts import number
from tests.conformance.scenarios.refusals import refusal, said

BATCH_SIZE = 5
Loss = Callable[[sg.Strategy, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of the strategy, the outputs w · x, and x."""


def mean_loss(strategy: sg.Strategy, outputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Over the examples of the replica."""
    return outputs.mean()


def train(
    strategy: sg.Strategy,
    loss_of: Loss = mean_loss,
    *,
    num_examples: int = 6,
    batch_size: int = BATCH_SIZE,
    scale: float = 1.0,
    **preparation: Any,
) -> dict[str, Any]:
    """One epoch.

    Args:
        strategy: trains.
        loss_of: of one replica.
        num_examples: 1, 2, …
        batch_size: of the global batch.
        scale: multiplies the losses of replicas that have the example 6.
        preparation: arguments of ``prepare``.
    """
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 1.0), **preparation)
    data = TensorDataset(torch.arange(1.0, num_examples + 1.0).view(-1, 1))
    found: dict[str, Any] = {"weights": [], "gradients": [], "reduce_mean": [], "plain": [], "mean": []}
    found["attached"] = False

    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(strategy, model(batch[0]), batch[0])
        (loss * scale if 6.0 in batch[0] else loss).backward()
        gradients.append(float(model.weight.grad))
        optimizer.step()
        weights.append(float(model.weight.detach()))
        return batch[0].mean().requires_grad_()

    for batch in strategy.distribute_dataset(DataLoader(data, batch_size=batch_size)):
        weights: list[float] = []
        gradients: list[float] = []
        loss = strategy.run(step, args=(batch,))
        found["weights"].append(weights)
        found["gradients"].append(gradients)
        reduced = strategy.reduce_mean(loss)
        found["reduce_mean"].append(float(reduced))
        found["attached"] |= reduced.requires_grad
        found["plain"].append(float(strategy.reduce_mean(strategy.local_results(loss)[0])))
        if len(found["mean"]) == 0:
            found["mean"].append(float(strategy.reduce(sg.ReduceOp.MEAN, loss).detach()))
    found["final"] = float(model.weight.detach())
    return found


def mean_of_examples(strategy: sg.Strategy) -> dict[str, Any]:
    """``gradients="mean"``, the default."""
    return train(strategy)


def own_denominator(strategy: sg.Strategy) -> dict[str, Any]:
    """Each example counts x: a mean with another denominator, said with ``set_weight``."""

    def loss(strategy: sg.Strategy, outputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weight = float(x.sum())
        strategy.set_weight(weight)
        return (outputs * x).sum() / max(weight, 1.0)

    return train(strategy, loss)


def sum_of_losses(strategy: sg.Strategy) -> dict[str, Any]:
    """``gradients="sum"``, losses over the size of the global batch."""

    def loss(strategy: sg.Strategy, outputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return sg.compute_average_loss(outputs, global_batch_size=BATCH_SIZE)

    return train(strategy, loss, gradients="sum")


@runs_late
def divided_twice(strategy: sg.Strategy) -> dict[str, Any]:
    """Losses and penalties for ``gradients="sum"`` under the default; then what may be done."""

    def average(_: sg.Strategy, outputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return sg.compute_average_loss(outputs, global_batch_size=BATCH_SIZE)

    def penalty(_: sg.Strategy, outputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return outputs.mean() + sg.scale_regularization_loss(outputs.square())

    def to_print(_: sg.Strategy, outputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        sg.compute_average_loss(outputs, global_batch_size=BATCH_SIZE)
        return outputs.mean()

    return {
        "average": said(lambda: train(strategy, average)),
        "penalty": said(lambda: train(strategy, penalty)),
        "printed": train(strategy, to_print)["final"],
    }


def clipped(strategy: sg.Strategy) -> dict[str, Any]:
    """``clip_norm``."""
    return train(strategy, clip_norm=2.0)


def skipped(strategy: sg.Strategy) -> dict[str, Any]:
    """``nan="skip"``, and the last step has an infinite gradient."""
    return train(strategy, scale=float("inf"), nan="skip")


@runs_late
def not_finite(strategy: sg.Strategy) -> dict[str, Any]:
    """``nan="error"``, the default."""
    try:
        train(strategy, num_examples=12, batch_size=12, scale=float("inf"))
    except NonFiniteGradientError as error:
        return {"error": str(error)}
    return {"error": "none"}


@runs_late
def again_after_not_finite(strategy: sg.Strategy) -> Any:
    """An error that all replicas raise leaves them in step."""
    assert "finite" in not_finite(strategy)["error"]
    return clipped(strategy)


def plain_arguments(strategy: sg.Strategy) -> Any:
    """A step on what is no batch of a dataset."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 1.0))

    def step() -> float:
        optimizer.zero_grad()
        # As many examples as the number of the replica says: that is not asked for.
        model(torch.full((1 + number(), 1), 1.0 + number(), device=model.weight.device)).mean().backward()
        optimizer.step()
        return float(model.weight.detach())

    return strategy.local_results(strategy.run(step))


def average_loss(strategy: sg.Strategy) -> Any:
    """[2, 3], [4, 5], … in a global batch of two a replica, by default and said outright; their sum; with weights."""

    def step() -> list[float]:
        first = 2.0 + 2 * number()
        losses = torch.tensor([first, first + 1])
        num = 2 * strategy.num_replicas_in_sync
        return [
            float(sg.compute_average_loss(losses)),
            float(sg.compute_average_loss(losses, global_batch_size=num)),
            float(sg.compute_average_loss(losses, sample_weight=torch.tensor([1.0, 0.0]), global_batch_size=num)),
        ]

    return strategy.local_results(strategy.run(step))


def summed_average_loss(strategy: sg.Strategy) -> Any:
    """The SUM of :func:`average_loss` over replicas."""

    def step() -> torch.Tensor:
        first = 2.0 + 2 * number()
        return sg.compute_average_loss(torch.tensor([first, first + 1]))

    return strategy.reduce(sg.ReduceOp.SUM, strategy.run(step))


def regularization(strategy: sg.Strategy) -> Any:
    """``scale_regularization_loss`` of 6 in a step, and of a vector."""

    def scaled(loss: torch.Tensor) -> Any:
        return strategy.local_results(strategy.run(lambda: float(sg.scale_regularization_loss(loss))))

    return {"inside": scaled(torch.tensor(6.0)), "several": scaled(torch.tensor([2.0, 4.0]))[0]}


def arguments_of_prepare(strategy: sg.Strategy) -> dict[str, Any]:
    """What ``prepare`` refuses."""
    model = nn.Linear(1, 1)
    wrong: dict[str, dict[str, Any]] = {
        "gradients": {"gradients": "average"},
        "clip_norm": {"clip_norm": 0.0},
        "nan": {"nan": "ignore"},
    }
    found = {name: refusal(lambda more=more: strategy.prepare(model, **more)) for name, more in wrong.items()}  # type: ignore[misc]
    found["loader"] = refusal(lambda: strategy.prepare(model, DataLoader([1])))  # type: ignore[arg-type]
    return found


def objects_of_prepare(strategy: sg.Strategy) -> dict[str, Any]:
    """What ``prepare`` returns."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    several = strategy.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), model)
    kinds = [torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, nn.Module]
    return {
        "one": isinstance(strategy.prepare(nn.Linear(1, 1)), nn.Linear),
        "several": [isinstance(item, kind) for item, kind in zip(several, kinds, strict=True)],
    }


def one_by_one(strategy: sg.Strategy) -> Any:
    """A model, its optimizer and its scheduler, each in a call of its own; weight and rate after a step."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model = strategy.prepare(model)
    optimizer = strategy.prepare(torch.optim.SGD(model.parameters(), 1.0))
    scheduler = strategy.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))

    def step() -> None:
        model(torch.ones(1, 1, device=model.weight.device)).sum().backward()
        optimizer.step()
        scheduler.step()

    strategy.run(step)
    return [float(model.weight.detach()), optimizer.param_groups[0]["lr"]]
