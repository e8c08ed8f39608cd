"""What this worker asks the other ranks of its generation."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc

from stratagem.cluster.membership import Membership
from stratagem.errors import ClusterTimeoutError, PeerUnavailableError
from stratagem.rpc import channels
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.fields import from_message, to_message
from stratagem.rpc.generated import common_pb2, lane_pb2, worker_pb2, worker_pb2_grpc
from stratagem.rpc.lane_listener import LaneTicket, connect_lane
from stratagem.worker.ring.lane_plan import PairLane, RankInfo
from stratagem.worker.ring.members import Members, MembershipSource, RankPosition

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0  # a meeting that waits for others is asked for again this often, to see changes of the cluster
_Reply = TypeVar("_Reply")


class MembersChangedError(Exception):
    """The cluster has changed since this generation was formed."""


@dataclasses.dataclass(eq=False, repr=False)
class Peers:
    """The ``Worker`` services of the other ranks."""

    _session: MembershipSource
    members: Members
    num_meetings: int
    """Meetings of this generation that this rank has been to, the same number on every rank."""
    _is_over: Callable[[Membership], bool]
    """Whether there is no use in meeting any more, for another reason than that the members are others."""
    tell_again: Callable[[], None] | None
    """Says once more that lanes are broken, some may have been out of reach: called every :data:`PATIENCE_S` seconds of
    the next meeting that somebody is waited for."""

    def __post_init__(self) -> None:
        self.rank = self.members.rank_of(self._session.task)
        self._guard = threading.Lock()
        self._channels: dict[int, grpc.Channel] = {}

    @property
    def sender(self) -> common_pb2.Sender:
        return common_pb2.Sender(task=self._session.task, incarnation=self._session.incarnation)

    @property
    def meeting(self) -> tuple[int, int]:
        """The newest one: generation, and number in it."""
        return self.members.generation, self.num_meetings

    @property
    def is_over(self) -> bool:
        """Whether this generation will not form any more: its members are others, or there is no use in meeting."""
        membership = self._session.membership
        is_old = membership.generation > self.members.generation and membership.min_workers
        return bool(is_old or self.members.lost(membership) or self._is_over(membership))

    def stub(self, rank: int) -> worker_pb2_grpc.WorkerStub:
        """The service of a rank, over a control connection."""
        with self._guard:
            if rank not in self._channels:
                self._channels[rank] = self.connect(rank)
            return worker_pb2_grpc.WorkerStub(self._channels[rank])

    def connect(self, rank: int) -> grpc.Channel:
        """A connection of its own to a rank; the caller closes it."""
        peer = self.members.ranks[rank]
        return channels.connect(peer.address, peer.task, self._session.security)

    def connect_lane(self, rank: int, ticket: LaneTicket, deadline: float) -> socket.socket:
        """Goes in at the listener of a rank. Raises PeerUnavailableError: nobody is there, or it does not let this
        worker in."""
        peer = self.members.ranks[rank]
        return connect_lane(ticket, peer.host, deadline, peer.task, self._session.security)

    def meet(self, info: RankInfo, deadline: float) -> Sequence[RankInfo]:
        """Meets every rank; returns what they said, in rank order. Raises MembersChangedError: a worker was replaced
        meanwhile, or the meeting is over; ClusterTimeoutError: somebody did not come before ``deadline``
        (``time.monotonic()`` seconds)."""
        request = worker_pb2.MeetRequest(
            sender=self.sender,
            generation=self.members.generation,
            round=self.num_meetings + 1,
            description=to_message(worker_pb2.Description, info),
        )
        quiet_until, why = time.monotonic() + PATIENCE_S, ""
        while True:
            self._session.raise_if_stopped()
            if self.is_over:
                raise MembersChangedError
            try:
                # Rank 0 answers after half of the time that it is given.
                patience_s = min(PATIENCE_S, max(0.0, deadline - time.monotonic()) / 2 + 1.0)
                reply = self._call(0, self.stub(0).Meet, request, 2 * patience_s)
                self.num_meetings += 1
                self.tell_again = None
                return [from_message(RankInfo, one) for one in reply.descriptions]
            except PeerUnavailableError as error:
                first = self.members.ranks[0]
                if time.monotonic() > deadline:
                    raise ClusterTimeoutError(
                        f"the ring did not form: {self._session.task} did not meet all of "
                        f"{', '.join(rank.task for rank in self.members.ranks)} at {first.task}: {error}. Does every "
                        f"rank come to this point of the script, and can it reach {first.address}?"
                    ) from None
                if time.monotonic() > quiet_until:
                    quiet_until = time.monotonic() + PATIENCE_S
                    if self.tell_again is not None:
                        self.tell_again()
                    if str(error) != why:
                        why = str(error)
                        logger.info("Waiting for the ring to form at %s (%s): %s", first.task, first.address, why)
                self._session.wait_stopped(0.1)

    def open_lane(self, rank: int, kind: PairLane, purpose: str) -> LaneTicket:
        """Asks a rank for a ticket in. Raises PeerUnavailableError: it does not answer, or does not know this
        worker."""
        request = lane_pb2.OpenLaneRequest(
            sender=self.sender,
            generation=self.members.generation,
            kind=lane_pb2.LaneKind.Value(kind.upper()),
            purpose=purpose,
        )
        reply = self._call(rank, self.stub(rank).OpenLane, request, PATIENCE_S)
        return LaneTicket(reply.token, reply.port, reply.socket_name)

    def position(self, rank: int, timeout_s: float, ordinal: int = 0) -> RankPosition:
        """Where a rank stands, and what it called as the collective ``ordinal``. Raises PeerUnavailableError: it does
        not answer within ``timeout_s`` seconds."""
        request = worker_pb2.GetPositionRequest(ordinal=ordinal)
        reply = self._call(rank, self.stub(rank).GetPosition, request, timeout_s)
        return from_message(RankPosition, reply, waiting_on=reply.waiting_on if reply.has_rank else None)

    def abort(self, reason: str, is_out_of_step: bool, timeout_s: float) -> None:
        """Tells every other rank that the collectives are broken; whoever does not answer is not waited for longer."""
        request = worker_pb2.AbortRequest(
            sender=self.sender,
            generation=self.members.generation,
            round=self.num_meetings,
            reason=reason,
            is_out_of_step=is_out_of_step,
        )
        others = [rank for rank in range(len(self.members.ranks)) if rank != self.rank]
        calls: list[Any] = [self.stub(rank).Abort.future(request, timeout=timeout_s) for rank in others]
        for call in calls:
            with contextlib.suppress(grpc.RpcError):
                call.result()

    def close(self) -> None:
        with self._guard:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()

    def _call(self, rank: int, method: Callable[..., _Reply], request: Any, timeout_s: float) -> _Reply:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.members.ranks[rank].task) from None
        except ValueError:  # the channel was closed under the call
            raise PeerUnavailableError(f"the connection to {self.members.ranks[rank].task} is closed") from None
