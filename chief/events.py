"""The messages of a session, in the chief's own types. Pure, no I/O."""

from __future__ import annotations

import dataclasses

from stratagem.chief.membership.session import StopJob
from stratagem.cluster.membership import Membership
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
    finished: bool = False
    """Worker: its script has ended with exit code 0, and nobody starts it again."""
    stratagem_version: str = ""
    torch_version: str = ""


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    progress: bytes = b""
    """What the task says about itself, as it came: the chief only shows it."""
    waiting_step: int = 0
    """Staleness 0: step of the job whose update the task waits for; 0: none."""
    measures: bytes = b""
    """What it has measured, as it came; empty: nothing newer."""
    copies: tuple[int, int] = (0, 0)
    """Of a ps: which copy is to be dropped, and up to which those here are (see ``Member``)."""
    leaving: bool = False
    """A ps was told to end, and wants what it holds to be in a checkpoint first."""
    bytes_held: int = 0
    """Of a ps: bytes of its variables and their slots."""
    lines: tuple[tuple[float, str, str], ...] = ()
    """What it wrote into its log: seconds since 1970, level, text."""
    step: int = 0
    """Steps that a worker has made; of a ps, the version of its variables."""


@dataclasses.dataclass(frozen=True)
class Goodbye:
    """Last message of a task."""

    exit_code: int
    message: str = ""
    follows: bool = False
    """It failed because another task had."""


@dataclasses.dataclass(frozen=True)
class Welcome:
    """Answer to a join."""

    incarnation: int
    heartbeat_interval_s: float
    job_started: bool
    ps_replicas: int
    wants_log: bool = False


@dataclasses.dataclass(frozen=True)
class Fenced:
    """The incarnation is over."""

    reason: str


Request = Join | Heartbeat | Goodbye
Event = Welcome | Membership | Fenced | StopJob
