"""Opens the lanes that a plan asks for, both directions at once, so that nobody waits in a circle."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from stratagem.errors import PeerUnavailableError
from stratagem.rpc.grpc_lane import EXCHANGE_METHOD, GrpcLane
from stratagem.rpc.lane import ReceivingLane, SendingLane
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.shm_lane import ShmSender
from stratagem.rpc.shm_receiver import ShmReceiver
from stratagem.rpc.striped_lane import StripedReceiver, StripedSender
from stratagem.rpc.tcp_lane import TcpReceiver, TcpSender
from stratagem.worker.ring.group import Group
from stratagem.worker.ring.lane_plan import PairLane, RingLane
from stratagem.worker.ring.peers import Peers
from stratagem.worker.ring.ring_service import PeerKey, RingService

T = TypeVar("T")

LOOK_S = 0.25
"""How often a rank that waits for a lane looks whether another one has given up."""


class Opener:
    """Lanes of one generation. ``deadline``: ``time.monotonic()`` seconds."""

    def __init__(self, ring_service: RingService, peers: Peers, meter: BytesMeter, deadline: float) -> None:
        self._ring_service = ring_service
        self._peers = peers
        self._meter = meter
        self.deadline = deadline

    def made(self, group: Group) -> None:
        """The first barrier of a group ends when another rank says that it could not open its lanes."""
        self._ring_service.forms(self._peers.meeting, group.close)

    def links(self, ranks: Sequence[int], purpose: str) -> dict[int, socket.socket]:
        """A Unix socket to every other one of ``ranks``, by its place among them.

        Raises:
            PeerUnavailableError: one cannot be reached.
        """
        opened: dict[int, socket.socket] = {}
        try:
            for place, rank in enumerate(ranks):
                if rank > self._peers.rank:
                    ticket = self._peers.open_lane(rank, "shm", purpose)
                    opened[place] = self._peers.connect_lane(rank, ticket, self.deadline)
            for place, rank in enumerate(ranks):
                if rank < self._peers.rank:
                    opened[place] = self._arrived(self._ring_service.listener.wait, self._peer_key(rank, purpose))
        except BaseException:
            for sock in opened.values():
                sock.close()
            raise
        return opened

    def ring(
        self, ranks: Sequence[int], lane: RingLane, purpose: str, stripes: int
    ) -> tuple[SendingLane | None, ReceivingLane | None]:
        """The lanes to the next and from the last of ``ranks``; none for a ring of one.

        Raises:
            PeerUnavailableError: a neighbour cannot be reached.
        """
        if len(ranks) < 2:
            return None, None
        place = ranks.index(self._peers.rank)
        right, left = ranks[(place + 1) % len(ranks)], ranks[place - 1]
        names = [f"{purpose}/{stripe}" for stripe in range(stripes)]
        senders: list[SendingLane] = []
        receivers: list[ReceivingLane] = []
        with contextlib.ExitStack() as undo:
            for name in names:
                senders.append(self.sender(right, lane, name))
                undo.callback(senders[-1].close, "the ring did not form")
            for name in names:
                receivers.append(self.receiver(left, lane, name))
                undo.callback(receivers[-1].close, "the ring did not form")
            undo.pop_all()
        if stripes == 1:
            return senders[0], receivers[0]
        return StripedSender(senders), StripedReceiver(receivers)

    def sender(self, rank: int, lane: PairLane, purpose: str) -> SendingLane:
        """A lane to one rank, which need not do anything for it.

        Raises:
            PeerUnavailableError: it cannot be reached.
            SegmentError: there is no memory to share.
        """
        peer = self._peers.members.ranks[rank]
        ticket = self._peers.open_lane(rank, lane, purpose)
        if lane == "grpc":
            shown = (("stratagem-token-bin", ticket.token),)
            return GrpcLane(self._peers.connect(rank), EXCHANGE_METHOD, shown, peer.task, self._meter)
        sock = self._peers.connect_lane(rank, ticket, self.deadline)
        if lane == "tcp":
            return TcpSender(sock, peer.task, self._meter)
        return ShmSender(sock, peer.task, self._meter, lambda: self._ring_service.max_inbox_bytes)

    def receiver(self, rank: int, lane: PairLane, purpose: str) -> ReceivingLane:
        """The lane that another rank's :meth:`sender` of the same purpose opens.

        Raises:
            PeerUnavailableError: it does not come in time.
        """
        peer_key = self._peer_key(rank, purpose)
        if lane == "grpc":
            return self._arrived(self._ring_service.wait_grpc, peer_key)
        sock = self._arrived(self._ring_service.listener.wait, peer_key)
        if sock.family == socket.AF_UNIX:
            return ShmReceiver(sock, peer_key[0], self._meter)
        return TcpReceiver(sock, peer_key[0], self._meter, self._ring_service.max_inbox_bytes, spins=True)

    def _arrived(self, wait: Callable[[PeerKey, float], T], peer_key: PeerKey) -> T:
        """What a peer opens; it is not waited for once a rank has given up opening."""
        while True:
            try:
                return wait(peer_key, min(self.deadline, time.monotonic() + LOOK_S))
            except PeerUnavailableError:
                is_over = self._ring_service.given_up >= self._peers.meeting or self._ring_service.is_closed
                if is_over or time.monotonic() >= self.deadline:
                    raise

    def _peer_key(self, rank: int, purpose: str) -> PeerKey:
        peer = self._peers.members.ranks[rank]
        return peer.task, peer.incarnation, self._peers.members.generation, purpose
