"""Cross-device ops: every way to reduce gives the plain sum, on every replica, in memory of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest
import torch

from stratagem.cluster.communication import ReduceOp
from stratagem.errors import ConfigurationError
from stratagem.strategy.replicas.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    cross_device_ops_of,
    hierarchy,
    pack,
    pack_sizes,
)

OPS: list[Callable[[], CrossDeviceOps]] = [
    ReductionToOneDevice,
    HierarchicalCopyAllReduce,
    lambda: HierarchicalCopyAllReduce(num_packs=0),
    lambda: HierarchicalCopyAllReduce(num_packs=3),
]
SHAPES = [(3, 4), (), (0, 2), (7,), (2, 1, 5)]


def values(num_replicas: int, shape: Sequence[int] = (3, 4), dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Small whole numbers: every order of adding gives the same bits."""
    generator = torch.Generator().manual_seed(num_replicas)
    return [torch.randint(-9, 9, tuple(shape), generator=generator).to(dtype) for _ in range(num_replicas)]


@pytest.mark.parametrize("make", OPS)
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("op", list(ReduceOp))
def test_every_op_on_any_number_of_replicas(
    make: Callable[[], CrossDeviceOps], num_replicas: int, op: ReduceOp
) -> None:
    tensors = values(num_replicas)
    before = [tensor.clone() for tensor in tensors]
    stacked = torch.stack(tensors)
    expected = {
        ReduceOp.SUM: stacked.sum(0),
        ReduceOp.MEAN: stacked.sum(0) / num_replicas,
        ReduceOp.MIN: stacked.amin(0),
        ReduceOp.MAX: stacked.amax(0),
        ReduceOp.PRODUCT: stacked.prod(0),
    }[op]
    results = make().all_reduce(op, tensors)
    assert len(results) == num_replicas
    assert all(torch.equal(result, expected) for result in results)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
    memories = {tensor.untyped_storage().data_ptr() for tensor in [*tensors, *results]}
    assert len(memories) == 2 * num_replicas


@pytest.mark.parametrize("make", OPS)
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_many_tensors_of_several_shapes_and_dtypes(make: Callable[[], CrossDeviceOps], num_replicas: int) -> None:
    kinds = [(shape, dtype) for dtype in (torch.float32, torch.int64, torch.bfloat16) for shape in SHAPES]
    tensors = [values(num_replicas, shape, dtype) for shape, dtype in kinds]
    results = make().all_reduce_many(ReduceOp.SUM, tensors)
    for (shape, dtype), one, reduced in zip(kinds, tensors, results, strict=True):
        for result in reduced:
            assert result.shape == shape and result.dtype == dtype
            assert torch.equal(result, torch.stack(one).sum(0).to(dtype))
    assert make().all_reduce_many(ReduceOp.SUM, []) == []


@pytest.mark.parametrize("make", OPS)
def test_strides_and_graphs_do_not_matter(make: Callable[[], CrossDeviceOps]) -> None:
    tensors = [(tensor.t().requires_grad_() * 1.0) for tensor in values(3)]
    for result in make().all_reduce(ReduceOp.SUM, tensors):
        assert torch.equal(result, torch.stack(tensors).sum(0)) and not result.requires_grad


@pytest.mark.parametrize("make", OPS)
def test_halves_are_summed_in_float32(make: Callable[[], CrossDeviceOps]) -> None:
    tensors = [torch.tensor([value], dtype=torch.float16) for value in (2048.0, 1.0, 1.0, 1.0)]
    assert float(torch.stack(tensors)[0] + tensors[1]) == 2048.0  # so would a sum in float16 end
    assert [float(result) for result in make().all_reduce(ReduceOp.SUM, tensors)] == [2052.0] * 4


@pytest.mark.parametrize("make", OPS)
def test_all_replicas_have_the_same_bits(make: Callable[[], CrossDeviceOps]) -> None:
    tensors = [torch.rand(1000, generator=torch.Generator().manual_seed(seed)) * 10**seed for seed in range(5)]
    results = make().all_reduce(ReduceOp.SUM, tensors)
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], torch.stack(tensors).sum(0))


