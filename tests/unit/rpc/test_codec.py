"""The frame codec: what goes in comes out, any protobuf client can read it, and nonsense is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.errors import FrameError
from stratagem.rpc.codec import (
    ALIGNMENT,
    TOGETHER_OVERHEAD_BYTES,
    decode_frame,
    decode_frames,
    encode_frame,
    encode_together,
    frame_parts,
    from_wire_dtype,
    to_wire_dtype,
)
from stratagem.rpc.generated import frame_pb2

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def tensor_of(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.rand(shape, generator=generator) * 200 - 100).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [[], [0], [3], [2, 0, 4], [5, 7]], ids=str)
def test_round_trip(shape: list[int], dtype: torch.dtype) -> None:
    tensor = tensor_of(shape, dtype)
    frame = decode_frame(encode_frame(frame_pb2.WEIGHTS, 2**50, 3, 2**40, tensor))
    assert (frame.kind, frame.transfer, frame.group, frame.offset) == (frame_pb2.WEIGHTS, 2**50, 3, 2**40)
    assert frame.tensor.dtype == dtype
    assert list(frame.tensor.shape) == shape
    assert torch.equal(frame.tensor, tensor)


def test_strided_views_are_sent_in_logical_order() -> None:
    whole = torch.arange(24.0).view(4, 6)
    for view in (whole.t(), whole[:, ::2], whole[1:3], whole.view(2, 3, 4).permute(2, 0, 1)):
        assert torch.equal(decode_frame(encode_frame(1, 1, 1, 0, view)).tensor, view)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_generated_client_reads_our_frames_and_we_read_its(dtype: torch.dtype) -> None:
    tensor = tensor_of([3, 5], dtype)
    message = frame_pb2.Frame.FromString(encode_frame(frame_pb2.GRADIENT, 9, 8, 7, tensor))
    assert (message.kind, message.transfer, message.group, message.offset) == (frame_pb2.GRADIENT, 9, 8, 7)
    assert list(message.shape) == [3, 5]
    assert message.payload == tensor.view(torch.uint8).numpy().tobytes()
    assert torch.equal(decode_frame(message.SerializeToString()).tensor, tensor)


def test_payload_is_aligned_and_received_without_a_copy() -> None:
    for size in range(1, 300):
        message = encode_frame(1, size, 1, 0, torch.ones(size))
        assert frame_pb2.Frame.FromString(message).payload_offset % ALIGNMENT == 0
    first, second = decode_frame(message).tensor, decode_frame(message).tensor
    assert first.data_ptr() == second.data_ptr()


def test_pieces_are_joined() -> None:
    pieces = [torch.arange(3.0), torch.arange(8.0).view(2, 4).t().reshape(-1), torch.zeros(0)]
    frame = decode_frame(b"".join(frame_parts(1, 1, 1, 0, pieces, (11,))))
    assert torch.equal(frame.tensor, torch.cat(pieces))


def test_unknown_dtypes_are_named() -> None:
    with pytest.raises(FrameError, match="complex64"):
        to_wire_dtype(torch.complex64)
    with pytest.raises(FrameError, match="99"):
        from_wire_dtype(99)


def test_wrong_size_is_refused() -> None:
    message = frame_pb2.Frame.FromString(encode_frame(1, 1, 1, 0, torch.ones(4)))
    message.shape[0] = 2**60
    with pytest.raises(FrameError, match="expected"):
        decode_frame(message.SerializeToString())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode_frame(data)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_mutated_frames_are_refused_or_decoded(data: st.DataObject) -> None:
    message = bytearray(encode_frame(1, 5, 2, 3, torch.arange(10.0)))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    message = message[: data.draw(st.integers(0, len(message)))]
    try:
        frame = decode_frame(bytes(message))
    except FrameError:
        return
    assert frame.tensor.numel() * frame.tensor.itemsize <= len(message)


def test_frames_that_leave_together_arrive_as_they_are() -> None:
    sent = [torch.arange(5000.0), torch.arange(3, dtype=torch.int64), torch.zeros(0), torch.ones(2, 3)]
    frames = [encode_frame(1, index, 2, 3, tensor) for index, tensor in enumerate(sent)]
    message = encode_together([[frame] for frame in frames])
    assert frame_pb2.Frame.FromString(message).kind == frame_pb2.FRAMES
    assert len(message) <= sum(tensor.nbytes + TOGETHER_OVERHEAD_BYTES for tensor in sent) + ALIGNMENT
    came = decode_frames(message)
    assert [(frame.kind, frame.transfer, frame.group, frame.offset) for frame in came] == [
        (1, i, 2, 3) for i in range(4)
    ]
    assert all(torch.equal(frame.tensor, tensor) for frame, tensor in zip(came, sent, strict=True))
    assert [frame.transfer for frame in decode_frames(frames[2])] == [2]


def test_a_small_frame_does_not_keep_those_beside_it_alive() -> None:
    message = encode_together([[encode_frame(1, 1, 1, 0, torch.ones(size))] for size in (10_000, 10)])
    first = torch.frombuffer(message, dtype=torch.uint8).data_ptr()
    large, small = (frame.tensor.data_ptr() in range(first, first + len(message)) for frame in decode_frames(message))
    assert large and not small


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_mutated_frames_together_are_refused_or_decoded(data: st.DataObject) -> None:
    frame = encode_frame(1, 5, 2, 3, torch.arange(10.0))
    message = bytearray(encode_together([[frame], [frame]]))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    message = message[: data.draw(st.integers(0, len(message)))]
    try:
        frames = decode_frames(bytes(message))
    except FrameError:
        return
    assert sum(frame.tensor.nbytes for frame in frames) <= len(message)


def test_frames_together_hold_no_others_and_end_with_the_message() -> None:
    frame = encode_frame(1, 5, 2, 3, torch.arange(10.0))
    together = encode_together([[frame], [frame]])
    with pytest.raises(FrameError, match="that hold no others"):
        decode_frames(encode_together([[frame], [together]]))
    for num_bytes in (1, 63, 64, 100, len(frame)):
        cut = [decode_frame(together).tensor[:num_bytes]]
        with pytest.raises(FrameError):
            decode_frames(b"".join(frame_parts(int(frame_pb2.FRAMES), 0, 0, 0, cut, (num_bytes,))))
