"""A worker's part in the ring: forming it, its communicator, leaving it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from stratagem.cluster.communication import CommunicationImplementation, CommunicationOptions
from stratagem.errors import (
    CollectiveError,
    ConfigurationError,
    FencedError,
    JobStoppedError,
    PeerUnavailableError,
    StratagemError,
)
from stratagem.rpc.generated import chief_pb2, worker_pb2
from stratagem.rpc.host_id import place_of_this_process
from stratagem.rpc.lane import BytesMeter
from stratagem.worker.ring.chunk_tuning import DEFAULT_BYTES, choose_chunk_bytes
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.failure_diagnosis import FailureDiagnosis
from stratagem.worker.ring.group import Group, Tag
from stratagem.worker.ring.host_group import HostGroup
from stratagem.worker.ring.lane_plan import LanePlan, RankInfo, plan_lanes
from stratagem.worker.ring.members import MembershipSource, members_of
from stratagem.worker.ring.opening import Opener
from stratagem.worker.ring.peers import MembersChangedError, Peers
from stratagem.worker.ring.ring_group import RingGroup
from stratagem.worker.ring.ring_service import RingService
from stratagem.worker.ring.torch_group import TorchGroup, free_store_address
from stratagem.worker.ring.two_level_group import TwoLevelGroup

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 300.0
OPEN_S = 15.0
"""Seconds that opening the lanes of one plan may take."""
PROBE = Tag(0, 0)
"""Marks the collective that tries a new group before anybody relies on it."""


class _LaneFailedError(Exception):
    def __init__(self, lane: str, reason: Exception) -> None:
        super().__init__(str(reason))
        self.lane = lane


class RingMember:
    """What a worker holds of the ring.

    Args:
        entrance: what the others ask of this worker.
        session: this worker's identity, and what the chief says.
        meter: counts payload bytes.
    """

    def __init__(self, entrance: RingService, session: MembershipSource, meter: BytesMeter) -> None:
        self.entrance = entrance
        self._session = session
        self._meter = meter
        self._peers: Peers | None = None
        self._opener: Opener | None = None
        session.on_membership(self._membership_changed)

    def form(self, options: CommunicationOptions, device: torch.device, timeout_s: float) -> Communicator:
        """Meets the other workers, opens lanes and returns the communicator.

        Args:
            options: the same on every worker.
            device: where this worker computes.
            timeout_s: seconds for all of it.

        Raises:
            ConfigurationError: workers want different things, or a lane that cannot be had.
            ClusterTimeoutError: somebody does not come.
        """
        wants_nccl = options.implementation is CommunicationImplementation.NCCL or options.transport == "nccl"
        if wants_nccl and not self._session.security.allows_clear_text:
            raise ConfigurationError(
                "NCCL does not encrypt what it sends, and this job has --tls: take --transport auto, or add --insecure "
                "if the network of the GPUs is yours alone"
            )
        deadline = time.monotonic() + timeout_s
        while True:
            self._session.wait_ready(max(1.0, deadline - time.monotonic()))
            members = members_of(self._session.membership)
            if all(rank.address for rank in members.ranks):
                self._peers = Peers(self._session, members)
                try:
                    return self._form(self._peers, options, device, deadline)
                except MembersChangedError:
                    self._peers.close()
            self._session.raise_if_stopped()
            self._session.wait_stopped(0.1)

    def waiting(self) -> tuple[str, float] | None:
        """The worker that a collective waits for at this moment, in words, and since how many seconds it goes on."""
        communicator, peers = self.entrance.communicator, self._peers
        found = communicator.waiting() if communicator is not None else None
        if found is None or peers is None:
            return None
        rank, what, seconds = found
        return f"{peers.members.ranks[rank].task} in {what}", seconds

    def opener(self, timeout_s: float) -> Opener:
        """Opens further lanes between ranks of the ring, within ``timeout_s`` seconds.

        Raises:
            PeerUnavailableError: there is no ring.
        """
        if self._peers is None:
            raise PeerUnavailableError("there is no ring to open lanes in")
        return Opener(self.entrance, self._peers, self._meter, time.monotonic() + timeout_s)

    def answers(self, rank: int, timeout_s: float) -> bool:
        """Whether a rank says within ``timeout_s`` seconds where it stands."""
        try:
            return self._peers is not None and bool(self._peers.position(rank, timeout_s).position)
        except PeerUnavailableError:
            return False

    def leave(self) -> None:
        """Waits for the others at the end of the script, so that nobody's last collective breaks."""
        communicator = self.entrance.communicator
        if communicator is not None:
            try:
                communicator.barrier()
            except CollectiveError as error:
                logger.warning("left the ring out of step: %s", error)

    def close(self, reason: str) -> None:
        """Frees lanes, threads and memory."""
        if self.entrance.communicator is not None:
            self.entrance.communicator.close(reason)
        if self._opener is not None:
            self._opener.undo.close()
        self.entrance.close()
        if self._peers is not None:
            self._peers.close()

    def _form(self, peers: Peers, options: CommunicationOptions, device: torch.device, deadline: float) -> Communicator:
        me = worker_pb2.Description(
            task=self._session.task,
            place=place_of_this_process(),
            cuda=device.type == "cuda" and self._session.security.allows_clear_text,
            options={field.name: str(getattr(options, field.name)) for field in dataclasses.fields(options)},
            store_address=free_store_address(peers.members.ranks[0].host) if peers.rank == 0 else "",
        )
        said = peers.meet(1, me, deadline)
        _check_agreement(said)
        members = [RankInfo(one.task, one.place, one.cuda) for one in said]
        failures: dict[str, str] = {}
        meeting = 1
        while True:
            plan = plan_lanes(members, options, failures)
            meeting += 1
            group, failed = self._try(plan, peers, options, device, said[0].store_address, meeting)
            replies = peers.meet(meeting, worker_pb2.Description(task=me.task, failures=failed), deadline)
            new: dict[str, str] = {}
            for task, lane, why in [(one.task, *failure) for one in replies for failure in one.failures.items()]:
                new[lane] = f"{new[lane]}; {task}: {why}" if lane in new else f"{task}: {why}"
            if not new and group is not None:
                break
            if group is not None:
                group.close("another rank could not open its lanes")
            if not new.keys() - failures.keys():
                raise PeerUnavailableError(f"the ring did not form: {'; '.join(new.values())}")
            failures |= new
        return self._start(group, plan, peers, options)

    def _try(
        self,
        plan: LanePlan,
        peers: Peers,
        options: CommunicationOptions,
        device: torch.device,
        store_address: str,
        meeting: int,
    ) -> tuple[Group | None, Mapping[str, str]]:
        opener = Opener(self.entrance, peers, self._meter, time.monotonic() + OPEN_S)
        try:
            group = _build(plan, peers, opener, options, device, store_address, f"round {meeting}")
        except _LaneFailedError as error:
            opener.undo.close()
            return None, {error.lane: str(error)}
        self._opener = opener
        return group, {}

    def _start(self, group: Group, plan: LanePlan, peers: Peers, options: CommunicationOptions) -> Communicator:
        breakage = FailureDiagnosis(self._session, peers, group.close)
        communicator = Communicator(group, breakage.explain)
        self.entrance.breakage, self.entrance.communicator = breakage, communicator
        self._membership_changed(self._session.membership)
        chunk_bytes = options.chunk_bytes
        ring = group.ring if isinstance(group, TwoLevelGroup) else group
        if isinstance(group, RingGroup) and group.size > 1 and not chunk_bytes:
            chunk_bytes = choose_chunk_bytes(communicator, group)
        chunks = f", chunks of {chunk_bytes or DEFAULT_BYTES:,} bytes" if isinstance(ring, RingGroup) else ""
        logger.info("rank %d of %d: %s, because %s%s", group.rank, group.size, group.name, plan.reason, chunks)
        return communicator

    def _membership_changed(self, membership: chief_pb2.Membership) -> None:
        if self.entrance.breakage is not None:
            self.entrance.breakage.membership_changed(membership)


