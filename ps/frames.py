"""The kinds of frames, in the domain's own types."""

from __future__ import annotations

from stratagem.errors import FrameError
from stratagem.ps.requests import FrameKind
from stratagem.rpc.codec import Frame
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


def kind_of(frame: Frame) -> FrameKind:
    """What a frame from a worker is for; ``FrameError`` where workers send none of its kind."""
    kind = _KINDS.get(frame.kind)
    if kind is None:
        raise FrameError(f"expected a frame that workers send (a gradient, values, row numbers), got kind {frame.kind}")
    return kind
