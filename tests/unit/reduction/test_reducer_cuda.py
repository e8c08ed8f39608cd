"""Gradients of CUDA parameters go through page-locked host memory on a side stream."""

from __future__ import annotations

import pytest
import torch

from stratagem.worker.ring.communicator import Communicator
from tests.unit.reduction.reducing import assert_same, batch, build, gradients, mean_loss, reducing, share_of, weight_of
from tests.unit.ring.thread_group import run_ranks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_training_equals_one_process_on_the_host() -> None:
    def train(model: torch.nn.Module, rank: int | None, device: str) -> list[torch.Tensor | None]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(2):
                values = batch(10 * step + part)
                shares = values if rank is None else share_of(values, [3, 1], rank)
                mean_loss(model, *(value.to(device) for value in shares)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        found = [*(parameter.detach() for parameter in model.parameters()), *gradients(model)]
        return [None if value is None else value.cpu() for value in found]

    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build().cuda()
        with reducing(model, communicator, weight_of([3, 1], communicator.rank)) as reducer:
            found = train(model, communicator.rank, "cuda")
            assert reducer.num_early > 0
            assert all(bucket.area.result.is_cuda for bucket in reducer.buckets)
            return found

    ranks = run_ranks(2, work)
    expected = train(build(), None, "cpu")
    for value, other, reference in zip(ranks[0], ranks[1], expected, strict=True):
        assert value is not None and other is not None and torch.equal(value, other)
        torch.testing.assert_close(value, reference, atol=1e-5, rtol=1e-4)  # another device sums in another order


def test_parameters_on_both_devices() -> None:
    def work(communicator: Communicator) -> list[torch.Tensor | None]:
        model = build()
        model.last.cuda()
        with reducing(model, communicator, weight_of([2, 2], communicator.rank)):
            (model.first(torch.ones(5)).sum() + model.last(torch.ones(16, device="cuda")).sum().cpu()).backward()
            return [None if value is None else value.cpu() for value in gradients(model)]

    reference = build()
    (reference.first(torch.ones(5)).sum() + reference.last(torch.ones(16)).sum()).backward()
    assert_same(run_ranks(2, work)[0], gradients(reference))
