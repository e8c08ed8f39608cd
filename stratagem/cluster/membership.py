"""The cluster's members, as the chief announces them; which ps has the copy of which: a rule, so it need not be
announced. Pure, no I/O."""

from __future__ import annotations

import dataclasses

from stratagem.cluster.spec import split_address
from stratagem.cluster.task import TaskId


@dataclasses.dataclass(frozen=True)
class Member:
    task: str
    address: str
    """host:port where it serves; empty while it has not come."""
    incarnation: int
    live: bool
    joining: bool = False
    """A worker that came to a ring that trains, and is none of its ranks yet."""
    waits: bool = False
    """Of such a worker: it has come to its first batch and waits to be taken in."""
    copy_to_drop: int = 0
    """Of a ps whose backup does not answer it: the following whose copy it waits to be rid of."""
    copies_dropped: int = 0
    """Of a backup: the copies that it made in followings up to this one are gone."""

    @property
    def incarnation_name(self) -> str:
        """Of this process, and of no other ever."""
        return f"{self.task}/{self.incarnation}"

    @property
    def host(self) -> str:
        """Where it listens, without the port."""
        return split_address(self.address)[0]


@dataclasses.dataclass(frozen=True)
class Membership:
    ready: bool = False
    members: tuple[Member, ...] = ()
    lead: str = ""
    routing_epoch: int = 0
    """How often the number of ps has changed."""
    min_workers: int = 0
    """Fewest workers with which a ring goes on when others are lost; 0: it does not."""
    generation: int = 0
    """Of such a ring: grows with each worker that is lost or taken in."""
    wanted_workers: int = 0
    """Workers that there are to be: one with a higher index ends when it would take its next unit. 0: any."""
    num_ps: int = 0
    """Parameter servers that serve, from ps:0 on: what lies on which follows from it."""
    num_workers: int = 0
    """Workers that the job began with."""

    def has(self, process: tuple[str, int]) -> bool:
        member = self.member(process[0])
        return member is not None and member.live and member.incarnation == process[1]

    @property
    def waiting(self) -> list[Member]:
        """Newcomers that wait to be taken into a ring."""
        return [member for member in self.members if member.live and member.waits]

    def member(self, task: str) -> Member | None:
        return next((member for member in self.members if member.task == task), None)


def backup_of(task: str, num_ps: int) -> str:
    """The ps that keeps a copy of what ``task`` holds: the next one."""
    return str(TaskId("ps", (TaskId.parse(task).index + 1) % num_ps))


def kept_by(task: str, num_ps: int) -> str:
    """The ps whose copy ``task`` keeps."""
    return str(TaskId("ps", (TaskId.parse(task).index - 1) % num_ps))
