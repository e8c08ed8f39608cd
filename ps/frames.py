"""Frames as this ps builds and reads them: the one place of the domain's neighbourhood that knows their encoding."""

from __future__ import annotations

import torch

from stratagem.errors import FrameError
from stratagem.ps.requests import FrameKind
from stratagem.rpc.codec import Frame, decode_frame, encode_frame
from stratagem.rpc.generated import frame_pb2

_KINDS = {frame_pb2.GRADIENT: FrameKind.GRADIENT, frame_pb2.VALUES: FrameKind.VALUES}


def weights_frame(transfer: int, group: int, offset: int, piece: torch.Tensor) -> bytes:
    """A frame of published weights (or of a slot): ``piece`` copied once."""
    return encode_frame(frame_pb2.WEIGHTS, transfer, group, offset, piece)


def readdress(message: bytes, transfer: int) -> bytes:
    """The same frame under another transfer id: one copy."""
    frame = decode_frame(message)
    return encode_frame(frame.kind, transfer, frame.group, frame.offset, frame.tensor)


def read_frame(message: bytes) -> tuple[FrameKind, Frame]:
    """A frame that a worker sent.

    Raises:
        FrameError: not a frame, or of a kind that workers do not send.
    """
    frame = decode_frame(message)
    kind = _KINDS.get(frame.kind)  # type: ignore[call-overload]  # the enum is an int on the wire
    if kind is None:
        raise FrameError(f"expected a frame of kind GRADIENT or VALUES from a worker, got kind {frame.kind}")
    return kind, frame
