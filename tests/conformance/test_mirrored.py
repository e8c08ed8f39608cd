"""Strategies: mirrored.

MirroredStrategy and its cross-device ops (SEMANTICS: "Strategies").
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import stratagem as sg
from stratagem.errors import ConfigurationError
from stratagem.strategy.replicas.cross_device_ops import hierarchy, pack_sizes
from tests.conformance.law import law, only
from tests.conformance.scenarios import placing
from tests.conformance.scenarios.contexts import here
from tests.conformance.strategies import (
    MIRRORED_2,
    MIRRORED_3,
    Column,
)

MIRRORED = only((MIRRORED_2, MIRRORED_3))
SUM, MEAN = sg.ReduceOp.SUM, sg.ReduceOp.MEAN


def values(num_replicas: int, num_tensors: int = 1) -> list[list[torch.Tensor]]:
    """By tensor, then by replica: whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(7)
    sizes = range(3, 3 + num_tensors)
    return [
        [torch.randint(-50, 50, (size,), generator=generator).float() for _ in range(num_replicas)] for size in sizes
    ]


@law("Mirrored: by default all visible GPUs, else one CPU replica", without=MIRRORED)
def test_default_devices(column: Column) -> None:
    strategy = sg.MirroredStrategy()
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    assert [str(device) for device in strategy.local_devices] == (gpus or ["cpu"])
    assert strategy.num_replicas_in_sync == max(1, len(gpus))
    strategy.close()


@law("Mirrored: logical CPUs `cpu:0`, `/cpu:0`; GPUs `cuda:0`, `/gpu:0`, or a clear error without", without=MIRRORED)
def test_names_of_devices(column: Column) -> None:
    for spelling in ("cpu:{}", "/cpu:{}", "/device:CPU:{}"):
        strategy = sg.MirroredStrategy([spelling.format(number) for number in range(column.num_local)])
        assert strategy.num_replicas_in_sync == column.num_local
        assert strategy.local_results(strategy.run(lambda: 1)) == (1,) * column.num_local
        strategy.close()
    for name in ("cuda:0", "/gpu:0"):
        if torch.cuda.is_available():
            strategy = sg.MirroredStrategy([name])
            assert strategy.local_devices == (torch.device("cuda:0"),)
            strategy.close()
        else:
            with pytest.raises(ConfigurationError, match=f"'{name}' was asked for, but torch sees no CUDA device"):
                sg.MirroredStrategy([name])
    for names in (["cpu:0", "cpu:0"], ["cpu", "cpu:0"], ["/cpu:0", "cpu"]):
        with pytest.raises(ConfigurationError, match=r"each device once.*'cpu' is 'cpu:0'"):
            sg.MirroredStrategy(names)


@law(
    "Mirrored: each replica has its own parameters and variables",
    placing.memory,
    without=MIRRORED,
)
def test_memory_of_mirrored(column: Column, results: list[Any]) -> None:
    for found in results:
        assert found["parameters"] == found["variables"] == column.num_local
        assert found["is_mine"] and found["updates"] == [3.0]


@law("`ReductionToOneDevice`: sum there, ÷ n for MEAN, copies to all", without=MIRRORED)
def test_reduction_to_one_device(column: Column) -> None:
    n = column.num_local
    tensors = [torch.tensor([1.0 + number, 2.0]) for number in range(n)]
    total = n * (n + 1) / 2
    ops = sg.ReductionToOneDevice()
    sums, means = ops.all_reduce(SUM, tensors), ops.all_reduce(MEAN, tensors)
    assert [one.tolist() for one in sums] == [[total, 2.0 * n]] * n
    assert [one.tolist() for one in means] == [[total / n, 2.0]] * n
    assert len({one.data_ptr() for one in (*sums, *tensors)}) == 2 * n
    on_two = ops.reduce(SUM, tensors, ["cpu:0", "cpu:1"])
    assert [one.tolist() for one in on_two] == [[total, 2.0 * n]] * 2


