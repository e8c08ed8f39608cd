"""What is particular to replicas that compute with one copy of the variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.errors import ConfigurationError


@pytest.mark.parametrize("sparse", [False, True])
def test_a_second_step_has_the_clipped_gradient(sparse: bool) -> None:
    """It was refused: only the first replica's gradient had been clipped."""

    def trained(strategy: sg.Strategy) -> torch.Tensor:
        torch.manual_seed(0)
        own = torch.nn.Embedding(4, 2, sparse=sparse)
        model, optimizer = strategy.prepare(own, torch.optim.SGD(own.parameters(), 0.1), clip_norm=0.01)

        def step(batch: torch.Tensor) -> None:
            model(batch).square().sum(1).mean().backward()
            optimizer.step()
            optimizer.step()

        try:
            for batch in strategy.distribute_dataset([torch.arange(4)] * 2):
                strategy.run(step, args=(batch,))
        finally:
            strategy.close()
        return own.weight.detach()

    central = sg.CentralStorageStrategy(["cpu:0", "cpu:1"])
    torch.testing.assert_close(trained(central), trained(sg.OneDeviceStrategy("cpu")))


def test_a_rate_that_each_replica_counts_is_that_of_replica_0(caplog: pytest.LogCaptureFixture) -> None:
    """The count, and what each multiplied the rate by, ran ahead without a word."""
    strategy = sg.CentralStorageStrategy(["cpu:0", "cpu:1"])
    own = torch.nn.Linear(2, 1)
    model, optimizer = strategy.prepare(own, torch.optim.SGD(own.parameters(), 1.0))
    num_steps = 0

    def step(batch: torch.Tensor, counting: bool) -> float:
        nonlocal num_steps
        num_steps += 1
        group = optimizer.param_groups[0]
        group["lr"] = 0.5**num_steps if counting else group["lr"] * 0.5
        model(batch).mean().backward()
        optimizer.step()
        return float(group["lr"])

    batches = iter(strategy.distribute_dataset([torch.ones(4, 2)] * 4))
    for rate in (0.5, 0.25):
        assert strategy.local_results(strategy.run(step, args=(next(batches), False))) == (rate, rate)
    assert optimizer.param_groups[0]["lr"] == 0.25 and not _warnings(caplog)
    for _ in range(2):
        strategy.run(step, args=(next(batches), True))
    strategy.close()
    (told,) = _warnings(caplog)
    assert (
        told.startswith("step() of SGD 0: a step set lr to 0.0")
        and "on replica 0, whose value is used, and to 0.0" in told
    )


@pytest.mark.parametrize("who", [(), (0,), (0, 1)])
def test_weights_that_several_replicas_write_to_are_told_of(
    caplog: pytest.LogCaptureFixture, who: tuple[int, ...]
) -> None:
    """What a step changed in them by hand was done once by each, without a word."""
    strategy = sg.CentralStorageStrategy(["cpu:0", "cpu:1"])
    own = torch.nn.Linear(2, 1)
    model, optimizer = strategy.prepare(own, torch.optim.SGD(own.parameters(), 1.0))

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
        context = sg.get_replica_context()
        assert context is not None
        if context.replica_id_in_sync_group in who:
            with torch.no_grad():
                model.bias.mul_(0.9)

    for batch in strategy.distribute_dataset([torch.ones(4, 2)] * 3):
        strategy.run(step, args=(batch,))
        with torch.no_grad():
            own.weight.mul_(0.9)
    strategy.close()
    told = [text[:47] for text in _warnings(caplog)]
    assert told == ["bias was written to in a step, by 2 replicas: i"] * (len(who) == 2)


def test_a_group_is_added_outside_of_steps() -> None:
    """In one, the next update ended in an AttributeError."""
    strategy = sg.CentralStorageStrategy(["cpu:0", "cpu:1"])
    own = torch.nn.Linear(2, 1)
    model, optimizer = strategy.prepare(own, torch.optim.SGD([own.weight], 1.0))

    def add() -> None:
        optimizer.add_param_group({"params": [model.bias], "lr": 0.5})

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()

    with pytest.raises(sg.ConfigurationError, match=r"Call it outside of strategy\.run"):
        strategy.run(add)
    add()
    before = own.bias.item()
    strategy.run(step)
    strategy.close()
    assert own.bias.item() == pytest.approx(before - 0.5)


def test_a_model_that_is_done_with_loses_its_head() -> None:
    strategy = sg.CentralStorageStrategy(["cpu:0", "cpu:1"])
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        before = model[0].weight.clone()

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        strategy.run(step)
        assert not torch.equal(model[0].weight, before)
        del model[1]
    with pytest.raises(sg.ConfigurationError, match="no step can use it until then"):
        strategy.run(step)
    strategy.close()


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_gradients_of_parameters_that_were_taken_outside_of_the_step() -> None:
    """They are those of the step before: nothing was clipped, or set to None, without a word."""
    strategy = sg.CentralStorageStrategy(["cpu:0", "cpu:1"])
    model, optimizer = strategy.prepare(own := torch.nn.Linear(2, 1), torch.optim.SGD(own.parameters(), 0.1))
    outside = list(model.parameters())

    def clip(parameters: list[torch.Tensor]) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)

    def clear(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = None

    def step(use: Callable[[list[torch.Tensor]], None], taken: list[torch.Tensor] | None = None) -> None:
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(2, 2)).sum().backward()
        use(taken or list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()

    for use in (clip, clear):
        for _ in range(2):
            strategy.run(step, args=(clip,))
        with pytest.raises(ConfigurationError, match=r"the gradient of a parameter of all replicas.*Take it"):
            strategy.run(step, args=(use, outside))
    strategy.run(step, args=(clip,))
    strategy.close()
