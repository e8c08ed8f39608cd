"""Training runs with layers that look beyond one example, or at chance: BatchNorm and dropout (docs/protocol.md 21)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import stratagem as sg
from tests.conformance.law import runs_alone
from tests.conformance.scenarios.examples import numbers
from tests.conformance.scenarios.refusals import said
from tests.conformance.scenarios.training import cross_entropy, rows, usual
from tests.conformance.scenarios.workload import Batch, Training, Workload, filled

EXAMPLES, BATCH_SIZE = 27, 16
"""Batches of 16 and of 11: no replica of up to four has less than two examples, which BatchNorm needs."""
SEED = 50
"""Of the dropout of replica 0; the others count on from there."""


def norm_net() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, eps=0.1), nn.Tanh(), nn.Linear(6, 3)))


@Training
def batch_norm() -> Workload:
    model = norm_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return Workload((model, optimizer), rows(EXAMPLES), usual(), BATCH_SIZE, epochs=2)


def own_statistics(strategy: sg.Strategy) -> list[Any]:
    """The running mean that each local replica has after one step on other examples than the others."""
    model = norm_net()
    prepared = strategy.prepare(model)
    dataset = strategy.distribute_dataset([rows(16)])

    def step(batch: Batch) -> torch.Tensor:
        prepared(batch[0])
        mean: torch.Tensor = prepared[1].running_mean
        return mean.clone()

    (batch,) = dataset
    return [mean.tolist() for mean in strategy.local_results(strategy.run(step, args=(batch,)))]


@Training
def sync_batch_norm() -> Workload:
    """Uneven and empty shares."""
    model = norm_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    # A batch of one cannot be normalised: the last has two, of which the third and fourth replica have none.
    return Workload((model, optimizer), rows(16), usual(), 7, epochs=2, prepare={"sync_batchnorm": True})


def layout_workload(memory_format: torch.memory_format | None) -> Workload:
    """With a convolution, whose weights are looked at in every step."""
    convolution = nn.Conv2d(2, 4, 2)
    layers = nn.Linear(5, 18), nn.Unflatten(1, (2, 3, 3)), convolution, nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    model = filled(nn.Sequential(*layers))

    def step(objects: Sequence[Any], batch: Batch, number: int) -> tuple[torch.Tensor, float]:
        weight = objects[0][2].weight
        assert memory_format is None or weight.is_contiguous(memory_format=memory_format) > weight.is_contiguous()
        return usual()(objects, batch, number)

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    prepare = {"memory_format": memory_format}
    return Workload((model, optimizer), rows(EXAMPLES), step, BATCH_SIZE, epochs=2, prepare=prepare)


channels_last = Training(layout_workload, torch.channels_last, name="channels_last")


def dropout_net() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 3)))


@Training
def dropout() -> Workload:
    model = dropout_net()

    def step(objects: Sequence[Any], batch: Batch, number: int) -> tuple[torch.Tensor, float]:
        if number == 0:
            context = sg.get_replica_context()
            torch.manual_seed(SEED + (context.replica_id_in_sync_group if context is not None else 0))
        return usual(cross_entropy)(objects, batch, number)

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    # One epoch: a DataLoader draws from torch's generator at the start of each.
    return Workload((model, optimizer), rows(36), step, batch_size=10, epochs=1)


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def empty_shares(strategy: sg.Strategy) -> dict[str, Any]:
    """How often the step was called on each local replica, and how often its module has counted that."""
    model = strategy.prepare(Counting())
    called: list[int] = []

    def step(batch: torch.Tensor) -> int:
        model(batch)
        context = sg.get_replica_context()
        assert context is not None
        called.append(context.replica_id_in_sync_group)
        return int(model.calls)

    for batch in strategy.distribute_dataset(numbers(9, 4)):
        strategy.run(step, args=(batch,))
    counted = strategy.local_results(strategy.run(lambda: int(model.calls)))
    return {"called": sorted(called), "counted": list(counted)}


@runs_alone
def steps_without_size_0(strategy: sg.Strategy) -> str:
    """What is said about a step that cannot take size 0."""
    model = filled(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    own, prepared = strategy.prepare(model, optimizer)

    def reshaping(batch: Batch) -> None:
        prepared.zero_grad()
        own(batch[0].view(len(batch[0]), -1)).mean().backward()
        prepared.step()

    dataset = strategy.distribute_dataset([rows(1)])
    return said(lambda: [strategy.run(reshaping, args=(batch,)) for batch in dataset])
