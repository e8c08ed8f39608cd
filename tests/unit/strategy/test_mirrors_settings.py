"""Settings of optimizers, schedulers and GradScalers: every step is made alike on all replicas."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import stratagem as sg
from stratagem.errors import ConfigurationError
from tests.unit.strategy.mirrored_replicas import Replicas, equal, loss_of, net, train_step


def test_every_step_has_one_rate_whoever_is_first(replicas: Replicas) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model, optimizer, scheduler = replicas.prepare(model, optimizer, lr_scheduler.StepLR(optimizer, 1, 0.5))
    rates: list[list[float]] = [[], []]
    replicas.after_step(optimizer, lambda replica, its: rates[replica].append(its.param_groups[0]["lr"]))

    def step(replica: int) -> None:
        for _ in range(3):  # replica 0 has stepped its scheduler before replica 1 comes to its optimizer
            optimizer.step()
            scheduler.step()

    replicas.run(step)
    assert rates == [[1.0, 0.5, 0.25]] * 2


def test_a_state_that_is_given_outside_of_replicas(replicas: Replicas) -> None:
    model = net()
    model, optimizer = replicas.prepare(model, torch.optim.SGD(model.parameters(), 1.0, momentum=0.9))
    for _ in range(2):
        replicas.run(lambda replica: train_step(replicas, model, optimizer, replica))
        optimizer.state = collections.defaultdict(dict)  # replica 1 had kept its own
        replicas.run(lambda replica: train_step(replicas, model, optimizer, replica))
        assert equal(*replicas.copies(model))


def test_settings_changed_in_a_step_are_those_of_replica_0(replicas: Replicas) -> None:
    model = net()
    model, optimizer = replicas.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
    seen: list[list[Any]] = [[], []]

    def look(replica: int, its: torch.optim.Optimizer) -> None:
        seen[replica].append((its.param_groups[0]["lr"], its.param_groups[0].get("mark")))

    replicas.after_step(optimizer, look)

    def step(replica: int) -> None:
        optimizer.param_groups[0].update(lr=0.1 + replica, mark="set")
        optimizer.step()
        if replica == 0:
            del optimizer.param_groups[0]["mark"]
        optimizer.step()

    replicas.run(step)
    assert seen == [[(0.1, "set"), (0.1, None)]] * 2


def test_an_object_that_counts_the_steps_of_all_replicas_is_warned_of(
    replicas: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model, optimizer, scheduler = replicas.prepare(model, optimizer, lr_scheduler.StepLR(optimizer, 1, 0.5))
    counts = [0]

    def step(counted: bool) -> None:
        optimizer.step()
        scheduler.step()  # of replica 0, from which the others differ until they step
        counts[0] += counted
        for group in optimizer.param_groups if counted else []:
            group["lr"] = 0.1 * counts[0]
        optimizer.step()

    replicas.run(lambda _: step(counted=False))
    optimizer.param_groups[0]["lr"] = 3.0
    replicas.run(lambda _: step(counted=False))
    assert not caplog.records
    for _ in range(2):
        replicas.run(lambda _: step(counted=True))
    [warning] = caplog.records
    assert (
        "step() of SGD 0: a step set lr to 0.1 on replica 0, whose value is used, and to 0.2 on replica 1"
        in warning.message
    )


def test_settings_changed_outside_reach_all_before_the_run(replicas: Replicas) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model, optimizer, scheduler = replicas.prepare(model, optimizer, lr_scheduler.StepLR(optimizer, 1, 0.5))
    optimizer.step()
    scheduler.step()
    optimizer.param_groups[0]["momentum"] = 0.5
    assert (
        replicas.run(lambda _: (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        == [(0.5, 0.5)] * 2
    )


# -- schedulers ------------------------------------------------------------------------------------------------


def test_plateau_goes_by_the_loss_of_replica_0(replicas: Replicas) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    model, optimizer, scheduler = replicas.prepare(model, optimizer, plateau)

    def step(replica: int) -> None:
        optimizer.step()
        scheduler.step(1.0 if replica == 0 else -float(scheduler.last_epoch))

    for _ in range(3):
        replicas.run(step)
    assert plateau.last_epoch == 3
    assert replicas.run(lambda _: optimizer.param_groups[0]["lr"]) == [0.25, 0.25]


def test_nested_schedulers(replicas: Replicas) -> None:
    def schedulers(optimizer: Any) -> lr_scheduler.LRScheduler:
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        sequence = lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.ExponentialLR(optimizer, 0.5)], [2])
        return lr_scheduler.ChainedScheduler([sequence, lr_scheduler.StepLR(optimizer, 2)], optimizer)

    alone = torch.optim.SGD(net().parameters(), 1.0)
    its = schedulers(alone)
    expected = []
    for _ in range(6):
        alone.step()
        expected.append(alone.param_groups[0]["lr"])
        its.step()
    for early in (True, False):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        before = schedulers(optimizer) if early else None
        model, optimizer = replicas.prepare(model, optimizer)
        scheduler = replicas.prepare(before if before is not None else schedulers(optimizer))
        rates: list[list[float]] = [[], []]

        def note(replica: int, its: torch.optim.Optimizer, rates: list[list[float]] = rates) -> None:
            rates[replica].append(its.param_groups[0]["lr"])

        replicas.after_step(optimizer, note)

        def step(replica: int, optimizer: Any = optimizer, scheduler: Any = scheduler) -> None:
            optimizer.step()
            scheduler.step()

        for _ in range(6):
            replicas.run(step)
        assert rates == [expected, expected]


def test_a_scheduler_on_the_proxy_that_is_not_prepared(replicas: Replicas) -> None:
    model = net()
    model, optimizer = replicas.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)  # warns, if it believes that no step was made before its own
    for expected in (1.0, 0.5, 0.25):
        assert replicas.run(lambda replica: train_step(replicas, model, optimizer, replica)) == [expected] * 2
        scheduler.step()
    assert scheduler.get_last_lr() == [0.125]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    "make", [lambda it: lr_scheduler.StepLR(it, 1, 0.5), lambda it: lr_scheduler.OneCycleLR(it, 1.0, 9)]
)
def test_a_scheduler_that_is_not_prepared_moves_once_in_a_step(
    replicas: Replicas, early: bool, make: Callable[[Any], lr_scheduler.LRScheduler]
) -> None:
    """Each replica moved it, and the settings of the first."""
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
    scheduler = make(optimizer) if early else None
    model, optimizer = replicas.prepare(model, optimizer)
    scheduler = scheduler or make(optimizer)
    alone = torch.optim.SGD(net().parameters(), 1.0, momentum=0.5)
    expected = make(alone)

    def step(replica: int) -> None:
        train_step(replicas, model, optimizer, replica)
        scheduler.step()

    for _ in range(3):
        replicas.run(step)
        alone.step()
        expected.step()
    assert (scheduler.last_epoch, scheduler.get_last_lr()) == (3, expected.get_last_lr())
    rates = replicas.run(lambda replica: train_step(replicas, model, optimizer, replica))
    assert rates == expected.get_last_lr() * 2


def test_a_lambda_that_cannot_be_copied_is_no_hindrance(replicas: Replicas) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    epochs = iter(range(100))
    model, optimizer, scheduler = replicas.prepare(
        model, optimizer, lr_scheduler.LambdaLR(optimizer, lambda _: 1.0 / (1 + next(epochs)))
    )

    def step(replica: int) -> None:
        optimizer.step()
        scheduler.step()

    replicas.run(step)
    assert scheduler.get_last_lr() == [0.5]


# -- GradScaler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_what_one_scaler_finds_makes_all_skip(replicas: Replicas, unscale: bool, fused: bool) -> None:
    model = net()
    model, optimizer, scaler = replicas.prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.1, fused=fused),
        torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1),
    )
    before = copy.deepcopy(model)

    def step(replica: int, broken: bool) -> float:
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        if broken and replica == 1:
            model[0].weight.grad[0, 0] = torch.inf
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scale: float = scaler.get_scale()
        return scale

    assert replicas.run(lambda replica: step(replica, broken=True)) == [4.0, 4.0]
    assert equal(before, replicas.copies(model)[0]) and equal(before, replicas.copies(model)[1])
    assert replicas.run(lambda replica: step(replica, broken=False)) == [8.0, 8.0]
    assert equal(*replicas.copies(model)) and not equal(before, replicas.copies(model)[0])


def test_a_scaler_that_was_not_prepared_is_refused(replicas: Replicas) -> None:
    model = net()
    model, optimizer = replicas.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    scaler = torch.amp.GradScaler("cpu")

    def step(replica: int) -> None:
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)

    with pytest.raises(ConfigurationError, match=r"strategy.prepare\(model, optimizer, scaler\)"):
        replicas.run(step)


def test_a_scaler_is_loaded_on_all_and_steps_inside(replicas: Replicas) -> None:
    model = net()
    model, optimizer, scaler, off = replicas.prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        torch.amp.GradScaler("cpu", init_scale=8.0),
        torch.amp.GradScaler("cpu", enabled=False),
    )
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=32.0).state_dict())
    assert replicas.run(lambda _: scaler.get_scale()) == [32.0, 32.0]
    with pytest.raises(ConfigurationError, match=r"call step\(optimizer\) in the step"):
        scaler.step(optimizer)

    def step(replica: int) -> None:
        loss_of(model).backward()
        off.step(optimizer)

    replicas.run(step)
    assert equal(*replicas.copies(model))


def test_a_scaler_is_updated_outside() -> None:
    """Only replica 0's was: "step() has already been called" in the next step of the others."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    own = torch.nn.Linear(4, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    model, optimizer, scaler = strategy.prepare(own, torch.optim.SGD(own.parameters(), 0.1), scaler)

    def step() -> float:
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        return float(scaler.get_scale())

    scales = []
    for _ in range(3):
        scales.append(strategy.local_results(strategy.run(step)))
        scaler.update()
    assert scales == [(8.0, 8.0), (8.0, 8.0), (16.0, 16.0)]
    strategy.close()
