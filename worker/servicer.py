"""The wire of a worker: each method decodes, makes one call, encodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from stratagem.errors import ConfigurationError
from stratagem.rpc.fields import from_message, to_message
from stratagem.rpc.generated import lane_pb2, worker_pb2
from stratagem.rpc.units import incarnation_from_proto
from stratagem.worker.ring.lane_plan import PairLane, RankInfo
from stratagem.worker.ring.peers import PATIENCE_S
from stratagem.worker.ring.ring_service import RingService

_LANES: dict[int, PairLane] = {lane_pb2.GRPC: "grpc", lane_pb2.TCP: "tcp", lane_pb2.SHM: "shm"}
SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"]


class WorkerServicer:
    def __init__(self, ring_service: RingService) -> None:
        self._ring_service = ring_service

    def Meet(self, request: worker_pb2.MeetRequest, context: grpc.ServicerContext) -> worker_pb2.MeetReply:
        caller, info = incarnation_from_proto(request.sender), from_message(RankInfo, request.description)
        patience_s = (context.time_remaining() or PATIENCE_S) / 2  # the rest is for the way
        said = self._ring_service.meet(caller, request.generation, request.round, info, patience_s)
        return worker_pb2.MeetReply(descriptions=[to_message(worker_pb2.Description, info) for info in said])

    def OpenLane(self, request: lane_pb2.OpenLaneRequest, context: grpc.ServicerContext) -> lane_pb2.OpenLaneReply:
        if request.kind not in _LANES:
            raise ConfigurationError(f"expected a lane of grpc, tcp or shm, got kind {request.kind}")
        caller, kind = incarnation_from_proto(request.sender), _LANES[request.kind]
        ticket = self._ring_service.open_lane(caller, request.generation, kind, request.purpose)
        return lane_pb2.OpenLaneReply(token=ticket.token, port=ticket.port, socket_name=ticket.socket_name)

    def Exchange(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        token: Any = dict(context.invocation_metadata()).get("stratagem-token-bin", b"")
        self._ring_service.exchange(token, messages, context.cancel)
        yield from ()

    def Abort(self, request: worker_pb2.AbortRequest, context: grpc.ServicerContext) -> worker_pb2.AbortReply:
        meeting = request.generation, request.round
        self._ring_service.abort(
            incarnation_from_proto(request.sender), meeting, request.reason, request.is_out_of_step
        )
        return worker_pb2.AbortReply()

    def GetPosition(
        self, request: worker_pb2.GetPositionRequest, context: grpc.ServicerContext
    ) -> worker_pb2.GetPositionReply:
        position = self._ring_service.position(request.ordinal)
        return to_message(worker_pb2.GetPositionReply, position, has_rank=position.waiting_on is not None)
