"""What travels over a session, in the chief's own words. Pure, no I/O."""

from __future__ import annotations

import dataclasses

from stratagem.cluster.units import Lease


@dataclasses.dataclass(frozen=True)
class Join:
    """First message of a task."""

    task: str
    address: str = ""
    pid: int = 0
    resume_incarnation: int = 0
    """The incarnation to go on with; 0 for a new process."""
    held: tuple[Lease, ...] = ()
    """Units that a resumed worker holds."""
    store_epoch: int = 0
    """ps: epoch of its store; 0 when it holds no variables."""


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """A sign of incarnation."""

    progress: bytes = b""
    """What the task says about itself, as it came: the chief only shows it."""
    waiting_step: int = 0
    """Staleness 0: step of the job whose update the task waits for; 0: none."""


@dataclasses.dataclass(frozen=True)
class Goodbye:
    """Last message of a task."""

    exit_code: int
    message: str = ""


@dataclasses.dataclass(frozen=True)
class Welcome:
    """Answer to a join."""

    incarnation: int
    chief_epoch: int
    heartbeat_interval_s: float
    session_timeout_s: float
    job_started: bool


@dataclasses.dataclass(frozen=True)
class Member:
    """One task of the cluster."""

    task: str
    address: str
    incarnation: int
    live: bool


@dataclasses.dataclass(frozen=True)
class Membership:
    """The cluster as it stands."""

    ready: bool
    members: tuple[Member, ...]
    lead: str
    routing_epoch: int


@dataclasses.dataclass(frozen=True)
class Fenced:
    """The incarnation is over."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Stop:
    """The job is over."""

    exit_code: int
    reason: str


Request = Join | Heartbeat | Goodbye
Event = Welcome | Membership | Fenced | Stop
