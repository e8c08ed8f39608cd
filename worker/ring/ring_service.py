"""What the other ranks may ask of this worker: to meet, to open lanes, to break, to say where it stands."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Iterator

from stratagem.errors import ConfigurationError, FencedError, LimitError, PeerUnavailableError
from stratagem.rpc.generated import chief_pb2, common_pb2, lane_pb2, worker_pb2
from stratagem.rpc.grpc_lane import FrameStream, ServedGrpcLane
from stratagem.rpc.inbox import INBOX_BYTES
from stratagem.rpc.lane import BytesMeter
from stratagem.rpc.lane_listener import MAX_LANES_PER_PEER, Kind, LaneListener, LaneTicket
from stratagem.rpc.security import OPEN, Security
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.failure_diagnosis import ANSWER_S, FailureDiagnosis
from stratagem.worker.ring.meeting import MeetingRoom
from stratagem.worker.ring.members import members_of
from stratagem.worker.ring.peers import PATIENCE_S

Visitor = tuple[str, int, int, str]
"""Task, incarnation, generation, purpose."""
_KINDS: dict[int, Kind] = {lane_pb2.TCP: "tcp", lane_pb2.SHM: "shm"}


class RingService:
    """The ring side of a worker's server; it stands before the ring exists and after it broke.

    Args:
        host: address to listen on for sockets.
        membership: what the chief says now.
        meter: counts bytes of grpc lanes.
        security: of this worker.
        max_lanes_per_peer: see ``WorkerConfig``.
        max_inbox_bytes: of a lane, see ``WorkerConfig``.
    """

    def __init__(
        self,
        host: str,
        membership: Callable[[], chief_pb2.Membership],
        meter: BytesMeter,
        security: Security = OPEN,
        *,
        max_lanes_per_peer: int = MAX_LANES_PER_PEER,
        max_inbox_bytes: int = INBOX_BYTES,
    ) -> None:
        self.listener = LaneListener(host, security, max_lanes_per_peer)
        self.max_inbox_bytes = max_inbox_bytes
        self._max_lanes_per_peer = max_lanes_per_peer
        self.communicator: Communicator | None = None
        self.breakage: FailureDiagnosis | None = None
        self._membership = membership
        self._meter = meter
        self._room: MeetingRoom[worker_pb2.Description] = MeetingRoom()
        self._changed = threading.Condition()
        self._tokens: dict[bytes, Visitor] = {}
        self._lanes: dict[Visitor, ServedGrpcLane] = {}
        self._closed = False

    def meet(self, request: worker_pb2.MeetRequest) -> worker_pb2.MeetReply:
        """Holds the caller until every rank has come.

        Raises:
            PeerUnavailableError: not all came for now; ask again.
        """
        members = members_of(self._membership())
        self._check(request.sender)
        said = self._room.meet(
            request.generation,
            request.round,
            len(members.ranks),
            members.rank_of(request.sender.task),
            request.description,
            PATIENCE_S,
        )
        if said is None:
            raise PeerUnavailableError("not every rank has come yet")
        return worker_pb2.MeetReply(descriptions=said)

    def open_lane(self, request: lane_pb2.OpenLaneRequest) -> LaneTicket:
        """A token for one lane.

        Raises:
            FencedError: the caller is no live worker.
            ConfigurationError: no such kind of lane.
            LimitError: too many lanes of the caller are not open yet.
        """
        self._check(request.sender)
        visitor = (request.sender.task, request.sender.incarnation, request.generation, request.purpose)
        if request.kind == lane_pb2.GRPC:
            token = secrets.token_bytes(32)
            with self._changed:
                self._tokens = {known: other for known, other in self._tokens.items() if other != visitor}
                num_lanes = sum(other[0] == visitor[0] for other in self._tokens.values())
                if num_lanes >= self._max_lanes_per_peer:
                    raise LimitError(
                        f"{visitor[0]} has {num_lanes} lanes that are not open yet, which is max_lanes_per_peer"
                    )
                self._tokens[token] = visitor
            return LaneTicket(token)
        if request.kind not in _KINDS:
            raise ConfigurationError(f"expected a lane of grpc, tcp or shm, got kind {request.kind}")
        return self.listener.expect(visitor, _KINDS[request.kind], request.sender.task)

    def exchange(self, token: bytes, messages: Iterator[bytes], stream: FrameStream) -> None:
        """Serves a grpc lane until it ends.

        Raises:
            FencedError: the token is unknown.
        """
        with self._changed:
            known = next((other for other in self._tokens if hmac.compare_digest(other, token)), None)
            if known is None or self._closed:
                raise FencedError("a lane needs a token from OpenLane, and each works once")
            visitor = self._tokens.pop(known)
            lane = ServedGrpcLane(visitor[0], self._meter)
            self._lanes[visitor] = lane
            self._changed.notify_all()
        try:
            lane.serve(messages, stream)
        finally:
            with self._changed:  # nobody took it: it would keep its call
                if self._lanes.get(visitor) is lane:
                    del self._lanes[visitor]

    def wait_grpc(self, visitor: Visitor, deadline: float) -> ServedGrpcLane:
        """The lane of a visitor, once its stream is there.

        Raises:
            PeerUnavailableError: not before ``deadline`` (``time.monotonic()`` seconds).
        """
        with self._changed:
            self._changed.wait_for(
                lambda: visitor in self._lanes or self._closed, max(0.0, deadline - time.monotonic())
            )
            if visitor not in self._lanes:
                raise PeerUnavailableError(f"{visitor[0]} opened no lane in time")
            return self._lanes.pop(visitor)

    def abort(self, request: worker_pb2.AbortRequest) -> None:
        """A rank of this generation found out that the collectives are broken."""
        self._check(request.sender)
        if self.breakage is not None and request.generation == self.breakage.generation:
            self.breakage.told(request.reason)

    def position(self) -> worker_pb2.GetPositionReply:
        """Where this worker stands."""
        if self.communicator is None or self.breakage is None:
            return worker_pb2.GetPositionReply(position="the start: its ring is not formed yet")
        waiting_on = self.communicator.group.waiting_on()
        reply = worker_pb2.GetPositionReply(
            position=str(self.communicator.position),
            ordinal=self.communicator.position.ordinal,
            broken=self.breakage.reason(ANSWER_S),
        )
        if waiting_on is None and not reply.broken:
            waiting_on = self.breakage.suspect  # whoever asks goes on there, while this rank waits for an answer itself
        if waiting_on is not None:
            reply.waiting_on, reply.has_rank = waiting_on, True
        return reply

    def close(self) -> None:
        """Opens nothing any more."""
        self._room.close()
        self.listener.close()
        with self._changed:
            self._closed = True
            lanes = [*self._lanes.values()]
            self._changed.notify_all()
        for lane in lanes:
            with contextlib.suppress(Exception):
                lane.close("this worker has ended")

    def _check(self, sender: common_pb2.Sender) -> None:
        # What the chief said last; it may tell the caller of a change before it tells this worker.
        lives = {info.task: info for info in self._membership().tasks}
        known = lives.get(sender.task)
        if lives and (known is None or sender.incarnation < known.incarnation):
            raise FencedError(f"{sender.task} (life {sender.incarnation}) is no live member of this cluster")
        if known is None or not known.live or sender.incarnation > known.incarnation:
            raise PeerUnavailableError(f"{sender.task} (life {sender.incarnation}) is not known here yet; ask again")