@law("`ReductionToOneDevice`: `reduce_to_device`, `accumulation_fn`", without=MIRRORED)
def test_arguments_of_reduction_to_one_device(column: Column, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def accumulate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        asked.append(len(tensors))
        return torch.stack(list(tensors)).sum(0)

    ops = sg.ReductionToOneDevice("cpu:1", accumulate)
    with caplog.at_level(logging.INFO):
        means = ops.all_reduce(MEAN, [torch.tensor([6.0])] * column.num_local)
    assert [float(one) for one in means] == [6.0] * column.num_local and asked == [column.num_local]
    assert caplog.messages[0].startswith("Reduce to cpu:1 then broadcast to ('cpu:0', 'cpu:1'")


@law('the default where a device is no GPU; one log line "Reduce to X then broadcast to (…)"', without=only(MIRRORED_2))
def test_default_ops(column: Column, caplog: pytest.LogCaptureFixture) -> None:
    assert column.build is not None
    strategy = column.build()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            strategy.run(lambda: here().all_reduce(SUM, torch.ones(1)))
    strategy.close()
    assert [text for text in caplog.messages if "broadcast" in text] == [
        "Reduce to cpu:0 then broadcast to ('cpu:0', 'cpu:1')"
    ]


@law("`HierarchicalCopyAllReduce`: two groups, root i mod n and a partner; odd n too", without=MIRRORED)
def test_hierarchy(column: Column) -> None:
    n = column.num_local
    for tensor in range(2 * n):
        (root, first), (partner, second) = hierarchy(n, tensor % n)
        assert root == tensor % n and root in first and partner in second
        assert sorted([*first, *second]) == list(range(n)) and abs(len(first) - len(second)) <= 1


@law("`HierarchicalCopyAllReduce`: the result is a plain sum's", without=MIRRORED)
def test_hierarchical_sum(column: Column) -> None:
    per_tensor = values(column.num_local, 4)
    for num_packs in (0, 1, 3):
        results = sg.HierarchicalCopyAllReduce(num_packs).all_reduce_many(SUM, per_tensor)
        for tensors, found in zip(per_tensor, results, strict=True):
            assert all(torch.equal(one, torch.stack(tensors).sum(0)) for one in found)
            assert len(found) == column.num_local


@law("`NcclAllReduce`: the default on GPUs; without CUDA a clear error", without=MIRRORED)
def test_nccl(column: Column) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match=r"NcclAllReduce needs CUDA.*ReductionToOneDevice"):
            sg.NcclAllReduce()
        return
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    tensors = [torch.full((3,), 1.0 + index, device=device) for index, device in enumerate(devices)]
    for found in sg.NcclAllReduce().all_reduce(SUM, tensors):
        assert found.tolist() == [len(devices) * (len(devices) + 1) / 2] * 3


@law("packing: num_packs flat tensors, the last takes the remainder; 0 = none", without=MIRRORED)
def test_packing(column: Column) -> None:
    assert [pack_sizes(10, packs) for packs in (1, 3, 4)] == [[10], [3, 3, 4], [2, 2, 2, 4]]
    reduced: list[int] = []

    class Watched(sg.HierarchicalCopyAllReduce):
        def _all_reduce_pack(self, op: sg.ReduceOp, tensors: Sequence[torch.Tensor], index: int) -> list[torch.Tensor]:
            reduced.append(tensors[0].numel())
            return super()._all_reduce_pack(op, tensors, index)

    per_tensor = values(column.num_local, 4)  # of 3, 4, 5 and 6 elements
    for num_packs, expected in ((0, [3, 4, 5, 6]), (1, [18]), (4, [4, 4, 4, 6])):
        reduced.clear()
        Watched(num_packs).all_reduce_many(SUM, per_tensor)
        assert reduced == expected


@law("sparse tensors fall back to one device", without=MIRRORED)
def test_sparse_ops(column: Column, caplog: pytest.LogCaptureFixture) -> None:
    dense = [torch.zeros(5, 2).index_fill(0, torch.tensor([0, number + 1]), 1.0) for number in range(column.num_local)]
    with caplog.at_level(logging.INFO):
        results = sg.HierarchicalCopyAllReduce(2).all_reduce(SUM, [one.to_sparse(1) for one in dense])
    assert all(one.is_sparse and torch.equal(one.to_dense(), torch.stack(dense).sum(0)) for one in results)
    assert any(text.startswith("Reduce to") for text in caplog.messages)
