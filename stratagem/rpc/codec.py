"""Tensors on the wire: valid protobuf (``protos/frame.proto``), encoded and decoded by hand.

A protobuf ``bytes`` setter would copy the payload twice more. Here a send copies it once, into the message, and a
receive not at all: the tensor is a view on the message. ``payload_offset`` is the first field, so a reader finds the
payload without parsing; it is a multiple of 64, so the payload is aligned for vector instructions.
"""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from google.protobuf.message import DecodeError

from stratagem.errors import FrameError
from stratagem.rpc.generated import frame_pb2
from stratagem.rpc.generated.frame_pb2 import FrameKind as FrameKind

ALIGNMENT = 64
MAX_HEADER_BYTES = 1024
"""Bytes before the payload, at most: whoever keeps the payload keeps the whole message."""
MAX_RANK = 32
NUMBER_BYTES = 8
"""Of the number of a row, in a frame with rows of a table."""
TOGETHER_BYTES = 1 << 20
"""Of frames that leave in one message."""
TOGETHER_OVERHEAD_BYTES = 256
"""What a frame takes there beyond its payload, at most."""
_OFFSET_FIELD_BYTES = 5  # tag and fixed32 of payload_offset
_PADDING_TAG = b"\x42"  # field 8, length-delimited
_PAYLOAD_TAG = b"\x7a"  # field 15, length-delimited
_LENGTH = struct.Struct("<Q56x")  # of a frame among others
_FRAMES = int(frame_pb2.FRAMES)
_MESSAGES = frozenset(
    map(FrameKind.Value, ("COMMIT_UPDATE", "PREPARE_UPDATE", "PULL_WEIGHTS", "REFUSED", "CLOSE_UNITS"))
)
_NO_ELEMENTS = torch.empty(0, dtype=torch.uint8)

_TO_WIRE: dict[torch.dtype, int] = {
    torch.float32: frame_pb2.FLOAT32,
    torch.float16: frame_pb2.FLOAT16,
    torch.bfloat16: frame_pb2.BFLOAT16,
    torch.float64: frame_pb2.FLOAT64,
    torch.int8: frame_pb2.INT8,
    torch.int16: frame_pb2.INT16,
    torch.int32: frame_pb2.INT32,
    torch.int64: frame_pb2.INT64,
    torch.uint8: frame_pb2.UINT8,
    torch.bool: frame_pb2.BOOL,
}
_FROM_WIRE = {wire: dtype for dtype, wire in _TO_WIRE.items()}

with warnings.catch_warnings():
    # torch says once per process that a view on bytes is not writable. Nobody writes to a received frame.
    warnings.simplefilter("ignore", UserWarning)
    torch.frombuffer(b"\0", dtype=torch.uint8)


def can_travel(dtype: torch.dtype) -> bool:
    """Whether frames can carry tensors of this dtype."""
    return dtype in _TO_WIRE


def to_wire_dtype(dtype: torch.dtype) -> int:
    """The ``DType`` number of a torch dtype; ``FrameError`` where it cannot travel."""
    try:
        return _TO_WIRE[dtype]
    except KeyError:
        raise FrameError(f"tensors of {dtype} cannot be sent; these can: {', '.join(map(str, _TO_WIRE))}") from None


def from_wire_dtype(wire: int) -> torch.dtype:
    """The torch dtype of a ``DType`` number; ``FrameError`` where there is none."""
    try:
        return _FROM_WIRE[wire]
    except KeyError:
        raise FrameError(f"expected a DType number between 1 and {len(_FROM_WIRE)}, got {wire}") from None


Parts = list[bytes | memoryview]
"""A frame as bytes that are one after the other."""


class Frame(NamedTuple):
    """One decoded frame. ``tensor`` is a view on the message it came in, and must not be written to."""

    kind: int
    transfer: int
    group: int
    offset: int
    tensor: torch.Tensor
    message: bytes = b""
    """The payload in the place of ``tensor``, of a request or a reply that was read in one piece."""

    @property
    def num_bytes(self) -> int:
        """Of the payload."""
        return len(self.message) or self.tensor.nbytes


