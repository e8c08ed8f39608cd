"""Shares of global batches in a ring: every worker makes every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from stratagem.cluster.units import Plan
from stratagem.data.distributed import DistributedDataset
from stratagem.data.loaders import plan_of
from stratagem.strategy.ring_units import RingUnits, Share
from stratagem.worker.step_meter import StepMeter


def shares_of(num_examples: int, batch_size: int, workers: int) -> list[list[list[int]]]:
    """What each worker gets in each step."""
    data = TensorDataset(torch.arange(num_examples))
    loader = DataLoader(data, batch_size=batch_size)
    plan = plan_of(loader, workers, 0)
    everybody = []
    for rank in range(workers):
        source = RingUnits(plan, 1, rank, StepMeter(), lambda share, batch: None, None)
        dataset = DistributedDataset(loader, plan, 1, source, torch.device("cpu"))
        everybody.append([batch[0].tolist() for batch in dataset])
    return [list(step) for step in zip(*everybody, strict=True)]


@pytest.mark.parametrize(
    ("num_examples", "batch_size", "workers", "expected"),
    [
        (6, 4, 2, [[[0, 1], [2, 3]], [[4], [5]]]),
        (4, 4, 5, [[[0], [1], [2], [3], []]]),
        (8, 4, 3, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]),
        (5, 5, 1, [[[0, 1, 2, 3, 4]]]),
    ],
)
def test_shares_follow_tf_distribute(
    num_examples: int, batch_size: int, workers: int, expected: list[list[list[int]]]
) -> None:
    assert shares_of(num_examples, batch_size, workers) == expected


def test_an_empty_share_has_the_form_of_a_batch() -> None:
    data = TensorDataset(torch.randn(3, 2, 5), torch.arange(3))
    loader = DataLoader(data, batch_size=3)
    plan = plan_of(loader, 4, 0)
    seen: list[tuple[Share, Any]] = []
    meter = StepMeter()
    source = RingUnits(plan, 1, 3, meter, lambda share, batch: seen.append((share, batch)), None)
    (batch,) = DistributedDataset(loader, plan, 1, source, torch.device("cpu"))
    assert [tensor.shape for tensor in batch] == [(0, 2, 5), (0,)]
    assert batch[1].dtype == torch.int64
    assert seen[0][0] == Share(0, 3) and seen[0][0].weight == 0
    assert meter.examples == 0 and meter.steps == 1


def test_shares_add_up_and_every_unit_is_reported_once() -> None:
    plan = Plan(num_examples=50, batch_size=12, num_slices=3, staleness=0)
    reported: list[int] = []
    weights: list[list[float]] = []
    for rank in range(3):
        mine: list[float] = []
        report = (lambda epoch, units: reported.extend(units)) if rank == 0 else None

        def begin(share: Share, batch: Any, mine: list[float] = mine) -> None:
            mine.append(share.weight)

        source = RingUnits(plan, 1, rank, StepMeter(), begin, report)
        source.start_epoch(0)
        while (grant := source.next(wait=True)) is not None:
            source.begin(grant, None)
            source.done(grant)
        source.end_epoch(complete=True)
        weights.append(mine)
    assert sorted(reported) == list(range(plan.num_units))
    assert [sum(step) for step in zip(*weights, strict=True)] == pytest.approx([1.0] * 5)
    assert weights[2][-1] == 0
