"""Models with more than weights: averages that the step takes, integer parameters, layers without a shape."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.errors import ConfigurationError
from stratagem.strategy.replicas.copyable import check_shapes
from stratagem.strategy.synchronous import SynchronousStrategy
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.step_meter import StepMeter
from tests.unit.ring.thread_group import run_ranks


def averaged(strategy: sg.Strategy, fn: Any) -> tuple[int, torch.Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(9, 4)
    with strategy.scope():
        model: Any = torch.nn.Linear(4, 1)
        average: Any = AveragedModel(model, multi_avg_fn=fn)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, average = strategy.prepare(model, optimizer, average)

    def step(batch: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        model(batch[0]).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)

    for batch in strategy.distribute_dataset(DataLoader(TensorDataset(inputs), batch_size=4)):
        strategy.run(step, args=(batch,))
    found = int(average.n_averaged), torch.cat([each.detach().flatten() for each in average.module.parameters()])
    strategy.close()
    return found


@pytest.mark.parametrize("fn", [None, get_ema_multi_avg_fn(0.9)], ids=["mean", "exponential"])
def test_an_average_counts_a_step_of_which_a_replica_has_no_share(fn: Any) -> None:
    """Its counter was put back there: the replicas parted, and whoever read the message looked in vain."""
    count, weights = averaged(sg.MirroredStrategy(["cpu:0", "cpu:1"]), fn)
    expected_count, expected = averaged(sg.OneDeviceStrategy("cpu"), fn)
    assert count == expected_count == 3
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)


def test_statistics_of_an_average_are_taken_outside_of_run() -> None:
    """Its BatchNorm waited five minutes for that of the other replica."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    torch.manual_seed(0)
    inputs = torch.randn(8, 3)
    net, expected = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    model, _ = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1), sync_batchnorm=True)
    average = AveragedModel(model)
    update_bn([inputs], average)
    update_bn([inputs], expected)
    torch.testing.assert_close(average.module.running_var, expected.running_var)
    strategy.close()


def test_statistics_on_a_ring_are_of_the_step_or_of_what_is_given() -> None:
    """Those of a plain loader counted each example once for every worker: a variance of 16/15, not of 8/7."""
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.BatchNorm1d(3)
    update_bn([inputs], expected)

    def work(communicator: Communicator) -> None:
        strategy = SynchronousStrategy((torch.device("cpu"),), StepMeter(), workers=communicator)
        model = strategy.prepare(torch.nn.BatchNorm1d(3), sync_batchnorm=True)
        average: Any = AveragedModel(model)
        dataset = strategy.distribute_dataset([inputs])
        for batch in dataset:
            strategy.run(model, args=(batch,))
            torch.testing.assert_close(model.running_mean, inputs.mean(0) * 0.1)
        update_bn(dataset, average)
        torch.testing.assert_close(average.module.running_var, expected.running_var)
        if not communicator.rank:  # nobody else has to come
            update_bn([inputs], average)
            torch.testing.assert_close(average.module.running_var, expected.running_var)
        strategy.close()

    run_ranks(2, work)


def test_an_integer_parameter_is_copied() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    model: Any = torch.nn.Linear(3, 2)
    model.codes = torch.nn.Parameter(torch.arange(4), requires_grad=False)
    model, _ = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert [codes.tolist() for codes in strategy.local_results(strategy.run(lambda: model.codes + 0))] == [
        [0, 1, 2, 3]
    ] * 2
    strategy.close()


def test_lazy_layers_are_refused_in_words() -> None:
    with pytest.raises(ConfigurationError, match="call the model once on a batch before strategy"):
        check_shapes(torch.nn.Sequential(torch.nn.LazyLinear(2)))


class _Follows(torch.nn.Module):
    """Keeps a mean of its inputs, each time another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 1)
        self.mean: torch.Tensor | None
        self.register_buffer("mean", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mean = inputs.detach().mean(0).double()
        self.mean = mean if self.mean is None else 0.5 * self.mean + 0.5 * mean
        return torch.Tensor(self.inner(inputs))


@pytest.mark.parametrize("kind", [sg.MirroredStrategy, sg.CentralStorageStrategy])
def test_a_buffer_that_forward_replaces_is_kept_from_an_empty_batch(kind: Any) -> None:
    """It was NaN from then on; and central storage could take no buffer of another kind than it had."""
    strategy = kind(["cpu:0", "cpu:1"])
    model = strategy.prepare(_Follows())
    batches = strategy.distribute_dataset([torch.tensor([[1.0, 3.0], [5.0, 3.0]]), torch.tensor([[3.0, 7.0]])])
    for batch in batches:
        strategy.run(lambda inputs: model(inputs).sum(), args=(batch,))
    found = strategy.local_results(strategy.run(lambda: model.mean))
    assert [each.tolist() for each in found] == [[2.0, 5.0], [5.0, 3.0]]
    if kind is sg.CentralStorageStrategy:
        assert model.mean.dtype is torch.float64 and model.mean.tolist() == pytest.approx([3.0, 13.0 / 3])
    strategy.close()


def by_hand(kind: str) -> None:
    """A moving average of weights that a step of two replicas keeps itself."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    model: Any = torch.nn.Linear(4, 1)
    average: Any = copy.deepcopy(model)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    total = torch.zeros(())

    def update(kept: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for own, new in zip(kept, model.parameters(), strict=True):
                own.lerp_(new, 0.1)

    def step(batch: list[torch.Tensor]) -> None:
        here: Any = sg.get_replica_context()
        optimizer.zero_grad()
        loss = model(batch[0]).square().mean()
        loss.backward()
        optimizer.step()
        total.add_(loss.detach())  # of all replicas
        if kind == "model":
            update(list(average.parameters()))
        elif kind == "weights" or (kind == "once" and here.replica_id_in_sync_group == 0):
            update(list(weights.values()))

    for batch in strategy.distribute_dataset(DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)):
        strategy.run(step, args=(batch,))
    strategy.close()


@pytest.mark.parametrize("kind", ["model", "weights", "once", ""])
def test_an_average_kept_by_hand_in_a_step_is_warned_of(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """It moved once per replica, and nothing said so."""
    by_hand(kind)
    told = [record.getMessage() for record in caplog.records if "moving average" in record.getMessage()]
    name = {"model": "average", "weights": "weights"}.get(kind)
    assert [each.split(" was not prepared")[0] for each in told] == ([name] if name else [])
