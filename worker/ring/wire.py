"""What ranks tell each other, as messages and back. Nothing is decided here."""

from __future__ import annotations

from stratagem.errors import ConfigurationError
from stratagem.rpc.fields import from_message, to_message
from stratagem.rpc.generated import lane_pb2, worker_pb2
from stratagem.worker.ring.lane_plan import PairLane
from stratagem.worker.ring.members import RankPosition

_LANES: dict[int, PairLane] = {lane_pb2.GRPC: "grpc", lane_pb2.TCP: "tcp", lane_pb2.SHM: "shm"}


def lane_from_proto(kind: int) -> PairLane:
    """Which lane is asked for.

    Raises:
        ConfigurationError: no such kind of lane.
    """
    if kind not in _LANES:
        raise ConfigurationError(f"expected a lane of grpc, tcp or shm, got kind {kind}")
    return _LANES[kind]


def position_to_proto(position: RankPosition) -> worker_pb2.GetPositionReply:
    """Where a rank stands."""
    return to_message(worker_pb2.GetPositionReply, position, has_rank=position.waiting_on is not None)


def position_from_proto(reply: worker_pb2.GetPositionReply) -> RankPosition:
    """Where a rank stands."""
    return from_message(RankPosition, reply, waiting_on=reply.waiting_on if reply.has_rank else None)
