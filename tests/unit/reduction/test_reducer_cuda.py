"""Gradients of CUDA parameters are reduced where they are, over NCCL, or go through page-locked host memory.

One rank: of several in one process, autograd runs all of a device's backward passes in one thread, where they would
wait for each other. Several are in tests/cluster/test_gpus.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from stratagem.worker.reduction.compression import Int8Compression
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.group import Group
from stratagem.worker.ring.torch_group import TorchGroup, free_store_address
from tests.unit.reduction.reducing import assert_same, batch, build, gradients, mean_loss, reducing, weight_of
from tests.unit.ring.thread_group import Meeting, ThreadGroup

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.parametrize("way", ["host", "nccl"]),
]


@contextlib.contextmanager
def communicating(way: str) -> Iterator[Communicator]:
    address, device = free_store_address("127.0.0.1"), torch.device("cuda:0")
    nccl = way == "nccl"
    group: Group = TorchGroup(0, 1, "nccl", address, 60.0, device) if nccl else ThreadGroup(Meeting(1), 0, ())
    communicator = Communicator(group, explain=lambda error, position: error)
    try:
        yield communicator
    finally:
        communicator.close()


@pytest.fixture(scope="module", autouse=True)
def first_group() -> None:
    """NCCL keeps a pipe for the life of the process; made here, before the first test looks for leaks."""
    with communicating("nccl") as communicator:
        communicator.collective("barrier", communicator.group.barrier)


@pytest.mark.parametrize("in_place", [True, False])
def test_training_equals_one_process_on_the_host(way: str, in_place: bool) -> None:
    def train(model: torch.nn.Module, device: str) -> list[torch.Tensor | None]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(2):
                mean_loss(model, *(value.to(device) for value in batch(10 * step + part))).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        found = [*(parameter.detach() for parameter in model.parameters()), *gradients(model)]
        return [None if value is None else value.cpu() for value in found]

    model = build().cuda()
    with (
        communicating(way) as communicator,
        reducing(model, communicator, weight_of([1], 0), keep_sources=not in_place) as reducer,
    ):
        found = train(model, "cuda")
        assert reducer.num_early > 0
        for bucket in reducer.buckets:
            assert bucket.area.result.is_cuda and bucket.area.reduced.is_cuda == (way == "nccl")
            shared = bucket.area.source.data_ptr() == bucket.area.result.data_ptr()
            assert shared == (in_place and way == "nccl")
    for value, reference in zip(found, train(build(), "cpu"), strict=True):
        assert value is not None
        torch.testing.assert_close(value, reference, atol=1e-5, rtol=1e-4)  # another device sums in another order


def test_parameters_on_both_devices(way: str) -> None:
    model = build()
    model.last.cuda()
    with communicating(way) as communicator, reducing(model, communicator, weight_of([1], 0)):
        (model.first(torch.ones(5)).sum() + model.last(torch.ones(16, device="cuda")).sum().cpu()).backward()
        found = [None if value is None else value.cpu() for value in gradients(model)]
    reference = build()
    (reference.first(torch.ones(5)).sum() + reference.last(torch.ones(16)).sum()).backward()
    assert_same(found, gradients(reference))


def test_compressed_gradients(way: str) -> None:
    model = build().cuda()
    compression = Int8Compression()
    with (
        communicating(way) as communicator,
        reducing(model, communicator, weight_of([1], 0), compression=compression) as reducer,
    ):
        mean_loss(model, *(value.cuda() for value in batch(1))).backward()
        found = [None if value is None else value.cpu() for value in gradients(model)]
        assert all(bucket.area.reduced.is_cpu for bucket in reducer.buckets)
    reference = build()
    mean_loss(reference, *batch(1)).backward()
    for value, expected in zip(found, gradients(reference), strict=True):
        assert value is not None and expected is not None
        torch.testing.assert_close(value, expected, atol=float(expected.abs().max()) / 50, rtol=0)