def test_bits_do_not_depend_on_the_root() -> None:
    tensors = [torch.randn(1000, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    many = HierarchicalCopyAllReduce(num_packs=0).all_reduce_many(ReduceOp.SUM, [tensors] * 5)
    assert all(torch.equal(results[0], many[0][0]) for results in many)


@pytest.mark.parametrize("make", OPS)
def test_sparse_tensors_go_to_one_device(make: Callable[[], CrossDeviceOps], caplog: pytest.LogCaptureFixture) -> None:
    def rows(*indices: int) -> torch.Tensor:
        places = torch.tensor([indices], dtype=torch.int64)
        return torch.sparse_coo_tensor(places, torch.ones(len(indices), 2), (5, 2), check_invariants=True)

    sparse, dense = [rows(0, 3), rows(3, 3), rows()], values(3)
    with caplog.at_level(logging.INFO):
        summed, plain = make().all_reduce_many(ReduceOp.SUM, [sparse, dense])
    assert any("Reduce to cpu:0 then broadcast" in message for message in caplog.messages)
    for result in summed:
        assert result.is_sparse and result.is_coalesced()
        assert torch.equal(result.to_dense(), torch.stack([tensor.to_dense() for tensor in sparse]).sum(0))
    assert torch.equal(plain[2], torch.stack(dense).sum(0))
    (mean, *_) = make().all_reduce(ReduceOp.MEAN, sparse)
    assert mean.to_dense()[3].tolist() == [1.0, 1.0]
    mixed = make().all_reduce(ReduceOp.SUM, [sparse[0], torch.ones(5, 2)])
    assert not mixed[1].is_sparse and mixed[1][0].tolist() == [2.0, 2.0]
    with pytest.raises(ConfigurationError, match="MAX"):
        make().all_reduce(ReduceOp.MAX, sparse)


@pytest.mark.parametrize("make", OPS)
def test_reduce_to_destinations(make: Callable[[], CrossDeviceOps]) -> None:
    tensors = values(3)
    expected = torch.stack(tensors).sum(0)
    several: list[list[str | torch.device]] = [["cpu:2"], ["/cpu:0", torch.device("cpu"), "cpu:2"], ["cpu:0"] * 5]
    for destinations in ("cpu:0", *several):
        results = make().reduce(ReduceOp.SUM, tensors, destinations)
        assert len(results) == (1 if isinstance(destinations, str) else len(destinations))
        assert all(torch.equal(result, expected) for result in results)
    with pytest.raises(ConfigurationError, match="none"):
        make().reduce(ReduceOp.SUM, tensors, [])


@pytest.mark.parametrize("make", OPS)
def test_broadcast(make: Callable[[], CrossDeviceOps]) -> None:
    source = torch.ones(2, requires_grad=True)
    results = make().broadcast(source, ["cpu:0", "cpu:1"])
    results[0].add_(1)
    assert results[1].tolist() == source.tolist() == [1.0, 1.0] and len(results) == 2


def test_one_device_says_once_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    ops = ReductionToOneDevice()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            ops.all_reduce(ReduceOp.SUM, values(2))
        ReductionToOneDevice("cpu:1").reduce(ReduceOp.SUM, values(2), ["cpu:0", "cpu:1"])
    assert caplog.messages == [
        "Reduce to cpu:0 then broadcast to ('cpu:0', 'cpu:1')",
        "Reduce to cpu:1 then broadcast to ('cpu:0', 'cpu:1')",
    ]


def test_accumulation_fn_adds_up() -> None:
    seen: list[int] = []

    def accumulate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        seen.append(len(tensors))
        for tensor in tensors[1:]:
            tensors[0].add_(tensor)
        return tensors[0]

    ops = ReductionToOneDevice(accumulation_fn=accumulate)
    tensors = [torch.tensor([float(value)]) for value in (1, 2, 6)]
    assert [float(result) for result in ops.all_reduce(ReduceOp.MEAN, tensors)] == [3.0] * 3
    assert [float(result) for result in ops.all_reduce(ReduceOp.MAX, tensors)] == [6.0] * 3
    assert seen == [3] and tensors[0].item() == 1.0


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"replica 1 has \[3\] float32"):
        ReductionToOneDevice().all_reduce(ReduceOp.SUM, [torch.ones(2), torch.ones(3)])
    with pytest.raises(ConfigurationError, match=r"\[2\] float64"):
        HierarchicalCopyAllReduce().all_reduce(ReduceOp.SUM, [torch.ones(2), torch.ones(2).double()])
    with pytest.raises(ConfigurationError, match="int64"):
        HierarchicalCopyAllReduce().all_reduce(ReduceOp.MEAN, [torch.tensor([1])])
    with pytest.raises(ConfigurationError, match="none"):
        ReductionToOneDevice().all_reduce(ReduceOp.SUM, [])
    with pytest.raises(ConfigurationError, match="num_packs"):
        HierarchicalCopyAllReduce(num_packs=-1)
    with pytest.raises(ConfigurationError, match="abc"):
        ReductionToOneDevice("abc")


@pytest.mark.parametrize("num_replicas", range(1, 10))
def test_the_two_groups(num_replicas: int) -> None:
    for root in range(num_replicas):
        route = hierarchy(num_replicas, root)
        assert route[0][0] == root and all(place in group for place, group in route)
        assert sorted(replica for _, group in route for replica in group) == list(range(num_replicas))
        assert len(route) == (1 if num_replicas == 1 else 2)
        sizes = [len(group) for _, group in route]
        assert max(sizes) - min(sizes) <= 1
        if num_replicas % 2 == 0:
            assert route[1][0] == (root + num_replicas // 2) % num_replicas


def test_sizes_of_packs() -> None:
    assert pack_sizes(10, 3) == [3, 3, 4]
    assert pack_sizes(8, 2) == [4, 4]
    assert pack_sizes(2, 3) == [0, 0, 2]
    assert pack_sizes(5, 1) == [5]


@pytest.mark.parametrize(
    ("num_packs", "expected"),
    [(0, [12, 1, 7, 10, 12, 1, 7, 10]), (1, [30, 30]), (2, [15, 15, 15, 15]), (4, [7, 7, 7, 9, 7, 7, 7, 9])],
)
def test_numbers_of_packs(num_packs: int, expected: list[int]) -> None:
    shapes = [(3, 4), (), (7,), (2, 1, 5)]
    tensors = [values(2, shape, dtype) for dtype in (torch.float32, torch.float64) for shape in shapes]
    packed = pack(tensors, num_packs)
    assert [one[0].numel() for one in packed.packs] == expected
    assert all(len(one) == 2 for one in packed.packs)
    for one, back in zip(tensors, packed.unpack(packed.packs), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, back, strict=True))


def test_packs_are_what_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[tuple[int, int]] = []

    class Watched(HierarchicalCopyAllReduce):
        def _all_reduce_pack(self, op: ReduceOp, tensors: Sequence[torch.Tensor], index: int) -> list[torch.Tensor]:
            reduced.append((index, tensors[0].numel()))
            return super()._all_reduce_pack(op, tensors, index)

    Watched(num_packs=3).all_reduce_many(ReduceOp.SUM, [values(3, (6,)), values(3, (4,))])
    assert reduced == [(0, 3), (1, 3), (2, 4)]


def test_the_default_without_gpus() -> None:
    assert isinstance(cross_device_ops_of(None, [torch.device("cpu")] * 2), ReductionToOneDevice)
    mixed = [torch.device("cuda", 0), torch.device("cpu")]
    assert isinstance(cross_device_ops_of(None, mixed), ReductionToOneDevice)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_nccl_without_cuda_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="NcclAllReduce needs CUDA"):
        NcclAllReduce()


