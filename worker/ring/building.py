"""Builds the group of a plan: opens its lanes, tries them once, and chooses the chunk size by trying some."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from stratagem.cluster.communication import CommunicationOptions, ReduceOp
from stratagem.errors import (
    CollectiveError,
    ConfigurationError,
    FencedError,
    JobStoppedError,
    PeerUnavailableError,
    StratagemError,
)
from stratagem.rpc.grpc_lane import EXCHANGE_METHOD, GrpcLane
from stratagem.rpc.lane import ReceivingLane, SendingLane
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.shm_lane import ShmSender
from stratagem.rpc.shm_receiver import ShmReceiver
from stratagem.rpc.striped_lane import StripedReceiver, StripedSender
from stratagem.rpc.tcp_lane import TcpReceiver, TcpSender
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.group import Group, Tag
from stratagem.worker.ring.host_group import HostGroup
from stratagem.worker.ring.lane_plan import LanePlan, PairLane, RankInfo, RingLane, who_leaves
from stratagem.worker.ring.peers import Peers
from stratagem.worker.ring.ring_group import RingGroup
from stratagem.worker.ring.ring_service import PeerKey, RingService
from stratagem.worker.ring.torch_group import TorchGroup
from stratagem.worker.ring.two_level_group import TwoLevelGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")

MEMBERS_CHANGED = "the workers of the ring have changed"
LOOK_S = 0.25
"""How often a rank that waits for a lane looks whether another one has given up."""
DEFAULT_TIMEOUT_S = 300.0
_LINGER_S = 5.0
"""A rank that leaves after its last collective has sent what the others need to end theirs: so long they may take to
read it, where the lane does not keep it for them."""
PROBE = Tag(0, 0)
"""Marks the collective that tries a new group before anybody relies on it."""
CANDIDATES = (256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
"""Bytes; 64 KiB to 8 MiB were tried on several lanes, the best one always lay in here."""
DEFAULT_BYTES = 512 << 10
TRIAL_BYTES = 8 << 20
ROUNDS = 4
CLEARLY = 0.85
"""Another size has to be faster by so much: two trials of the same size differ by a third on a busy machine."""
SLOW_S = 0.1
"""A first trial that takes longer means a slow link: there the chunk size matters little, and trying costs."""


class Opener:
    """Lanes of one generation. ``deadline``: ``time.monotonic()`` seconds."""

    def __init__(self, ring_service: RingService, peers: Peers, meter: BytesMeter, deadline: float) -> None:
        self._ring_service = ring_service
        self._peers = peers
        self._meter = meter
        self.deadline = deadline
        self.unreached = ""
        """Task of the rank that did not answer when a lane to it was to be opened."""

    def made(self, group: Group) -> None:
        """The first barrier of a group ends when another rank says that it could not open its lanes, or the chief that
        its members are others."""
        self._ring_service.forms(self._peers.meeting, group.close)
        if self._peers.is_over:
            group.close(MEMBERS_CHANGED)

    def links(self, ranks: Sequence[int], purpose: str) -> dict[int, socket.socket]:
        """A Unix socket to every other one of ``ranks``, by its place among them. Raises PeerUnavailableError: one
        cannot be reached."""
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
        """The lanes to the next and from the last of ``ranks``; none for a ring of one. Raises PeerUnavailableError: a
        neighbour cannot be reached."""
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
        """A lane to one rank, which need not do anything for it. Raises PeerUnavailableError: it cannot be reached;
        SegmentError: there is no memory to share."""
        peer = self._peers.members.ranks[rank]
        self.unreached = peer.task
        ticket = self._peers.open_lane(rank, lane, purpose)
        self.unreached = ""
        if lane == "grpc":
            shown = (("stratagem-token-bin", ticket.token),)
            channel = self._peers.connect(rank)
            return GrpcLane(channel, EXCHANGE_METHOD, shown, peer.task, self._meter, linger_s=_LINGER_S)
        sock = self._peers.connect_lane(rank, ticket, self.deadline)
        if lane == "tcp":
            return TcpSender(sock, peer.task, self._meter)
        return ShmSender(sock, peer.task, self._meter, lambda: self._ring_service.max_inbox_bytes)

    def receiver(self, rank: int, lane: PairLane, purpose: str) -> ReceivingLane:
        """The lane that another rank's :meth:`sender` of the same purpose opens. Raises PeerUnavailableError: it does
        not come in time."""
        peer_key = self._peer_key(rank, purpose)
        if lane == "grpc":
            return self._arrived(self._ring_service.grpc_lanes.wait, peer_key)
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
                if is_over or self._peers.is_over or time.monotonic() >= self.deadline:
                    raise

    def _peer_key(self, rank: int, purpose: str) -> PeerKey:
        peer = self._peers.members.ranks[rank]
        return peer.task, peer.incarnation, self._peers.members.generation, purpose


class Formed(NamedTuple):
    """The result of a meeting of all ranks."""

    group: Group
    plan: LanePlan
    is_late: bool
    """Whether a rank has been in a group before."""


class LaneFailedError(Exception):
    """A kind of lane that is unavailable, or (``connection_broke``) failed this time."""

    def __init__(self, lane: str, reason: Exception, connection_broke: bool) -> None:
        super().__init__(str(reason))
        self.lane = lane
        self.connection_broke = connection_broke


def build(
    plan: LanePlan,
    peers: Peers,
    opener: Opener,
    options: CommunicationOptions,
    device: torch.device,
    store_address: str,
    purpose: str,
) -> Group:
    """The group of a plan, tried once. Raises LaneFailedError: a lane cannot be opened."""
    ranks, rank = range(len(peers.members.ranks)), peers.rank
    timeout_s = options.timeout_seconds or DEFAULT_TIMEOUT_S
    made: list[Group] = []
    if plan.nccl:
        with _trying("nccl", made, opener.deadline):
            made.append(TorchGroup(rank, len(ranks), "nccl", store_address, timeout_s, device))
            made[0].barrier(PROBE)
            return made[0]

    def ring(members: Sequence[int], name: str) -> RingGroup:
        assert plan.ring is not None
        right, left = opener.ring(members, plan.ring, f"{name}, {purpose}", options.stripes)
        group = RingGroup(
            members.index(rank),
            len(members),
            right,
            left,
            chunk_bytes=options.chunk_bytes or DEFAULT_BYTES,
            wire_dtype=None if options.wire_dtype == "float32" else getattr(torch, options.wire_dtype),
            timeout_s=timeout_s,
        )
        made.append(group)
        opener.made(group)
        return group

    with _trying(plan.ring or "shm", made, opener.deadline):
        flat = ring(ranks, "ring") if plan.ring is not None else None
        if flat is not None and plan.flat:
            flat.barrier(PROBE)
            return flat
        host_ranks = plan.host_of(rank)
        leaders = ring(plan.leaders, "hosts") if plan.ring is not None and rank == host_ranks[0] else None
    with _trying("shm", made, opener.deadline):
        links = opener.links(host_ranks, f"links, {purpose}")
        host = HostGroup(host_ranks.index(rank), len(host_ranks), links, timeout_s=timeout_s)
        made.append(host)
        opener.made(host)
        host.barrier(PROBE)
    return (
        host if flat is None else TwoLevelGroup(host, leaders, flat, host_ranks=host_ranks, leader_ranks=plan.leaders)
    )


@contextlib.contextmanager
def _trying(lane: str, made: Sequence[Group], deadline: float) -> Iterator[None]:
    """Around the attempt at a lane: whatever goes wrong, others may do."""
    try:
        yield
    except StratagemError as error:
        for group in made:
            group.close("the ring did not form")
        if isinstance(error, FencedError | JobStoppedError):
            raise
        broke = isinstance(error, CollectiveError | PeerUnavailableError) and time.monotonic() < deadline
        logger.info("The ring could not open its lanes (%s): %s", lane, error)  # only who is cut off may know
        broke = broke and lane != "nccl"  # which says of everything that goes wrong no more than that
        raise LaneFailedError(lane, error, broke) from None


def failed_lanes(said: Sequence[RankInfo]) -> dict[str, str]:
    """What the ranks say of lanes that they could not open."""
    found: dict[str, str] = {}
    for task, lane, why in [(one.task, *failure) for one in said for failure in one.failures.items()]:
        found[lane] = f"{found[lane]}; {task}: {why}" if lane in found else f"{task}: {why}"
    return found


def check_reached(said: Sequence[RankInfo], me: RankInfo, min_workers: int) -> None:
    """Where a ring that heals would go on without one rank, and two do not reach each other, one of them leaves. Raises
    CollectiveError: it is this one; PeerUnavailableError: it is another one."""
    if me.has_formed and 0 < min_workers < len(said) and (cut := who_leaves(said)):
        leaver, other = cut
        words = f"{leaver} and {other} do not reach each other: {leaver} leaves the ring, and the others continue"
        raise (
            CollectiveError(f"{words}; start it again when they reach each other")
            if leaver == me.task
            else PeerUnavailableError(words)
        )


def better(
    plan: LanePlan, options: CommunicationOptions, members: Sequence[RankInfo], failures: Mapping[str, str]
) -> str:
    """What would be faster than the lanes of a plan, and is not had; empty: nothing."""
    if failures:
        return "; ".join(f"no {lane} lane: {why}" for lane, why in failures.items())
    if options.transport in ("grpc", "tcp") and len({member.place for member in members}) < len(members):
        return f"{options.transport} was asked for, and ranks are on one host"
    return ""


def warn_of_idle(group: Group, options: CommunicationOptions) -> None:
    """Says which options do nothing where no lane is a ring's: in shared memory ranks read each other's, and NCCL has
    its own."""
    default = CommunicationOptions()
    names = ("wire_dtype", "chunk_bytes", "stripes")
    idle = [name for name in names if getattr(options, name) != getattr(default, name)]
    if idle and not group.rank and not isinstance(group, RingGroup | TwoLevelGroup):
        logger.warning(
            "%s: no effect over %s, which has no lanes between hosts; leave it out, or take --transport tcp",
            ", ".join(idle),
            group.name,
        )


def check_agreement(said: Sequence[RankInfo]) -> None:
    for one in said[1:]:
        for name in {**said[0].options, **one.options}:
            first, other = (rank.options.get(name, "not known") for rank in (said[0], one))
            if first != other:
                raise ConfigurationError(
                    f"{name} is {first} on {said[0].task} and {other} on {one.task}; it has to be the same on every "
                    "worker"
                )


def choose_chunk_bytes(communicator: Communicator) -> int:
    """Tries and sets the best, which depends on link, cores and lane; every rank gets the same answer."""
    tensor = torch.ones(TRIAL_BYTES // 4)
    out = torch.empty_like(tensor)
    _set(communicator, DEFAULT_BYTES)
    if _slowest(communicator, tensor[: tensor.numel() // 8], out[: tensor.numel() // 8]) > SLOW_S:
        return DEFAULT_BYTES
    taken_s = dict.fromkeys(CANDIDATES, float("inf"))
    for _ in range(ROUNDS):  # in turns: what disturbs the machine disturbs all alike
        for candidate in CANDIDATES:
            _set(communicator, candidate)
            taken_s[candidate] = min(taken_s[candidate], _slowest(communicator, tensor, out))
    fastest = min(CANDIDATES, key=taken_s.__getitem__)
    best = fastest if taken_s[fastest] < CLEARLY * taken_s[DEFAULT_BYTES] else DEFAULT_BYTES
    _set(communicator, best)
    return best


def _set(communicator: Communicator, num_bytes: int) -> None:
    if isinstance(communicator.group, RingGroup):  # a loss meanwhile may have left another group
        communicator.group.chunk_bytes = num_bytes


def _slowest(communicator: Communicator, tensor: torch.Tensor, out: torch.Tensor) -> float:
    start = time.perf_counter()
    communicator.all_reduce(tensor, out=out)
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    return float(communicator.all_reduce(taken, ReduceOp.MAX))