def _build(
    plan: LanePlan,
    peers: Peers,
    opener: Opener,
    options: CommunicationOptions,
    device: torch.device,
    store_address: str,
    purpose: str,
) -> Group:
    """The group of a plan, tried once.

    Raises:
        _LaneFailedError: a lane cannot be opened.
    """
    ranks, rank = range(len(peers.members.ranks)), peers.rank
    timeout_s = options.timeout_seconds or DEFAULT_TIMEOUT_S
    if plan.nccl:
        return TorchGroup(rank, len(ranks), "nccl", store_address, timeout_s, device)
    made: list[Group] = []

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
        return group

    with _trying(plan.ring or "shm", made):
        flat = ring(ranks, "ring") if plan.ring is not None else None
        if flat is not None and plan.flat:
            flat.barrier(PROBE)
            return flat
        host_ranks = plan.host_of(rank)
        leaders = ring(plan.leaders, "hosts") if plan.ring is not None and rank == host_ranks[0] else None
    with _trying("shm", made):
        links = opener.links(host_ranks, f"links, {purpose}")
        host = HostGroup(host_ranks.index(rank), len(host_ranks), links, timeout_s=timeout_s)
        made.append(host)
        host.barrier(PROBE)
    return (
        host if flat is None else TwoLevelGroup(host, leaders, flat, host_ranks=host_ranks, leader_ranks=plan.leaders)
    )


@contextlib.contextmanager
def _trying(lane: str, made: Sequence[Group]) -> Iterator[None]:
    """Around the attempt at a lane: whatever goes wrong, others may do."""
    try:
        yield
    except StratagemError as error:
        for group in made:
            group.close("the ring did not form")
        if isinstance(error, FencedError | JobStoppedError):
            raise
        raise _LaneFailedError(lane, error) from None


def _check_agreement(said: Sequence[worker_pb2.Description]) -> None:
    for one in said[1:]:
        for name, value in said[0].options.items():
            if one.options[name] != value:
                raise ConfigurationError(
                    f"{name} is {value} on {said[0].task} and {one.options[name]} on {one.task}; it has to be the same "
                    "on every worker"
                )