def frame_of(kind: int, transfer: int, group: int, offset: int, dtype: torch.dtype, payload: bytearray) -> Frame:
    """A small frame that came whole."""
    if kind in _MESSAGES and dtype is torch.uint8:
        return Frame(kind, transfer, group, offset, _NO_ELEMENTS, bytes(payload))
    return Frame(kind, transfer, group, offset, torch.frombuffer(payload, dtype=dtype))


def message_of(frame: Frame) -> bytes:
    return frame.message or bytes(frame.tensor.contiguous().view(torch.uint8).numpy())


def encode_frame(kind: int, transfer: int, group: int, offset: int, tensor: torch.Tensor) -> bytes:
    """One frame that carries ``tensor`` (any shape, any strides; its values are copied once)."""
    return b"".join(frame_parts(kind, transfer, group, offset, [tensor], tuple(tensor.shape)))


def frame_parts(
    kind: int, transfer: int, group: int, offset: int, pieces: Sequence[torch.Tensor | bytes], shape: tuple[int, ...]
) -> Parts:
    """One frame, yet to be joined, whose payload is the elements of ``pieces``, one after the other, as ``shape``."""
    views = [byte_view(piece) for piece in pieces]
    return _parts((kind, transfer, group, offset), to_wire_dtype(dtype_of(pieces[0])), shape, views)


def encode_together(frames: Sequence[Parts]) -> bytes:
    """One message with several frames; :func:`decode_frames` takes it apart."""
    pieces: list[bytes | memoryview] = []
    for parts in frames:
        num_bytes = sum(map(len, parts))
        pieces += (_LENGTH.pack(num_bytes), *parts, bytes(-num_bytes % ALIGNMENT))
    return b"".join(_parts((_FRAMES, 0, 0, 0), frame_pb2.UINT8, (sum(map(len, pieces)),), pieces))


def _parts(
    place: tuple[int, int, int, int], dtype: int, shape: tuple[int, ...], payload: Sequence[bytes | memoryview]
) -> Parts:
    kind, transfer, group, offset = place
    header = frame_pb2.Frame(
        kind=kind,  # type: ignore[arg-type]  # the enum is an int on the wire
        transfer=transfer,
        group=group,
        offset=offset,
        dtype=dtype,  # type: ignore[arg-type]
        shape=shape,
    ).SerializeToString()
    length = _varint(sum(map(len, payload)))
    # The padding field's own length must fit in one byte: at most 64 + 2 bytes of filling are ever needed.
    bare = _OFFSET_FIELD_BYTES + len(header) + 2 + 1 + len(length)
    padding = -bare % ALIGNMENT
    payload_offset = bare + padding
    return [
        b"\x0d" + struct.pack("<I", payload_offset),
        header,
        _PADDING_TAG + bytes((padding,)) + bytes(padding),
        _PAYLOAD_TAG + length,
        *payload,
    ]


def decode_frames(message: bytes) -> list[Frame]:
    """The frames of a message: one, or several together. What is a small part of such a message is copied, so that
    whoever keeps it does not keep the message. FrameError: the message, or what is in it, is not a frame."""
    whole = decode_frame(message)
    if whole.kind != _FRAMES:
        return [whole]
    frames: list[Frame] = []
    view = memoryview(message)[len(message) - whole.tensor.nbytes :]
    while view:
        num_bytes = _LENGTH.unpack_from(view)[0] if len(view) >= _LENGTH.size else len(view)
        end = _LENGTH.size + num_bytes
        if end > len(view):
            raise FrameError(f"expected a frame of {num_bytes} bytes among others, {len(view)} are left of the message")
        frame = decode_frame(view[_LENGTH.size : end])
        if frame.kind == _FRAMES:
            raise FrameError("expected frames that hold no others")
        is_small = not frame.message and 8 * frame.tensor.nbytes < 7 * len(message)
        frames.append(frame._replace(tensor=frame.tensor.clone()) if is_small else frame)
        view = view[end + -end % ALIGNMENT :]
    return frames


