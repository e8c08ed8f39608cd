"""Opens the lane to a parameter server: shared memory on its host, a socket between hosts, gRPC where neither works."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Literal

import grpc

from stratagem.cluster.communication import Transport
from stratagem.cluster.spec import split_address
from stratagem.errors import ConfigurationError, FencedError, StratagemError
from stratagem.rpc import channels
from stratagem.rpc.codec import TOGETHER_BYTES
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.generated import common_pb2, lane_pb2, ps_pb2_grpc
from stratagem.rpc.grpc_lane import TRANSFER_METHOD, GrpcLane
from stratagem.rpc.host_id import own_host_id
from stratagem.rpc.inbox import INBOX_BYTES
from stratagem.rpc.lane import Lane, nothing
from stratagem.rpc.lane_listener import LaneTicket, connect_lane
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.shm_lane import ShmLane
from stratagem.rpc.tcp_lane import TcpLane

logger = logging.getLogger(__name__)

Kind = Literal["shm", "tcp", "grpc"]
OPEN_S = 5.0
"""Seconds that opening one kind of lane may take."""
UNREAD_BYTES = 1 << 30
"""Frames in shared memory that a ps may leave unread before this worker waits for it."""


@dataclasses.dataclass(frozen=True)
class PsLaneOpener:
    stub: ps_pb2_grpc.ParameterServerStub
    sender: common_pb2.Sender
    ps: str
    """Task id, for messages."""
    address: str
    meter: BytesMeter
    security: Security = OPEN
    max_inbox_bytes: int = INBOX_BYTES
    """Of a lane, see ``WorkerConfig``."""
    on_wait: Callable[[], None] = nothing
    """Called now and then while a read from the lane waits; what it raises ends the wait."""
    frame_bytes: int = TOGETHER_BYTES
    """Payload bytes of a frame; no message of several is larger."""

    def open(self, transport: Transport, place: str) -> Lane:
        """The lane asked for; ``auto`` takes the fastest that works. ``place``: where the ps runs, by its own words.
        ConfigurationError: the lane asked for cannot be had here. PeerUnavailableError: the ps does not answer."""
        is_here = place == own_host_id()
        kinds, better = _candidates(transport, is_here, self.ps), ""
        for kind in kinds:
            try:
                lane = self._open(kind)
            except FencedError:
                raise
            except StratagemError as error:
                if kind == kinds[-1]:
                    raise
                logger.info("%s: no %s lane: %s", self.ps, kind, error)
                better = better or f"no {kind} lane: {error}"
            else:
                why = f"{transport} was requested" if transport != "auto" else _WHY[kind]
                logger.info("%s over %s, because %s", self.ps, kind, why)
                if transport != "auto" and kind != "shm" and is_here:
                    better = f"{kind} was requested, and {self.ps} is on this host"
                self.meter.chose(self.ps, kind, why, better)
                return lane
        raise AssertionError("grpc is always tried last")

    def _open(self, kind: Kind) -> Lane:
        if kind == "grpc":
            metadata = (
                ("stratagem-task", self.sender.task),
                ("stratagem-incarnation", str(self.sender.incarnation)),
            )
            channel = channels.connect(self.address, self.ps, self.security)
            limits = self.max_inbox_bytes, self.on_wait, min(TOGETHER_BYTES, self.frame_bytes)
            return GrpcLane(channel, TRANSFER_METHOD, metadata, self.ps, self.meter, *limits)
        wire = lane_pb2.SHM if kind == "shm" else lane_pb2.TCP
        host = split_address(self.address)[0]
        deadline = time.monotonic() + OPEN_S
        tickets = [self._ask(wire, purpose) for purpose in ("up", "down")]
        with contextlib.ExitStack() as undo:
            outward = undo.enter_context(connect_lane(tickets[0], host, deadline, self.ps, self.security))
            inward = undo.enter_context(connect_lane(tickets[1], host, deadline, self.ps, self.security))
            lane: Lane
            if kind == "shm":
                lane = ShmLane(outward, inward, self.ps, self.meter, lambda: UNREAD_BYTES, self.on_wait)
            else:
                lane = TcpLane(outward, inward, self.ps, self.meter, self.max_inbox_bytes, self.on_wait)
            undo.pop_all()
        return lane

    def _ask(self, kind: lane_pb2.LaneKind.ValueType, purpose: str) -> LaneTicket:
        request = lane_pb2.OpenLaneRequest(sender=self.sender, kind=kind, purpose=purpose)
        try:
            reply: lane_pb2.OpenLaneReply = self.stub.OpenLane(request, timeout=OPEN_S)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.ps) from None
        return LaneTicket(reply.token, reply.port, reply.socket_name)


_WHY: dict[Kind, str] = {
    "shm": "it is on this host",
    "tcp": "it is on another host, or shares no memory with this one",
    "grpc": "nothing faster works",
}


def _candidates(transport: Transport, same_place: bool, ps: str) -> list[Kind]:
    if transport == "nccl":
        raise ConfigurationError(
            "--transport nccl is for MultiWorkerMirroredStrategy; a ps is reached by shm, tcp or grpc"
        )
    if transport == "shm" and not same_place:
        raise ConfigurationError(
            f"--transport shm needs {ps} on this host and in this network namespace, but it is elsewhere; use auto"
        )
    if transport != "auto":
        return [transport]
    return ["shm", "tcp", "grpc"] if same_place else ["tcp", "grpc"]
