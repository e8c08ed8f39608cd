"""Which lanes a ring uses, from what its workers report of themselves. Pure: every rank decides the same alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from stratagem.cluster.communication import CommunicationImplementation, CommunicationOptions
from stratagem.errors import ConfigurationError
from stratagem.rpc.versions import own_version

PairLane = Literal["grpc", "tcp", "shm"]
"""What two ranks may have between them; whoever receives takes shm for tcp and the other way round."""
RingLane = Literal["grpc", "tcp"]


@dataclasses.dataclass(frozen=True)
class RankInfo:
    """One rank, as it describes itself."""

    task: str
    place: str = ""
    """Equal places may share memory; opening the lane proves it."""
    gpu: str = ""
    """Which one it computes on; empty: none, or one that NCCL must not be taken for."""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """See :func:`alike`."""
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Lanes that it could not open since the round before, with the reason."""
    store_address: str = ""
    """host:port for a torch.distributed store; rank 0 only."""
    chunk_bytes: int = 0
    """What the ring has chosen by trying it out; 0: nothing, or this is a newcomer."""
    connection_broke: bool = False
    """Whether the lane failed because its connection broke: the next one may hold."""
    has_formed: bool = False
    """Whether it has been in a group before."""
    unreached: str = ""
    """Task of the rank that did not answer when it wanted to open a lane to it since the round before; empty: none."""


@dataclasses.dataclass(frozen=True)
class LanePlan:
    """How the ranks of a generation communicate."""

    hosts: tuple[tuple[int, ...], ...]
    """Ranks that share memory, in rank order; each group's first rank is its leader."""
    ring: RingLane | None
    """Lane of the ring; None: there is none, one host holds every rank."""
    nccl: bool
    reason: str
    """For the log line."""

    @property
    def flat(self) -> bool:
        """Every rank is in the ring itself."""
        return all(len(host) == 1 for host in self.hosts)

    def host_of(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of ``rank``, itself included."""
        return next(host for host in self.hosts if rank in host)

    @property
    def leaders(self) -> tuple[int, ...]:
        """One rank for each host."""
        return tuple(host[0] for host in self.hosts)


def who_leaves(said: Sequence[RankInfo]) -> tuple[str, str] | None:
    """The rank without which the others may form a ring, where two do not reach each other, and one that is cut off
    from it: who is in most such pairs, of those the last. None: nobody is cut off."""
    pairs = [(one.task, one.unreached) for one in said if one.unreached]
    found = [(sum(task in pair for pair in pairs), rank, task) for rank, task in enumerate(one.task for one in said)]
    count, _, leaver = max(found)
    return (leaver, next(a if b == leaver else b for a, b in pairs if leaver in (a, b))) if count else None


def alike(options: CommunicationOptions) -> dict[str, str]:
    """What has to be the same on every rank, by name."""
    chosen = {field.name: str(getattr(options, field.name)) for field in dataclasses.fields(options)}
    return {"version of stratagem": own_version()} | chosen


def wants_nccl(options: CommunicationOptions) -> bool:
    """Whether it has to be NCCL."""
    return options.implementation is CommunicationImplementation.NCCL or options.transport == "nccl"


def may_take_nccl(options: CommunicationOptions) -> bool:
    """Whether it may be NCCL."""
    is_auto = options.implementation is CommunicationImplementation.AUTO and options.transport == "auto"
    return is_auto or wants_nccl(options)


def why_not_nccl(gpus: Mapping[str, str]) -> str:
    """NCCL wants a GPU for each rank alone; empty: each has one. ``gpus``: by task, as in :class:`RankInfo`."""
    if without := [task for task, gpu in gpus.items() if not gpu]:
        return f"{', '.join(without)} computes on no CUDA device"
    for gpu in gpus.values():
        if len(sharing := [task for task, other in gpus.items() if other == gpu]) > 1:
            return f"{', '.join(sharing)} compute on one GPU"
    return ""


def plan_lanes(
    members: Sequence[RankInfo], options: CommunicationOptions, failures: Mapping[str, str] | None = None
) -> LanePlan:
    """Decides. ``failures``: lanes that could not be opened ("nccl", "shm", "tcp"), with the reason: ``auto`` does
    without them. Raises ConfigurationError: what was asked for cannot be had; says why."""
    failures = failures or {}
    size = len(members)
    singles = tuple((rank,) for rank in range(size))
    why_not = why_not_nccl({member.task: member.gpu for member in members})
    if "nccl" in failures:
        why_not = f"it is not available: {failures['nccl']}"
    if wants_nccl(options):
        if why_not:
            raise ConfigurationError(f"NCCL was asked for, but {why_not}; take RING (--transport auto)")
        return LanePlan(singles, None, True, "nccl was asked for and every worker has a GPU of its own")
    if may_take_nccl(options) and not why_not:
        return LanePlan(singles, None, True, "every worker has a GPU of its own")
    if options.transport in failures:
        raise ConfigurationError(f"--transport {options.transport} is not available: {failures[options.transport]}")
    if options.transport in ("grpc", "tcp"):
        return LanePlan(singles, options.transport, False, f"{options.transport} was asked for")
    by_place: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        by_place.setdefault(member.place, []).append(rank)
    hosts = singles if "shm" in failures else tuple(map(tuple, by_place.values()))
    if options.transport == "shm" and len(hosts) > 1:
        strangers = ", ".join(members[host[0]].task for host in hosts)
        raise ConfigurationError(
            f"--transport shm needs every worker on one host and in one network namespace; these are apart: {strangers}"
            ". Take auto: shm inside each host, tcp between them"
        )
    shared = "every worker is on one host" if len(hosts) == 1 else f"{len(hosts)} hosts"
    if "shm" in failures:
        shared = f"no shared memory: {failures['shm']}"
    if len(hosts) == 1:
        return LanePlan(hosts, None, False, shared)
    if "tcp" in failures:
        return LanePlan(hosts, "grpc", False, f"{shared}; no tcp: {failures['tcp']}")
    return LanePlan(hosts, "tcp", False, shared)
