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


def test_of_models_that_are_gone_one_replica_keeps_nothing() -> None:
    strategy = sg.OneDeviceStrategy()

    def trial() -> weakref.ref[object]:
        with strategy.scope():
            net = torch.nn.Linear(2, 1)
        model, optimizer = strategy.prepare(net, torch.optim.Adam(net.parameters(), 0.1))

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        strategy.run(step, args=(torch.ones(4, 2),))
        return weakref.ref(net.weight)

    gone = []
    for _ in range(5):
        gone.append(trial())
        while gc.collect():
            pass
    assert [one() for one in gone[:-1]] == [None] * 4
    assert [len(strategy.prepared._parameters), len(strategy._known)] == [2, 0]


def test_a_step_of_who_was_not_prepared_is_refused_in_the_place_of_one_that_is_gone() -> None:
    strategy = sg.OneDeviceStrategy()
    net = torch.nn.Linear(2, 1)
    strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    gc.collect()
    numbers = {*strategy.prepared._optimizers}
    other = torch.nn.Linear(2, 1)
    made = [torch.optim.SGD(other.parameters(), 0.1) for _ in range(100)]
    made.sort(key=lambda one: id(one) not in numbers)  # first the one in its place, where there is one
    with pytest.raises(sg.ConfigurationError, match="the optimizer was not prepared"):
        strategy.run(made[0].step)


def test_of_variables_that_are_gone_a_strategy_keeps_nothing() -> None:
    strategy = sg.OneDeviceStrategy()
    with strategy.scope():
        kept = [sg.Variable(float(number)) for number in range(6)][::2]
    while gc.collect():
        pass
    assert strategy.variables() == kept and len(strategy._variables) == 3
