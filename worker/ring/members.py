"""The members of a generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from stratagem.cluster.membership import Member, Membership
from stratagem.cluster.task import TaskId
from stratagem.errors import StratagemError
from stratagem.rpc.security import Security


class MembershipSource(Protocol):
    """Tells a rank who takes part: the chief (:class:`stratagem.rpc.session.SessionClient`), or a store
    (:class:`stratagem.distributed.store_members.StoreMembers`)."""

    task: str
    incarnation: int
    membership: Membership
    """What is known now."""

    @property
    def security(self) -> Security:
        """Whom this process trusts."""

    def on_membership(self, callback: Callable[[Membership], None]) -> None:
        """Calls ``callback`` at every change."""

    def wait_ready(self, timeout_s: float) -> Membership:
        """Waits until everybody has come. Raises ClusterTimeoutError: not within ``timeout_s`` seconds; names who is
        missing."""

    def wait_membership(self, accept: Callable[[Membership], bool], timeout_s: float) -> bool:
        """Waits until ``accept(membership)`` holds; False when it does not within ``timeout_s`` seconds."""

    def raise_if_stopped(self) -> None:
        """Raises the reason when this process is to end."""

    def wait_stopped(self, timeout_s: float) -> StratagemError | None:
        """Waits for the end; None when it goes on after ``timeout_s`` seconds."""


@dataclasses.dataclass(frozen=True)
class RankPosition:
    """Where a rank stands among the collectives."""

    position: str
    ordinal: int = 0
    """Of its newest collective."""
    broken: str = ""
    """Why its collectives are broken; empty while they work."""
    waiting_on: int | None = None
    """The rank that it waits for inside a collective."""
    called: str = ""
    """What it called as the collective it was asked about; empty if it has not come to it, or long ago."""


@dataclasses.dataclass(frozen=True)
class Members:
    """The workers of a generation; a rank is a place in ``ranks``."""

    ranks: tuple[Member, ...]
    generation: int
    """Grows whenever one is replaced or left out."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all ranks, and of nobody else ever."""
        return tuple(rank.incarnation_name for rank in self.ranks)

    def rank_of(self, task: str) -> int:
        """The place of a task. Raises ValueError: it is none of them."""
        return [rank.task for rank in self.ranks].index(task)

    def lost(self, membership: Membership) -> list[int]:
        """Ranks whose incarnation is over, as the chief says now."""
        alive = {(info.task, info.incarnation) for info in membership.members if info.live}
        return [place for place, rank in enumerate(self.ranks) if (rank.task, rank.incarnation) not in alive]

    def are_others(self, membership: Membership) -> bool:
        """Whether the chief says by now that a rank is lost, or that there are further ones."""
        return bool(self.lost(membership) or set(members_of(membership).names) - set(self.names))


def members_of(membership: Membership) -> Members:
    """The workers in the order of their indices; of a ring that goes on without some, those of its ranks who live.

    Where the chief issues no generation it is the newest incarnation: those only grow.
    """
    workers = {TaskId.parse(member.task): member for member in membership.members}
    ordered = [workers[task] for task in sorted(workers, key=lambda task: task.index) if task.type == "worker"]
    heals = membership.ready and membership.min_workers
    ranks = tuple(rank for rank in ordered if (rank.live and not rank.joining) or not heals)
    return Members(ranks, membership.generation or max((rank.incarnation for rank in ranks), default=0))
