"""Frames as this ps builds and reads them: the one place of the domain's neighbourhood that knows their encoding."""

from __future__ import annotations

import torch

from stratagem.errors import FrameError
from stratagem.ps.requests import FrameKind
from stratagem.rpc.codec import Frame, Parts, decode_frame, encode_frame, frame_parts
from stratagem.rpc.generated import frame_pb2

WEIGHTS = int(frame_pb2.WEIGHTS)
COMMIT_UPDATE, CLOSE_UNITS = int(frame_pb2.COMMIT_UPDATE), int(frame_pb2.CLOSE_UNITS)
FOLLOW, FOLLOWED = int(frame_pb2.FOLLOW), int(frame_pb2.FOLLOWED)
_KINDS = {
    int(frame_pb2.GRADIENT): FrameKind.GRADIENT,
    int(frame_pb2.ROW_GRADIENT): FrameKind.GRADIENT,
    int(frame_pb2.VALUES): FrameKind.VALUES,
    int(frame_pb2.WANTED_ROWS): FrameKind.WANTED_ROWS,
}


def weights_message(transfer: int, group: int, offset: int, piece: torch.Tensor) -> bytes:
    """A message with a frame of published weights (or of a slot): ``piece`` copied once."""
    return encode_frame(WEIGHTS, transfer, group, offset, piece)


def weights_parts(transfer: int, group: int, offset: int, piece: torch.Tensor) -> Parts:
    """The same, not copied yet."""
    return frame_parts(WEIGHTS, transfer, group, offset, [piece], tuple(piece.shape))


def reply_parts(kind: int, transfer: int, message: bytes) -> Parts:
    """A frame of a reply."""
    return frame_parts(kind, transfer, 0, 0, [message], (len(message),))


def payload_of(message: bytes) -> torch.Tensor:
    """The elements in a message: a view on it."""
    return decode_frame(message).tensor


def kind_of(frame: Frame) -> FrameKind:
    """What a frame from a worker is for.

    Raises:
        FrameError: of a kind that workers do not send.
    """
    kind = _KINDS.get(frame.kind)
    if kind is None:
        raise FrameError(f"expected a frame that workers send (a gradient, values, row numbers), got kind {frame.kind}")
    return kind
