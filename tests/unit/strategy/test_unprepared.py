"""What is in a step and was not prepared, and works in one process: a loss with weights of its own, an average."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch.optim.swa_utils import AveragedModel

import stratagem as sg
from stratagem.errors import ConfigurationError

SAYS = "of shape [3] of a Center got a gradient inside strategy.run but was not prepared"


class Center(torch.nn.Module):
    """A loss with a centre that is to be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.center = torch.nn.Parameter(torch.ones(3))

    def forward(self, outputs: torch.Tensor) -> torch.Tensor:
        return (outputs - self.center).square().mean()


def trained(strategy: sg.Strategy, center: Center, *also: Any) -> None:
    net = torch.nn.Linear(2, 3)
    model, optimizer, *_ = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1), *also)

    def step() -> None:
        optimizer.zero_grad()
        center(model(torch.ones(4, 2))).backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step)


@pytest.mark.parametrize("is_scope", [False, True])
def test_a_loss_with_weights_is_warned_of_once_or_refused(
    strategy: sg.Strategy, caplog: pytest.LogCaptureFixture, is_scope: bool
) -> None:
    """On a ring each worker had a centre of its own, where a script updates it by hand or after the step."""
    if is_scope:
        with strategy.scope():
            center = Center()
        with pytest.raises(ConfigurationError, match=r"built inside strategy\.scope\(\), got a gradient"):
            trained(strategy, center)
    else:
        trained(strategy, Center())
        assert caplog.text.count(SAYS) == 1


def test_another_optimizer_of_what_one_trains_is_refused(strategy: sg.Strategy) -> None:
    """Every replica stepped the weights of the first, and a last step like that was not noticed."""
    net = torch.nn.Linear(2, 3)
    model, _ = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    another = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        model(torch.ones(4, 2)).square().mean().backward()
        another.step()

    with pytest.raises(
        ConfigurationError, match=r"SGD\.step\(\) inside strategy\.run, but the optimizer was not prepared"
    ):
        strategy.run(step)


CASES = ["prepared", "frozen", "of another strategy", "outside of run", "one device", "one replica"]


