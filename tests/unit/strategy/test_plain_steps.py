"""Loops that give `run` plain arguments: their steps are counted too, for errors and summaries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.strategy.synchronous import SynchronousStrategy
from stratagem.worker.reduction.compression import compression_named
from stratagem.worker.step_meter import StepMeter


def test_errors_say_the_step() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    model = torch.nn.Linear(2, 1)
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def step(inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step, args=(torch.ones(4, 2),))

    def part() -> None:
        context = sg.get_replica_context()
        assert context is not None
        if context.replica_id_in_sync_group:
            context.all_gather(torch.ones(1), 0)
        else:
            model(torch.ones(4, 2)).sum().backward()

    with pytest.raises(CollectiveError, match="step 3, collective"):
        strategy.run(part)
    assert strategy._meter.steps == 3
    strategy.close()


def test_a_hook_that_would_find_no_gradient_is_refused() -> None:
    """An optimizer that steps in such a hook never made a step, without a word."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    model, found = torch.nn.Linear(2, 1), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: found.append(parameter.grad))
    model, _ = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    strategy.run(lambda: model(torch.ones(4, 2)).sum().backward())
    assert len(found) == 4 and None not in found
    handle = next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ConfigurationError, match=r"after strategy\.prepare would find no \.grad"):
        strategy.run(lambda: model(torch.ones(4, 2)).sum().backward())
    handle.remove()
    strategy.run(lambda: model(torch.ones(4, 2)).sum().backward())
    strategy.close()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_hook_that_would_change_a_sum_is_refused(set_to_none: bool) -> None:
    """It was given the newest gradient alone, and the weights were others than those of one process."""

    def trained(strategy: sg.Strategy, num_backwards: int) -> torch.Tensor:
        torch.manual_seed(0)
        own = torch.nn.Linear(2, 1)
        for parameter in own.parameters():
            parameter.register_post_accumulate_grad_hook(_halve)
        model, optimizer = strategy.prepare(own, torch.optim.SGD(own.parameters(), 0.1))

        def step() -> None:
            optimizer.zero_grad(set_to_none)
            for _ in range(num_backwards):
                model(torch.ones(4, 2)).sum().backward()
            optimizer.step()

        try:
            for _ in range(2):
                strategy.run(step)
        finally:
            strategy.close()
        return own.weight.detach()

    torch.testing.assert_close(trained(sg.MirroredStrategy(["cpu:0", "cpu:1"]), 1), trained(sg.OneDeviceStrategy(), 1))
    with pytest.raises(ConfigurationError, match="in one process it changes their sum"):
        trained(sg.MirroredStrategy(["cpu:0", "cpu:1"]), 2)


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def test_an_optimizer_that_is_prepared_after_its_model_trains_as_one_prepared_with_it() -> None:
    """What compression left out was owed for ever, and the gradients of every step were compared."""

    def trained(together: bool) -> torch.Tensor:
        torch.manual_seed(0)
        compression = compression_named("topk")
        strategy = SynchronousStrategy([torch.device("cpu")] * 2, StepMeter(), compression=compression)
        model = torch.nn.Linear(300, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if together:
            model, optimizer = strategy.prepare(model, optimizer)
        else:
            model = strategy.prepare(model)
            optimizer = strategy.prepare(optimizer)
        inputs = torch.randn(8, 300)

        def step() -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        for _ in range(5):
            strategy.run(step)

        def unfinished() -> None:
            with strategy.no_sync():
                model(inputs).sum().backward()
            optimizer.step()

        with pytest.raises(ConfigurationError, match=r"after backward\(\) inside no_sync"):
            strategy.run(unfinished)
        strategy.close()
        return torch.Tensor(model.weight.detach())

    torch.testing.assert_close(trained(True), trained(False), rtol=0, atol=0)


def test_a_gradient_that_a_script_sets_on_one_replica_alone_is_named() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    model = torch.nn.Linear(2, 1)
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def step() -> None:
        context = sg.get_replica_context()
        if context is not None and context.replica_id_in_sync_group:
            model.bias.grad = torch.ones(1)
        optimizer.step()

    with pytest.raises(ConfigurationError, match=r"do not come from backward\(\)"):
        strategy.run(step)
    strategy.close()


def test_a_step_within_a_backward_is_refused() -> None:
    """It was said to have gradients that come from no backward, and what was advised for these was refused, too."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    model = torch.nn.Linear(2, 1)
    steppers: list[torch.optim.Optimizer] = []
    model.weight.register_post_accumulate_grad_hook(lambda _: steppers[0].step())
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    steppers.append(optimizer)
    with pytest.raises(ConfigurationError, match=r"within backward\(\), by a hook: .* Step then"):
        strategy.run(lambda: model(torch.ones(4, 2)).sum().backward())
    strategy.close()


def test_a_backward_outside_of_run_is_refused() -> None:
    """It waited for the other replicas for ever. The next run is as if it had not been."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    model = torch.nn.Linear(2, 1)
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()

    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"backward\(\) outside of strategy\.run waits for 2 replicas"):
            step()
        strategy.run(step)
    strategy.close()


def test_batches_of_a_dataset_are_counted_once() -> None:
    strategy = sg.OneDeviceStrategy()
    model = torch.nn.Linear(2, 1)
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def step(inputs: torch.Tensor) -> None:
        model(inputs).sum().backward()
        optimizer.step()

    for batch in strategy.distribute_dataset([torch.ones(4, 2)] * 5):
        strategy.run(step, args=(batch,))
    assert (strategy._meter.steps, strategy._meter.examples) == (5, 20)


@pytest.mark.parametrize("kind", [sg.MirroredStrategy, sg.CentralStorageStrategy])
def test_a_closed_strategy_says_so(kind: type[sg.MirroredStrategy]) -> None:
    strategy = kind(["cpu:0", "cpu:1"])
    strategy.close()
    with pytest.raises(ConfigurationError, match="closed; build a new strategy"):
        strategy.run(lambda: None)


@pytest.mark.parametrize("way", ["distributed", "values", "plain"])
def test_replicas_that_all_train_on_the_same_batch_are_told(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """The loader was not distributed: each replica computed all of it, in the time of one, without a word."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    model = torch.nn.Linear(2, 1)
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    examples: Any = torch.ones(8, 2)
    loader: Any = torch.utils.data.DataLoader(examples, batch_size=4)

    def step(inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()

    for batch in strategy.distribute_dataset(loader) if way == "distributed" else loader:
        if way == "values":
            batch = strategy.distribute_values_from_function(lambda context: torch.ones(2, 2))
        strategy.run(step, args=(batch,))
    assert caplog.text.count("each of the 2 replicas trains on what the script gives it") == (way == "plain")
    strategy.close()
