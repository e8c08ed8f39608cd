"""An evaluation on a ring that goes on without the workers it loses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics

from stratagem.strategy.default import DefaultStrategy
from stratagem.training.callbacks.base import CallbackList
from stratagem.training.fit import sources
from stratagem.training.fit.loop import Evaluation
from stratagem.training.fit.running_metrics import RunningMetrics
from stratagem.training.fit.steps import Compiled, FitSteps
from stratagem.training.losses import Loss
from stratagem.training.metrics import metrics_of
from stratagem.training.model_state import ModelState
from stratagem.worker.ring.communicator import Communicator
from tests.unit.ring.healing_ranks import Fate, run_mortal

CPU = torch.device("cpu")
INPUTS, TARGETS = torch.randn(2, 10, 1, generator=torch.Generator().manual_seed(0))


class InStep(DefaultStrategy):
    """A synchronous strategy of workers that are threads."""

    def __init__(self, communicator: Communicator | None = None) -> None:
        self.communicator = communicator


def evaluate(strategy: InStep) -> dict[str, float]:
    """Of the first 9 of 10 examples, in batches that 3 workers share."""
    metrics: dict[str, Any] = {"mae": "mae", "spearman": torchmetrics.SpearmanCorrCoef()}  # which keeps all outputs
    module = torch.nn.Identity()
    steps = FitSteps(strategy, module, None, Compiled(Loss("mse"), metrics))
    source = sources.source_of(INPUTS, TARGETS, batch_size=3)
    called = CallbackList([], ModelState(strategy, module), {})

    def new_running_metrics() -> RunningMetrics:
        return RunningMetrics(strategy, [metrics_of(metrics, CPU)])

    return Evaluation(steps, new_running_metrics, source, CPU, called, 3, lambda batch: None).run()


@pytest.mark.filterwarnings("ignore:Metric `Spearman")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dies_at", range(1, 7))
def test_it_counts_each_example_once_whoever_is_lost(dies_at: int, late: bool) -> None:
    """The result was that of the examples which the others had had. It makes 6 collectives."""
    whole = evaluate(InStep())
    found = run_mortal(3, lambda ring: evaluate(InStep(ring)), rank1=Fate(dies_at=dies_at, late=late))
    assert found == [pytest.approx(whole)] * 2
