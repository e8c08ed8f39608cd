"""Who is in a generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from stratagem.cluster.task import TaskId
from stratagem.errors import StratagemError
from stratagem.rpc.generated import chief_pb2
from stratagem.rpc.security import Security


class MembershipSource(Protocol):
    """Who takes part, as a rank hears of it: from the chief (:class:`stratagem.rpc.session.SessionClient`), or from a
    store (:class:`stratagem.distributed.store_members.StoreMembers`)."""

    task: str
    """Task id of this process."""
    incarnation: int
    membership: chief_pb2.Membership
    """What is known now."""

    @property
    def security(self) -> Security:
        """Whom this process trusts."""

    def on_membership(self, callback: Callable[[chief_pb2.Membership], None]) -> None:
        """Calls ``callback`` at every change."""

    def wait_ready(self, timeout_s: float) -> chief_pb2.Membership:
        """Waits until everybody has come.

        Raises:
            ClusterTimeoutError: not within ``timeout_s`` seconds; names who is missing.
        """

    def wait_membership(self, accept: Callable[[chief_pb2.Membership], bool], timeout_s: float) -> bool:
        """Waits until ``accept(membership)`` holds; False when it does not within ``timeout_s`` seconds."""

    def raise_if_stopped(self) -> None:
        """Raises the reason when this process is to end."""

    def wait_stopped(self, timeout_s: float | None) -> StratagemError | None:
        """Waits for the end; None when it goes on after ``timeout_s`` seconds."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """One worker of a generation."""

    task: str
    address: str
    incarnation: int

    @property
    def host(self) -> str:
        """Where it listens, without the port."""
        return self.address.rpartition(":")[0].strip("[]")


@dataclasses.dataclass(frozen=True)
class Members:
    """The workers of a generation; a rank is a place in ``ranks``."""

    ranks: tuple[Rank, ...]

    @property
    def generation(self) -> int:
        """The newest incarnation among them: it grows whenever one is replaced, because incarnations only grow."""
        return max((rank.incarnation for rank in self.ranks), default=0)

    def rank_of(self, task: str) -> int:
        """The place of a task.

        Raises:
            ValueError: it is none of them.
        """
        return [rank.task for rank in self.ranks].index(task)

    def lost(self, membership: chief_pb2.Membership) -> list[int]:
        """Ranks whose process life is over, as the chief says now."""
        alive = {(info.task, info.incarnation) for info in membership.tasks if info.live}
        return [place for place, rank in enumerate(self.ranks) if (rank.task, rank.incarnation) not in alive]


def members_of(membership: chief_pb2.Membership) -> Members:
    """The workers in the order of their indices; those that are not live have no address."""
    workers = [info for info in membership.tasks if TaskId.parse(info.task).type == "worker"]
    workers.sort(key=lambda info: TaskId.parse(info.task).index)
    return Members(tuple(Rank(info.task, info.address if info.live else "", info.incarnation) for info in workers))
