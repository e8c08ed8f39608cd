"""Gradients that a script changes between two steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import stratagem as sg
from stratagem.arguments import warn_once
from stratagem.errors import ConfigurationError


@pytest.mark.parametrize("change", ["write", "replace"])
@pytest.mark.parametrize("build", [sg.MirroredStrategy, sg.CentralStorageStrategy])
def test_all_replicas_go_on_with_them(build: Callable[[list[str]], sg.Strategy], change: str) -> None:
    def trained(strategy: sg.Strategy) -> torch.Tensor:
        torch.manual_seed(0)
        own = torch.nn.Linear(4, 1, bias=False).double()
        model, optimizer = strategy.prepare(own, torch.optim.SGD(own.parameters(), 0.1))

        def step(batch: torch.Tensor) -> None:
            (model(batch) - 1).square().mean().backward()
            optimizer.step()

        try:
            for batch in strategy.distribute_dataset([torch.randn(4, 4).double() for _ in range(4)]):
                strategy.run(step, args=(batch,))
                assert own.weight.grad is not None
                if change == "write":
                    own.weight.grad.mul_(0.5)
                else:
                    own.weight.grad = own.weight.grad * 0.5
        finally:
            strategy.close()
        return own.weight.detach()

    torch.testing.assert_close(trained(build(["cpu:0", "cpu:1"])), trained(sg.OneDeviceStrategy("cpu")))


@pytest.mark.parametrize("build", [sg.MirroredStrategy, sg.CentralStorageStrategy])
def test_those_that_no_sync_has_left_can_be_dropped_but_not_changed(
    build: Callable[[list[str]], sg.Strategy],
) -> None:
    """The other replicas were given replica 0's, and their own were lost without a word."""
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double()

    def trained(strategy: sg.Strategy, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
        torch.manual_seed(0)
        own = torch.nn.Linear(4, 1, bias=False).double()
        model, optimizer = strategy.prepare(own, torch.optim.SGD(own.parameters(), 0.1))

        def accumulate(batch: torch.Tensor) -> None:
            with strategy.no_sync():
                (model(batch) - 1).square().mean().backward()

        def step(batch: torch.Tensor) -> None:
            (model(batch) - 1).square().mean().backward()
            optimizer.step()

        try:
            for number, batch in enumerate(strategy.distribute_dataset([inputs, inputs])):
                strategy.run(step if number else accumulate, args=(batch,))
                change(own.weight)
        finally:
            strategy.close()
        return own.weight.detach()

    def drop(weight: torch.Tensor) -> None:
        weight.grad = None

    def zero(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        weight.grad.zero_()

    def halve(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        weight.grad.mul_(0.5)

    for change in (drop, zero):
        wanted = trained(sg.OneDeviceStrategy("cpu"), change)
        torch.testing.assert_close(trained(build(["cpu:0", "cpu:1"]), change), wanted)
    with pytest.raises(
        ConfigurationError, match=r"until a backward\(\) outside of no_sync\(\) it is that of one replica only"
    ):
        trained(build(["cpu:0", "cpu:1"]), halve)


@pytest.mark.parametrize("set_to_zero", [False, True])
def test_those_of_no_sync_that_are_clipped_in_the_step_are_warned_of(
    caplog: pytest.LogCaptureFixture, set_to_zero: bool
) -> None:
    """A ring trained with the sum of clipped parts, without a word."""
    warn_once.cache_clear()
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    own = torch.nn.Linear(4, 1)
    model, optimizer = strategy.prepare(own, torch.optim.SGD(own.parameters(), 0.1))

    def step() -> None:
        with strategy.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        if set_to_zero:
            optimizer.zero_grad(set_to_none=False)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    strategy.run(step)
    assert ("clipping the parts does not clip the whole" in caplog.text) != set_to_zero
    strategy.close()
