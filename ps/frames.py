"""Frames as this ps builds and reads them: the one place of the domain's neighbourhood that knows their encoding."""

from __future__ import annotations

import torch

from stratagem.errors import FrameError
from stratagem.ps.requests import FrameKind
from stratagem.rpc.codec import Frame, decode_frame, encode_frame
from stratagem.rpc.generated import frame_pb2

WEIGHTS = int(frame_pb2.WEIGHTS)
_KINDS = {
    int(frame_pb2.GRADIENT): FrameKind.GRADIENT,
    int(frame_pb2.ROW_GRADIENT): FrameKind.GRADIENT,
    int(frame_pb2.VALUES): FrameKind.VALUES,
    int(frame_pb2.WANTED_ROWS): FrameKind.WANTED_ROWS,
}


def weights_message(transfer: int, group: int, offset: int, piece: torch.Tensor) -> bytes:
    """A message with a frame of published weights (or of a slot): ``piece`` copied once."""
    return encode_frame(WEIGHTS, transfer, group, offset, piece)


def reply_message(kind: int, transfer: int, message: bytes) -> bytes:
    """A message with a frame of a reply."""
    return encode_frame(kind, transfer, 0, 0, torch.frombuffer(message, dtype=torch.uint8))


def payload_of(message: bytes) -> torch.Tensor:
    """The elements in a message: a view on it."""
    return decode_frame(message).tensor


def read_message(message: bytes) -> tuple[FrameKind, Frame]:
    """A frame that a worker sent over the grpc lane.

    Raises:
        FrameError: not a frame, or of a kind that workers do not send.
    """
    frame = decode_frame(message)
    return kind_of(frame), frame


def kind_of(frame: Frame) -> FrameKind:
    """What a frame from a worker is for.

    Raises:
        FrameError: of a kind that workers do not send.
    """
    kind = _KINDS.get(frame.kind)
    if kind is None:
        raise FrameError(f"expected a frame that workers send (a gradient, values, row numbers), got kind {frame.kind}")
    return kind
