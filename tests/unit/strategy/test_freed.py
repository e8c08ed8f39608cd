"""A strategy that nobody refers to any more is freed, with its threads and with what was prepared."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import stratagem as sg

Kind = type[sg.MirroredStrategy] | type[sg.CentralStorageStrategy]


def train(kind: Kind) -> list[weakref.ref[object]]:
    """One step; references to what should be gone after it."""
    strategy = kind(["cpu:0", "cpu:1"])
    net = torch.nn.Linear(2, 1)
    model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    strategy.run(step, args=(torch.ones(4, 2),))
    return [weakref.ref(one) for one in (strategy, net, net.weight)]


@pytest.mark.parametrize("kind", [sg.MirroredStrategy, sg.CentralStorageStrategy])
def test_a_strategy_that_has_trained_is_freed(kind: Kind) -> None:
    left = train(kind)
    while gc.collect():
        pass
    assert [one() for one in left] == [None, None, None]


def test_of_variables_that_are_gone_a_strategy_keeps_nothing() -> None:
    strategy = sg.OneDeviceStrategy()
    with strategy.scope():
        kept = [sg.Variable(float(number)) for number in range(6)][::2]
    while gc.collect():
        pass
    assert strategy.variables() == kept and len(strategy._variables) == 3
