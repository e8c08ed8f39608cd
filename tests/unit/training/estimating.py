"""A small net, its data and its ``model_fn``, for the tests of Estimators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import EstimatorSpec, ModeKeys, get_or_create

NUM_EXAMPLES = 50
BATCH_SIZE = 12
LEARNING_RATE = 0.05


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(NUM_EXAMPLES, 7, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def loader(shuffle: bool = False, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(data(), **{"batch_size": BATCH_SIZE, "shuffle": shuffle, **arguments})


def make_net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


def model_fn(features: Any, labels: Any, mode: ModeKeys, params: Mapping[str, Any]) -> EstimatorSpec:
    net = get_or_create("net", lambda: make_net(params.get("dropout", 0.0)))
    logits = net(features)
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions={"class": logits.argmax(1), "logits": logits})
    loss = nn.functional.cross_entropy(logits, labels)
    if mode == ModeKeys.EVAL:
        wrong = logits.argmax(1) != labels
        return EstimatorSpec(mode, loss=loss, metrics={"accuracy": ("accuracy", logits, labels), "wrong": wrong})
    optimizer = get_or_create("optimizer", lambda: torch.optim.SGD(net.parameters(), LEARNING_RATE, momentum=0.9))
    return EstimatorSpec(mode, loss=loss, optimizer=optimizer)


def trained_by_hand(num_steps: int, **arguments: Any) -> dict[str, torch.Tensor]:
    """The weights after so many plain steps, the examples in their order."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE, momentum=0.9)
    done = 0
    while True:
        for x, y in loader(**arguments):
            if done == num_steps:
                return net.state_dict()
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            done += 1
