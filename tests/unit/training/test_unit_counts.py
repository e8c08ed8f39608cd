"""Counting unit by unit comes to what counting at once does, in any order of workers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torchmetrics

from stratagem.cluster.units import MAX_STATE_BYTES, Plan
from stratagem.errors import ConfigurationError
from stratagem.strategy.default import DefaultStrategy
from stratagem.strategy.ps.servers import Servers
from stratagem.training.fit.agreement import check_groups
from stratagem.training.fit.running_metrics import RunningMetrics, StepResult, UnitCounts
from stratagem.training.metrics import metrics_of
from stratagem.worker.chief_client import ChiefClient


class Shared(ChiefClient):
    """Has what was counted, in memory."""

    def __init__(self, found: Sequence[bytes] | dict[str, float]) -> None:
        self._found = found
        self.settled: dict[str, float] = {}

    def states(self, group: str, ordinal: int) -> list[bytes] | dict[str, float]:
        return self._found if isinstance(self._found, dict) else list(self._found)

    def record_logs(self, group: str, ordinal: int, logs: Mapping[str, float]) -> dict[str, float]:
        self.settled = dict(logs)
        return self.settled


def new_running_metrics() -> RunningMetrics:
    auroc = torchmetrics.AUROC("multiclass", num_classes=3)  # keeps all outputs
    f1 = torchmetrics.F1Score("multiclass", num_classes=3, average="macro")
    return RunningMetrics(
        DefaultStrategy(), [metrics_of({"accuracy": "accuracy", "auroc": auroc, "f1": f1}, torch.device("cpu"))]
    )


def results(number: int) -> list[list[StepResult]]:
    torch.manual_seed(2)
    found = []
    for size in range(1, number + 1):
        outputs, targets = torch.randn(size, 3), torch.randint(0, 3, (size,))
        loss = torch.nn.functional.cross_entropy(outputs, targets)
        found.append([StepResult(size, outputs, targets, loss, float(size))])
    return found


def test_a_metric_that_needs_more_examples_is_no_number_so_far() -> None:
    """A worker's part of the first batch was one example: the progress report ended its ``fit``."""
    running = RunningMetrics(DefaultStrategy(), [metrics_of({"r2": torchmetrics.R2Score()}, torch.device("cpu"))])
    value = torch.ones(1)
    running.add([StepResult(1, value, value, value.sum(), 1.0)])
    logs = running.logs()
    assert logs["loss"] == 1.0
    assert math.isnan(logs["r2"])
    with pytest.raises(ValueError, match="two samples"):
        running.result()  # of all examples
    running.add([StepResult(2, torch.tensor([2.0, 3.0]), torch.tensor([2.0, 4.0]), value.sum(), 2.0)])
    assert running.logs()["r2"] == running.result()["r2"] == pytest.approx(1 - 1 / (14 / 3))


def test_units_add_up() -> None:
    at_once = new_running_metrics()
    counts = UnitCounts(Shared([]), new_running_metrics())
    data = []
    for result in results(6):
        at_once.add(result)
        counts.running.reset()
        counts.running.add(result)
        data.append(counts.collect())
    shared = Shared(data)
    logs = UnitCounts(shared, new_running_metrics()).result("evaluation 1", 0)
    assert logs == pytest.approx(at_once.result(), rel=1e-9) and logs == shared.settled
    assert list(logs) == ["loss", "accuracy", "auroc", "f1"]


def test_what_others_have_settled_stands_and_nothing_is_nothing() -> None:
    assert UnitCounts(Shared({"loss": 3.0}), new_running_metrics()).result("fit 1", 0) == {"loss": 3.0}
    assert UnitCounts(Shared([]), new_running_metrics()).result("fit 1", 0) is None


def test_too_much_to_travel_says_what_to_do() -> None:
    counts = UnitCounts(Shared([]), new_running_metrics())
    size = MAX_STATE_BYTES // 12 + 1
    counts.running.reset()
    counts.running.add([StepResult(size, torch.randn(size, 3), torch.zeros(size, dtype=torch.long))])
    with pytest.raises(ConfigurationError, match="use smaller batches, or metrics that keep sums"):
        counts.collect()


def test_workers_that_count_other_metrics_are_told() -> None:
    running, without = new_running_metrics(), RunningMetrics(DefaultStrategy(), [{}])
    running.add_states(without.states())
    with pytest.raises(ConfigurationError, match="does not count 'accuracy'"):
        running.result()


def test_a_worker_that_counts_fewer_metrics_does_not_settle_for_all() -> None:
    counts = UnitCounts(Shared([]), new_running_metrics())
    counts.running.reset()
    counts.running.add(results(1)[0])
    shared = Shared([counts.collect()])
    fewer = RunningMetrics(DefaultStrategy(), [{}])
    with pytest.raises(ConfigurationError, match="another worker counts 'accuracy', but this one does not"):
        UnitCounts(shared, fewer).result("fit 1", 0)


def test_a_fit_within_a_fit_gives_the_outer_one_its_units_back() -> None:
    """They went uncounted from then on: its losses were those of this worker alone."""
    servers: Any = Servers.__new__(Servers)
    servers.listeners = []
    with servers.listened("outer"):
        with servers.listened("inner"):
            assert servers.listeners == ["inner"]
        assert servers.listeners == ["outer"]
    assert servers.listeners == []


@dataclasses.dataclass
class Planned:
    plan: Plan


@pytest.mark.parametrize(("num_examples", "fits"), [(24, True), (21, True), (20, False), (23, False)])
def test_accumulation_at_staleness_0_needs_the_same_share_of_each_batch(num_examples: int, fits: bool) -> None:
    servers: Any = Servers.__new__(Servers)
    servers.staleness = 0
    dataset = Planned(Plan(num_examples, 6, num_slices=3, staleness=0))
    check_groups(servers, dataset, 1)
    if fits:
        check_groups(servers, dataset, 2)
    else:
        with pytest.raises(ConfigurationError, match="drop_last=True"):
            check_groups(servers, dataset, 2)
    servers.staleness = 1
    check_groups(servers, dataset, 2)


def test_accumulation_over_two_passes_is_refused_beside_ps() -> None:
    """An update was made at the end of each, of too few batches, where one process goes on."""
    servers: Any = Servers.__new__(Servers)
    servers.staleness = float("inf")
    dataset = Planned(Plan(24, 6))
    for steps_per_epoch in (None, 2, 4, 6):
        check_groups(servers, dataset, 2, steps_per_epoch)
    with pytest.raises(ConfigurationError, match="steps_per_epoch=3 does not end with one of 4 batches"):
        check_groups(servers, dataset, 2, 3)