@pytest.mark.parametrize("case", CASES)
def test_one_that_is_not_trained_here_is_not_warned_of(
    strategy: sg.Strategy, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    center = Center()
    if case == "prepared":
        center, _ = strategy.prepare(center, torch.optim.SGD(center.parameters(), 0.1))
        trained(strategy, center)
    elif case == "frozen":
        trained(strategy, center.requires_grad_(False))
    elif case == "of another strategy":
        sg.OneDeviceStrategy("cpu").prepare(center, torch.optim.SGD(center.parameters(), 0.1))
        trained(strategy, center)
    elif case in ("one device", "one replica"):
        trained(sg.OneDeviceStrategy("cpu") if case == "one device" else sg.MirroredStrategy(["cpu:0"]), center)
        assert center.center.grad is not None
    else:
        strategy.run(lambda: None)
        center(torch.ones(3)).backward()
        assert center.center.grad is not None
    assert SAYS not in caplog.text


@pytest.mark.parametrize("make", [lambda: sg.OneDeviceStrategy("cpu"), lambda: sg.MirroredStrategy(["cpu:0"])])
def test_a_layer_that_is_replaced_after_prepare_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, make: Callable[[], sg.Strategy]
) -> None:
    """With one replica it kept its first weights, without a word."""
    strategy = make()
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    assert isinstance(model, torch.nn.Sequential)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()

    strategy.run(step)
    assert "after strategy.prepare" not in caplog.text
    model[1] = torch.nn.Linear(3, 2)
    for _ in range(2):
        strategy.run(step)
    strategy.close()
    said = [record.getMessage() for record in caplog.records if "after strategy.prepare" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith(("1.weight was put", "1.bias was put"))


def test_modules_are_not_kept(strategy: sg.Strategy) -> None:
    from stratagem.strategy.prepared import _outside

    strategy.run(lambda: None)
    centers = [Center() for _ in range(3)]
    assert len(_outside) == 3
    del centers
    assert not _outside


def test_an_average_in_a_step_is_refused(strategy: sg.Strategy) -> None:
    """Each replica updated the same one: two updates a step, of weights that another one was writing."""
    net = torch.nn.Linear(2, 3)
    model = strategy.prepare(net)
    average = AveragedModel(model)
    average.update_parameters(model)
    with pytest.raises(ConfigurationError, match="the average was not prepared"):
        strategy.run(lambda: average.update_parameters(model))
    assert int(average.n_averaged) == 1
    alone = sg.OneDeviceStrategy("cpu")
    alone.run(lambda: average.update_parameters(net))
    assert int(average.n_averaged) == 2


def test_an_average_that_is_kept_beside_its_prepared_one_is_refused(strategy: sg.Strategy) -> None:
    """A step with what was given to prepare, or with a method that was looked up before: two updates a step."""
    model: Any = torch.nn.Linear(2, 3)
    given: Any = AveragedModel(model)
    model, average = strategy.prepare(model, given)
    for update in (given.update_parameters, average.update_parameters):
        with pytest.raises(ConfigurationError, match="replica 1 called AveragedModel of replica 0"):
            strategy.run(lambda: update(model))  # noqa: B023
    strategy.run(lambda: average.update_parameters(model))


def test_a_metric_inside_a_model_is_warned_of_once(strategy: sg.Strategy, caplog: pytest.LogCaptureFixture) -> None:
    """Its value was that of the first replica's examples, and nothing said so."""
    net: Any = torch.nn.Linear(2, 3)
    net.count, beside = torchmetrics.SumMetric(), torchmetrics.SumMetric()
    model: Any = strategy.prepare(net, beside)[0]

    def step() -> None:
        model.count.update(1.0)
        beside.update(1.0)

    for _ in range(2):
        strategy.run(step)
    assert (float(model.count.compute()), float(beside.compute())) == (2.0, 4.0)
    assert caplog.text.count("the metric count is a part of a Linear") == 1
    caplog.clear()
    alone = sg.OneDeviceStrategy("cpu")
    alone.run(alone.prepare(copy.deepcopy(net)).count.update, args=(1.0,))
    assert "the metric" not in caplog.text


def test_options_of_updates_without_an_optimizer_are_told(caplog: pytest.LogCaptureFixture) -> None:
    strategy, net = sg.OneDeviceStrategy("cpu"), torch.nn.Linear(2, 3)
    strategy.prepare(net, clip_norm=1.0, nan="skip")
    assert "prepare(clip_norm=1.0, nan='skip'): no effect without an optimizer" in caplog.text
    caplog.clear()
    strategy.prepare(torch.optim.SGD(net.parameters(), 0.1), clip_norm=1.0, nan="skip")
    assert "no effect" not in caplog.text


def test_options_of_an_optimizer_that_was_prepared_without_them_are_told(caplog: pytest.LogCaptureFixture) -> None:
    strategy, net = sg.OneDeviceStrategy("cpu"), torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        strategy.prepare(net, optimizer, clip_norm=1.0)
    assert "no effect" not in caplog.text
    strategy.prepare(net, optimizer, clip_norm=2.0)
    assert "prepare(clip_norm=2.0): no effect without an optimizer that was not prepared before" in caplog.text


def test_options_of_models_without_one_are_told(caplog: pytest.LogCaptureFixture) -> None:
    strategy, net = sg.OneDeviceStrategy("cpu"), torch.nn.Linear(2, 3)
    strategy.prepare(net)
    strategy.prepare(torch.optim.SGD(net.parameters(), 0.1), sync_batchnorm=True, memory_format=torch.channels_last)
    words = "prepare(sync_batchnorm=True, memory_format=torch.channels_last): no effect without a model"
    assert words in caplog.text


def test_options_of_a_model_that_was_prepared_without_them_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A model that predicts before it is compiled is prepared then."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    for predicts_first in (False, True):
        with strategy.scope():
            model = sg.Model(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)))
        if predicts_first:
            model.predict(torch.ones(4, 1), verbose=0)
        for _ in range(2):
            model.compile("sgd", "mse", sync_batchnorm=True)
        assert ("prepare(sync_batchnorm=True): no effect without a model that was not" in caplog.text) is predicts_first
    strategy.close()


