"""Prepared metrics of torchmetrics in one process, and their values as named numbers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from torch.utils.data import TensorDataset

import stratagem as sg
from stratagem.errors import ConfigurationError
from stratagem.strategy.default import DefaultStrategy
from stratagem.strategy.prepared_metric import PreparedMetric
from stratagem.strategy.ps.metrics import MAX_NUMBERS, CountedMetric, numbers_of, value_from
from stratagem.worker.ring.communicator import Communicator
from tests.unit.ring.healing_ranks import Fate, run_mortal


@pytest.fixture
def strategy() -> Iterator[sg.MirroredStrategy]:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    yield strategy
    strategy.close()


@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all")
def test_all_replicas_count_and_one_without_examples_does_not(strategy: sg.MirroredStrategy) -> None:
    metric = torchmetrics.SpearmanCorrCoef()  # of no values at all it has none
    assert strategy.prepare(metric) is metric and isinstance(metric, torchmetrics.SpearmanCorrCoef)
    values, targets = torch.randn(7), torch.randn(7)
    seen: list[Any] = []
    dataset = strategy.distribute_dataset(TensorDataset(values, targets), batch_size=6)
    for batch in dataset:  # the last one has one example, for one replica
        results = strategy.run(lambda batch: metric(*batch), args=(batch,))
        seen += strategy.local_results(results)
    assert [value is None for value in seen] == [False] * 4 + [True] * 2
    assert metric.compute() == torchmetrics.SpearmanCorrCoef()(values, targets)
    again = torchmetrics.SpearmanCorrCoef()(values.repeat(2), targets.repeat(2))
    for batch in dataset:
        strategy.run(lambda batch: metric.update(*batch), args=(batch,))
    assert metric.compute() == again
    metric.reset()
    with pytest.warns(UserWarning, match="before the ``update`` method"), pytest.raises(ValueError, match="No samples"):
        metric.compute()


def test_states_that_take_their_shape_from_the_first_batch(strategy: sg.MirroredStrategy) -> None:
    metric = strategy.prepare(torchmetrics.R2Score())
    values, targets = torch.randn(4, 2), torch.randn(4, 2)
    for batch in strategy.distribute_dataset(TensorDataset(values, targets), batch_size=4):  # one replica has none
        strategy.run(lambda batch: metric.update(*batch), args=(batch,))
    assert torch.allclose(metric.compute(), torchmetrics.R2Score()(values, targets))


def test_what_is_outside_of_steps_is_said(strategy: sg.MirroredStrategy) -> None:
    metric = strategy.prepare(torchmetrics.MeanMetric())
    metric.update(4.0)
    assert metric.compute() == 4
    for verb in ("compute", "reset"):
        with pytest.raises(ConfigurationError, match=rf"MeanMetric.{verb}\(\) of a prepared metric covers all"):
            strategy.run(getattr(metric, verb))
    with pytest.raises(ConfigurationError, match="MeanMetric is prepared for MirroredStrategy; give OneDeviceStrategy"):
        sg.OneDeviceStrategy("cpu").prepare(metric)


def test_copies_are_plain_metrics(strategy: sg.MirroredStrategy) -> None:
    model = torch.nn.Linear(1, 1)
    metric = torchmetrics.MeanMetric()
    assert strategy.prepare(metric, model)[0] is strategy.prepare(metric) is metric
    strategy.run(lambda: metric.update(3.0))
    for twin in (metric.clone(), copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        twin.update(5.0)
        assert type(twin) is torchmetrics.MeanMetric and twin.compute() == 4
    assert metric.compute() == 3


def test_collections_share_no_states(strategy: sg.MirroredStrategy) -> None:
    kinds = [torchmetrics.Precision("multiclass", num_classes=3), torchmetrics.Recall("multiclass", num_classes=3)]
    both = torchmetrics.MetricCollection(kinds, prefix="val_")
    alone = both.clone()
    strategy.prepare(both)
    scores, labels = torch.randn(9, 3), torch.randint(0, 3, (9,))
    for batch in strategy.distribute_dataset(TensorDataset(scores, labels), batch_size=5):
        strategy.run(lambda batch: both.update(*batch), args=(batch,))
    assert both.compute() == alone(scores, labels) and "val_MulticlassRecall" in both.compute()
    both.reset()
    with pytest.warns(UserWarning):
        assert both.compute() == {"val_MulticlassPrecision": 0.0, "val_MulticlassRecall": 0.0}


def test_a_metric_of_the_last_updates_is_refused_where_units_have_no_order(strategy: sg.MirroredStrategy) -> None:
    chief: Any = None  # not asked for anything
    with pytest.raises(ConfigurationError, match="RunningSum is of the last 2 updates"):
        CountedMetric(torchmetrics.RunningSum(2), strategy, chief)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(1.25),
        torch.arange(6).reshape(2, 3),
        {"a": torch.tensor([True, False]), "b": {"c": torch.tensor(2.0, dtype=torch.float64)}},
        [torch.tensor([0.5]), torch.tensor(7)],
    ],
)
def test_values_survive_as_numbers(value: Any) -> None:
    found = value_from("M", numbers_of(value))
    torch.testing.assert_close(found, value, rtol=0, atol=0)


def test_values_that_are_too_large_to_be_kept_are_refused_when_somebody_asks() -> None:
    kept = numbers_of(torch.zeros(MAX_NUMBERS + 1))
    assert len(kept) == 1
    with pytest.raises(ConfigurationError, match="has reset ConfusionMatrix since, whose value has more"):
        value_from("ConfusionMatrix", kept)


def test_a_ring_that_loses_a_worker_says_what_its_metrics_lack(caplog: pytest.LogCaptureFixture) -> None:
    """A sum over all workers lacked the lost one's part, and nobody heard of it."""

    def count(ring: Communicator) -> list[float]:
        strategy = DefaultStrategy()
        strategy.communicator = ring
        metric = PreparedMetric(torchmetrics.SumMetric(), strategy)
        found = []
        for _ in range(2):
            metric.reset()
            metric.own().update(float(ring.rank + 1))  # type: ignore[union-attr]
            found += [float(metric.compute()), float(metric.compute())]
        return found

    assert run_mortal(3, count, rank1=Fate(dies_at=2)) == [[4.0, 4.0, 3.0, 3.0]] * 2
    assert [record.getMessage() for record in caplog.records if "lacks" in record.getMessage()] == [
        "SumMetric lacks what worker:1 had counted, which was lost with it"
    ]
