"""Training with a copy of everything on each replica: steps, settings, and what is prepared together or later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.strategy.replicas.replica_threads import current_replica
from tests.unit.strategy.mirrored_replicas import (
    INPUTS,
    TARGETS,
    Replicas,
    equal,
    loss_of,
    mirror,
    net,
    objects_of,
    proxies,
    train_step,
)

Optimizers = Callable[[Any], torch.optim.Optimizer]


OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.02),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.02, fused=True),
    "rate in a tensor": lambda parameters: torch.optim.Adam(parameters, torch.tensor(0.02), foreach=False),
}


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_two_replicas_train_as_one_process(replicas: Replicas, build: Optimizers) -> None:
    alone = net()
    its_optimizer = build(alone.parameters())
    its_scheduler = lr_scheduler.ExponentialLR(its_optimizer, 0.8)
    own = net()
    optimizer = build(own.parameters())
    model, optimizer, scheduler = replicas.prepare(own, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.8))

    def step(replica: int) -> float:
        rate = train_step(replicas, model, optimizer, replica)
        scheduler.step()
        return rate

    for _ in range(5):
        its_optimizer.zero_grad()
        loss_of(alone).backward()
        rate = float(its_optimizer.param_groups[0]["lr"])
        its_optimizer.step()
        its_scheduler.step()
        assert replicas.run(step)[0] == pytest.approx(rate)
        assert equal(*replicas.copies(model))
    for mine, theirs in zip(own.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    assert scheduler.last_epoch == its_scheduler.last_epoch == 5


def test_a_skipped_step_is_an_error_that_names_both(replicas: Replicas) -> None:
    model = net()
    model, optimizer = replicas.prepare(model, torch.optim.SGD(model.parameters(), 1.0))

    def step(replica: int) -> None:
        if replica == 1:
            optimizer.step()

    with pytest.raises(CollectiveError, match=r"replica 0 .*") as caught:
        replicas.run(step)
    assert "step() of SGD 0" in str(caught.value) and "replica 1" in str(caught.value)


def test_a_step_outside_is_made_by_all(replicas: Replicas) -> None:
    model = net()
    model, optimizer = replicas.prepare(model, torch.optim.Adam(model.parameters()))
    replicas.run(lambda replica: train_step(replicas, model, optimizer, replica))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    replicas.run(lambda _: None)
    assert equal(*replicas.copies(model))
    first, second = (its.state_dict()["state"] for its in replicas.copies(optimizer))
    assert first[0]["step"] == second[0]["step"] == 2
    assert torch.equal(first[0]["exp_avg"], second[0]["exp_avg"])
    assert first[0]["exp_avg"].data_ptr() != second[0]["exp_avg"].data_ptr()


def test_two_optimizers_of_two_models_that_share_a_layer(replicas: Replicas) -> None:
    body = nn.Linear(4, 8)
    models = [nn.Sequential(body, nn.Linear(8, 1)) for _ in range(2)]
    optimizers = [torch.optim.SGD(models[0].parameters(), 0.1), torch.optim.SGD(models[1][1].parameters(), 0.1)]
    *models, one, two = replicas.prepare(*models, *optimizers)
    first, second = (replicas.copies(model)[1] for model in models)
    assert first[0] is second[0] and first[0] is not body and first[1] is not second[1]
    assert [id(p) for p in replicas.copies(one)[1].param_groups[0]["params"]] == [id(p) for p in first.parameters()]

    def step(replica: int) -> None:
        for model, optimizer in zip(models, (one, two), strict=True):
            train_step(replicas, model, optimizer, replica)

    for _ in range(2):
        replicas.run(step)
    assert all(equal(*replicas.copies(model)) for model in models)
    assert not equal(*(copy.deepcopy(model[1]) for model in models))


def test_tied_parameters_stay_tied(replicas: Replicas) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    twin = replicas.copies(replicas.prepare(model))[1]
    assert twin[1].weight is twin[0].weight


def test_state_gradients_and_hooks_from_before_are_carried_over(replicas: Replicas) -> None:
    own: Any = net()
    optimizer = torch.optim.Adam(own.parameters())
    loss_of(own).backward()
    optimizer.step()
    called: list[torch.optim.Optimizer] = []
    optimizer.register_step_post_hook(lambda its, args, kwargs: called.append(its))
    own[0].weight.register_hook(lambda gradient: 2 * gradient)
    own[0].weight.mark = "kept"
    model, optimizer = replicas.prepare(own, optimizer)
    first, second = replicas.copies(model)
    its = replicas.copies(optimizer)
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad) and mine.grad.data_ptr() != theirs.grad.data_ptr()
        assert its[1].state[theirs]["step"] == 1 and mine not in its[1].state
        assert torch.equal(its[0].state[mine]["exp_avg"], its[1].state[theirs]["exp_avg"])
    assert second[0].weight.mark == "kept"
    grads = replicas.run(lambda _: torch.autograd.grad(model[0].weight.sum(), model[0].weight)[0])
    assert torch.equal(grads[1], torch.full((8, 4), 2.0)) and torch.equal(grads[0], grads[1])
    replicas.run(lambda _: optimizer.step())
    assert [any(one is seen for seen in called) for one in its] == [True, True]


def test_optimizer_prepared_after_its_model(replicas: Replicas) -> None:
    model = replicas.prepare(net())
    optimizer = replicas.prepare(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    scheduler = replicas.prepare(lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2))
    for _ in range(2):
        assert replicas.run(lambda replica: train_step(replicas, model, optimizer, replica))[0] == 0.05
    replicas.run(lambda _: scheduler.step())
    assert equal(*replicas.copies(model))
    assert replicas.prepare(model) is model and replicas.prepare(optimizer) is optimizer
    assert replicas.prepare(replicas.copies(model)[0]) is model


def test_a_model_built_around_a_prepared_one(replicas: Replicas) -> None:
    body = replicas.prepare(nn.Linear(4, 8))
    whole = replicas.prepare(nn.Sequential(body, nn.Linear(8, 1)))
    optimizer = replicas.prepare(torch.optim.SGD(whole.parameters(), 0.1))
    replicas.run(lambda replica: train_step(replicas, whole, optimizer, replica))
    assert equal(*replicas.copies(whole)) and equal(*replicas.copies(body))
    assert replicas.copies(whole)[1][0] is replicas.copies(body)[1]


def test_objects_may_come_in_any_order(replicas: Replicas) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    prepared = replicas.prepare(scheduler, optimizer, model)
    assert list(prepared) == [scheduler, optimizer, model]
    assert prepared[0].optimizer is prepared[1]


def test_mirror_makes_mirrors_of_objects(replicas: Replicas) -> None:
    own = net()
    mirrors = mirror([own], replicas.replica_threads.devices, current_replica, meet=replicas.replica_threads.meet)
    assert proxies(mirrors) == [own] and objects_of(mirrors)[0] == [own] and objects_of(mirrors)[1] != [own]


def test_what_is_kept_is_not_copied(replicas: Replicas) -> None:
    values = [nn.Parameter(torch.full((2,), float(replica))) for replica in range(2)]
    kept: list[tuple[object, object]] = [(values[0], values[1])]

    def keep(replica: int, memo: dict[int, Any]) -> None:
        assert replica == 1
        memo.update((id(one), other) for one, other in kept)

    own: Any = net()
    own.extra = [values[0]]
    optimizer = torch.optim.SGD([*own.parameters(), values[0]], 0.1, momentum=0.9)
    mirrors = mirror(
        [own, optimizer],
        replicas.replica_threads.devices,
        current_replica,
        meet=replicas.replica_threads.meet,
        keep=keep,
    )
    second, its = objects_of(mirrors)[1]
    assert second.extra[0] is values[1] and its.param_groups[0]["params"][-1] is values[1]
    values[0].grad = torch.ones(2)
    optimizer.step()
    mirrors.synchronize()
    assert torch.equal(its.state[values[1]]["momentum_buffer"], torch.ones(2)) and values[0] not in its.state
    kept.clear()  # an address that is free now may be of anything
    own.listed = [values[0]]
    mirrors.synchronize()
    assert second.listed[0] is not values[1]


def test_one_replica_alone() -> None:
    own = net()
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    mirrors = mirror([own, optimizer], [torch.device("cpu")], lambda: None, meet=_nobody_to_meet)
    model, optimizer = proxies(mirrors)
    before = loss_of(model)
    with mirrors.running():
        before.backward()
        optimizer.step()
    assert loss_of(model) < before and len(objects_of(mirrors)) == 1


def _nobody_to_meet(what: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
    raise AssertionError(f"{what} outside of replicas")


def test_groups_added_later(replicas: Replicas) -> None:
    own = net()
    optimizer = torch.optim.SGD(own[2].parameters(), 0.1)
    model, optimizer = replicas.prepare(own, optimizer)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    replicas.run(lambda replica: train_step(replicas, model, optimizer, replica))
    assert equal(*replicas.copies(model)) and len(replicas.copies(optimizer)[1].param_groups) == 2
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ConfigurationError, match="SGD was given tensors that no prepared model has"):
        replicas.run(lambda _: None)


def test_loading_an_optimizer_shares_no_memory(replicas: Replicas) -> None:
    model = net()
    model, optimizer = replicas.prepare(model, torch.optim.Adam(model.parameters()))
    replicas.run(lambda replica: train_step(replicas, model, optimizer, replica))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(saved)
    assert replicas.run(lambda replica: train_step(replicas, model, optimizer, replica)) == [0.5, 0.5]
    assert equal(*replicas.copies(model))
    assert [its.state_dict()["state"][0]["step"] for its in replicas.copies(optimizer)] == [2, 2]


def test_lbfgs_with_a_closure(replicas: Replicas) -> None:
    model = net()
    model, optimizer = replicas.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=4))
    before = loss_of(model).item()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    replicas.run(lambda _: optimizer.step(closure))
    assert equal(*replicas.copies(model)) and loss_of(model).item() < before


def test_an_average_of_weights(replicas: Replicas) -> None:
    model = net()
    model, optimizer = replicas.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    average = AveragedModel(model)
    assert type(average.module) is nn.Sequential
    for _ in range(2):
        replicas.run(lambda replica: train_step(replicas, model, optimizer, replica))
        average.update_parameters(model)
    assert equal(*replicas.copies(model))
    outputs = replicas.run(lambda _: average(INPUTS))  # it is no prepared model: all replicas use the same one
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cpu", "cuda:0"), ("cuda:0", "cpu")])
def test_each_copy_is_on_the_device_of_its_replica(devices: tuple[str, str]) -> None:
    replicas = Replicas(devices)
    own = net()
    optimizer = torch.optim.Adam(own.parameters())
    loss_of(own).backward()
    optimizer.step()
    model, optimizer = replicas.prepare(own, optimizer)
    for device, module, its in zip(devices, replicas.copies(model), replicas.copies(optimizer), strict=True):
        for parameter in module.parameters():
            assert parameter.device.type == parameter.grad.device.type == torch.device(device).type
            assert its.state[parameter]["exp_avg"].device == parameter.device
            assert its.state[parameter]["step"].device.type == "cpu"

    def step(replica: int) -> None:
        device = devices[replica]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(INPUTS.to(device)), TARGETS.to(device)).backward()
        replicas.average_gradients(model)
        optimizer.step()

    for _ in range(3):
        replicas.run(step)
    one, other = (copy.deepcopy(module).cpu() for module in replicas.copies(model))
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    replicas.replica_threads.close()