@pytest.mark.parametrize("first", ["mean", "sum"])
def test_an_optimizer_and_its_model_are_prepared_with_the_same_gradients(first: Any) -> None:
    """On several replicas the model's word counted, on parameter servers the optimizer's."""
    strategy, net, other = sg.OneDeviceStrategy("cpu"), torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    strategy.prepare(net, gradients=first)
    strategy.prepare(other, gradients="mean")
    now: Any = "sum" if first == "mean" else "mean"
    with pytest.raises(ConfigurationError, match=f"of SGD, whose model was prepared with gradients='{first}'"):
        strategy.prepare(torch.optim.SGD(net.parameters(), 0.1), gradients=now)
    strategy.prepare(torch.optim.SGD(net.parameters(), 0.1), gradients=first)


@pytest.mark.parametrize("way", ["sum", "term", "mean", "prepared", "weighted", "penalty", "alone"])
def test_a_loss_that_adds_up_its_examples_is_told(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """It trained with half the gradient of one process, without a word."""
    strategy = sg.OneDeviceStrategy("cpu") if way == "alone" else sg.MirroredStrategy(["cpu:0", "cpu:1"])
    net = torch.nn.Linear(2, 1)
    told: Any = "sum" if way == "prepared" else "mean"
    prepared, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1), gradients=told)
    before, inputs = [each.detach().clone() for each in net.parameters()], torch.ones(4, 2)

    def step(part: torch.Tensor) -> torch.Tensor:
        outputs, of_sum = prepared(part), way not in ("mean", "penalty")
        loss = torch.nn.functional.mse_loss(outputs, torch.zeros(len(part), 1), reduction="sum" if of_sum else "mean")
        if way == "weighted":
            strategy.set_weight(len(part))
        if way in ("term", "penalty"):
            loss = loss + prepared.weight.square().sum()
        loss.backward()
        optimizer.step()
        return loss

    examples: Any = inputs
    for batch in strategy.distribute_dataset(torch.utils.data.DataLoader(examples, batch_size=4)):
        strategy.run(step, args=(batch,))
    assert ("a loss with reduction='sum'" in caplog.text) is (way in ("sum", "term"))
    if way in ("alone", "prepared"):
        output = (inputs[0] * before[0]).sum() + before[1]
        assert torch.allclose(net.bias.detach(), before[1] - 0.1 * 2 * 4 * output)
    strategy.close()


def test_a_loss_of_many_terms_is_looked_at() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    net = torch.nn.Linear(2, 1)
    prepared, _ = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1))

    def step() -> torch.Tensor:
        loss: torch.Tensor = prepared(torch.ones(1, 2)).sum()
        for _ in range(3000):
            loss = loss + loss.detach()
        return (loss + loss) + (loss + loss)

    strategy.run(step)
    strategy.close()


@pytest.mark.parametrize("make", [sg.OneDeviceStrategy, sg.MirroredStrategy, sg.CentralStorageStrategy])
def test_an_interrupted_prepare_is_not_taken_for_a_whole_one(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second prepare connected nothing, and a step was not clipped."""
    strategy = make("cpu" if make is sg.OneDeviceStrategy else ["cpu:0", "cpu:1"])
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(strategy._local), "together", interrupt)
        with pytest.raises(KeyboardInterrupt):
            strategy.prepare(net, optimizer, clip_norm=1e-3)
    with pytest.raises(ConfigurationError, match=r"of this Linear was interrupted.* build the model and the optimizer"):
        strategy.prepare(net, optimizer, clip_norm=1e-3)
    other = torch.nn.Linear(2, 1)
    other, optimizer = strategy.prepare(other, torch.optim.SGD(other.parameters(), 1.0), clip_norm=1e-3)
    before = other.weight.detach().clone()

    def step() -> None:
        other(torch.full((4, 2), 100.0)).mean().backward()
        optimizer.step()

    strategy.run(step)
    assert 0 < (other.weight.detach() - before).norm() < 2e-3
    strategy.close()