def decode_frame(message: bytes | memoryview) -> Frame:
    """Takes a message apart without copying the payload. FrameError: the message is not a frame, or its payload is not
    what dtype and shape say."""
    if len(message) < _OFFSET_FIELD_BYTES or message[0] != 0x0D:
        raise FrameError(f"expected a frame (payload_offset first), got {len(message)} bytes of something else")
    (payload_offset,) = struct.unpack_from("<I", message, 1)
    num_bytes = len(message) - payload_offset
    tag_at = payload_offset - 1 - len(_varint(max(num_bytes, 0)))
    if payload_offset > MAX_HEADER_BYTES:
        raise FrameError(f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {payload_offset}")
    if (
        num_bytes < 0
        or tag_at < _OFFSET_FIELD_BYTES
        or message[tag_at:payload_offset] != _PAYLOAD_TAG + _varint(num_bytes)
    ):
        raise FrameError(f"expected the payload at byte {payload_offset} of {len(message)} bytes; it is not there")
    try:
        header = frame_pb2.Frame.FromString(bytes(message[:tag_at]))
    except DecodeError as error:
        raise FrameError(f"the header of a frame cannot be parsed: {error}") from None
    dtype = from_wire_dtype(header.dtype)
    shape = tuple(header.shape)
    if len(shape) > MAX_RANK or any(dim >> 63 for dim in shape):
        raise FrameError(f"expected at most {MAX_RANK} dimensions below 2^63, got shape {list(shape)}")
    num_elements = math.prod(shape)
    if num_elements * dtype.itemsize != num_bytes:
        raise FrameError(f"expected {num_elements} elements of {dtype} for shape {list(shape)}, got {num_bytes} bytes")
    if header.kind in _MESSAGES and dtype is torch.uint8:
        payload = bytes(message[payload_offset:])
        return Frame(header.kind, header.transfer, header.group, header.offset, _NO_ELEMENTS, payload)
    try:
        if num_elements:
            tensor = torch.frombuffer(message, dtype=dtype, offset=payload_offset, count=num_elements).view(shape)
        else:
            tensor = torch.empty(shape, dtype=dtype)
    except (RuntimeError, TypeError, ValueError) as error:  # an alignment or a shape that torch does not have
        raise FrameError(f"no tensor of {dtype} and shape {list(shape)} at byte {payload_offset}: {error}") from None
    return Frame(header.kind, header.transfer, header.group, header.offset, tensor)


def dtype_of(piece: torch.Tensor | bytes) -> torch.dtype:
    """What a piece is made of: bytes are uint8."""
    return torch.uint8 if isinstance(piece, bytes) else piece.dtype


def as_tensors(pieces: Sequence[torch.Tensor | bytes]) -> list[torch.Tensor]:
    """Pieces as tensors; bytes as views on them."""
    return [torch.frombuffer(piece, dtype=torch.uint8) if isinstance(piece, bytes) else piece for piece in pieces]


def byte_view(tensor: torch.Tensor | bytes) -> memoryview:
    """The bytes of a tensor; no copy when it is contiguous and on the CPU."""
    if isinstance(tensor, bytes):
        return memoryview(tensor)
    if not tensor.is_cpu or tensor.requires_grad or not tensor.is_contiguous():
        tensor = tensor.detach().cpu().contiguous()
    if not tensor.nbytes:  # whose address is 0, which numpy 2.0 does not take for one
        return memoryview(b"")
    view: Any = np.asarray(_Memory(tensor))
    return memoryview(view)


class _Memory:
    """Of a tensor, for numpy. After ``Tensor.numpy()`` torch refuses to resize the storage, as FSDP1 does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
