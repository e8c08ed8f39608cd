"""Frames in and out of tensors: contiguous or not, on the CPU and on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stratagem.rpc.codec import Frame, decode_frame, frame_parts
from stratagem.worker.push.host_tensors import GradientSource, WeightTargets
from stratagem.worker.push.layout import Layout, VariableSpec

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(autouse=True)
def _device_is_here(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def layout_of(tensors: list[torch.Tensor], chunk_bytes: int = 24) -> Layout:
    specs = [VariableSpec(f"v{i}", tuple(t.shape), t.dtype, 0) for i, t in enumerate(tensors)]
    return Layout(specs, [[(0, 0, spec.shape[0] if spec.shape else 1)] for spec in specs], chunk_bytes)


def frame_of(offset: int, values: torch.Tensor) -> Frame:
    return decode_frame(b"".join(frame_parts(2, 1, 0, offset, [values], (values.numel(),))))


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
    flat = torch.arange(float(sum(shard.num_elements for shard in layout.shards[0, 0])))
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


class Copies(TorchDispatchMode):
    """Counts what copies between tensors."""

    num: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_is_read_again_only_if_the_script_has_changed_it(device: str) -> None:
    tensor = torch.ones(3, 4, device=device).t()
    targets = WeightTargets(layout_of([tensor]), [tensor])

    def write(value: float) -> int:
        copies = Copies()  # type: ignore[no-untyped-call]
        with copies:
            targets.write(0, frame_of(2, torch.full((3,), value)))
            targets.finish()
        return copies.num

    first, second = write(0.0), write(2.0)
    assert second < first and tensor.reshape(-1).tolist() == [1, 1, 2, 2, 2, *[1] * 7]
    with torch.no_grad():
        tensor.add_(1)
    assert write(0.0) == first and tensor.reshape(-1).tolist() == [2, 2, 0, 0, 0, *[2] * 7]


def test_a_frame_of_one_contiguous_tensor_is_received_where_it_belongs() -> None:
    tensors = [torch.zeros(8), torch.zeros(3, 4).t(), torch.zeros(4)]
    targets = WeightTargets(layout_of(tensors, 16), tensors)
    # In the flat tensor: 4 elements, the 12 of what is not contiguous, 8.
    whole = targets.place(0, 0, 0, 4)
    assert whole is not None and whole.data_ptr() == tensors[2].data_ptr()
    assert targets.place(0, 0, 4, 4) is None and targets.place(0, 0, 2, 4) is None and targets.place(1, 0, 0, 4) is None
    part = targets.place(0, 0, 20, 4)
    assert part is not None and part.data_ptr() == tensors[0][4:].data_ptr() and part.numel() == 4
    part.fill_(7)
    targets.write(0, Frame(2, 1, 0, 20, part))
    assert tensors[0].tolist() == [0, 0, 0, 0, 7, 7, 7, 7]


def test_a_graph_of_weights_that_were_received_in_place_does_not_go_on() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    targets = WeightTargets(layout_of([weight]), [weight])
    loss = (weight * weight).sum()
    place = targets.place(0, 0, 0, 4)
    assert place is not None
    place.numpy()[:] = 2.0  # as a socket writes: past torch
    targets.write(0, Frame(2, 1, 0, 0, place))
    assert weight.tolist() == [2, 2, 2, 2]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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


@pytest.mark.cuda
def test_a_chunk_of_several_cuda_gradients_is_one_copy() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size, device="cuda")) for size in (3, 5, 2)]
    parameters[0].grad, parameters[2].grad = torch.full((3,), 2.0, device="cuda"), torch.full((2,), 4.0, device="cuda")
    (chunk,) = layout_of([parameter.data for parameter in parameters], 1 << 10).chunks
    source = GradientSource(parameters)
    for _ in range(2):
        (piece,) = source.pieces(chunk)()
        gradients = [torch.zeros(5) if one.grad is None else one.grad.cpu() for one in parameters]
        expected = torch.cat([gradients[span.variable] for span in chunk.spans])
        assert piece.is_pinned() and torch.equal(piece, expected)
        torch._foreach_mul_([one.grad for one in parameters if one.grad is not None], 3.0)