def test_nccl_leaves_the_rest_to_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    tensors = values(3)
    for result in NcclAllReduce(num_packs=2).all_reduce(ReduceOp.SUM, tensors):
        assert torch.equal(result, torch.stack(tensors).sum(0))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("op", list(ReduceOp))
def test_nccl_on_all_gpus(op: ReduceOp) -> None:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    assert isinstance(cross_device_ops_of(None, devices), NcclAllReduce)
    tensors = [tensor.to(device) for tensor, device in zip(values(len(devices)), devices, strict=True)]
    expected = ReductionToOneDevice("cpu").all_reduce(op, tensors)
    for result, tensor, wanted in zip(NcclAllReduce(2).all_reduce(op, tensors), tensors, expected, strict=True):
        assert result.device == tensor.device
        torch.testing.assert_close(result, wanted)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", OPS)
def test_gpu_and_cpu_together(make: Callable[[], CrossDeviceOps]) -> None:
    tensors = [tensor.to(device) for tensor, device in zip(values(3), ("cpu", "cuda:0", "cpu"), strict=True)]
    results = make().all_reduce(ReduceOp.SUM, tensors)
    assert [result.device for result in results] == [tensor.device for tensor in tensors]
    assert all(torch.equal(result.cpu(), torch.stack([t.cpu() for t in tensors]).sum(0)) for result in results)
