"""Frames in and out of tensors: contiguous or not, on the CPU and on CUDA."""

from __future__ import annotations

import pytest
import torch

from stratagem.rpc.codec import Frame, decode_frame, encode_pieces
from stratagem.worker.host_tensors import GradientSource, WeightTargets
from stratagem.worker.layout import Layout, VariableSpec

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(autouse=True)
def _device_is_here(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def layout_of(tensors: list[torch.Tensor], chunk_bytes: int = 24) -> Layout:
    specs = [VariableSpec(f"v{i}", tuple(t.shape), t.dtype, 0) for i, t in enumerate(tensors)]
    return Layout(specs, [[(0, 0, spec.rows)] for spec in specs], 1, chunk_bytes)


def frame_of(offset: int, values: torch.Tensor) -> Frame:
    return decode_frame(encode_pieces(2, 1, 0, offset, [values], (values.numel(),)))


@pytest.mark.parametrize("device", DEVICES)
def test_weights_reach_every_kind_of_tensor(device: str) -> None:
    channels_last = torch.zeros(2, 3, 2, 2, device=device).to(memory_format=torch.channels_last)
    tensors = [
        torch.zeros(5, device=device),
        channels_last,
        torch.zeros(3, 4, device=device).t(),
        torch.zeros((), device=device),
    ]
    layout = layout_of(tensors)
    flat = torch.arange(float(layout.group_elements(0, 0)))
    targets = WeightTargets(layout, tensors)
    for chunk in layout.chunks:
        targets.write(0, frame_of(chunk.offset, flat[chunk.offset : chunk.offset + chunk.num_elements]))
    targets.finish()
    for shard in layout.shards[0, 0]:
        expected = flat[shard.offset : shard.offset + shard.num_elements]
        assert torch.equal(tensors[shard.variable].cpu().reshape(-1), expected)


def test_a_partial_write_leaves_the_rest_alone() -> None:
    tensor = torch.ones(3, 4).t()
    targets = WeightTargets(layout_of([tensor]), [tensor])
    targets.write(0, frame_of(2, torch.zeros(3)))
    targets.finish()
    assert tensor.reshape(-1).tolist() == [1, 1, 0, 0, 0, *[1] * 7]


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_as_pieces(device: str) -> None:
    parameters = [
        torch.nn.Parameter(torch.zeros(4, 3, device=device)),
        torch.nn.Parameter(torch.zeros(5, device=device)),
    ]
    parameters[0].grad = torch.arange(12.0, device=device).view(3, 4).t()
    layout = layout_of([parameter.data for parameter in parameters])
    source = GradientSource(parameters)
    pieces = [piece for chunk in layout.chunks for piece in source.pieces(chunk)()]
    assert all(piece.device.type == "cpu" for piece in pieces)
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    # Reverse order of registration; zeros where there is no gradient.
    expected = torch.cat([torch.zeros(5), torch.arange(12.0).view(3, 4).t().reshape(-1)])
    assert torch.equal(sent, expected)


@pytest.mark.cuda
def test_a_cuda_gradient_may_change_after_its_copy_is_ready() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    parameter.grad = torch.ones(1 << 20, device="cuda")
    layout = layout_of([parameter.data], 1 << 22)
    ready = GradientSource([parameter]).pieces(layout.chunks[0])
    (piece,) = ready()
    parameter.grad.zero_()
    torch.cuda.synchronize()
    assert piece.is_pinned() and bool((piece == 1).all())
