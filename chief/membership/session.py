"""One task of the cluster as the chief sees it, how regular its heartbeats are, and the actions that an event can
cause. Pure, no I/O.

Silence is judged by phi accrual, after Hayashibara, Defago, Yared, Katayama: The phi accrual failure detector (SRDS
2004): the times between heartbeats are assumed normal, and phi is minus the decimal logarithm of the chance that a
heartbeat as late as the current one still comes.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from stratagem.cluster.membership import Member
from stratagem.cluster.task import Incarnation, TaskId

LOST_DEVIATIONS = 5.6
"""Standard deviations at phi 8, one silence in a hundred million."""
LONGEST = 3.0
"""Session timeouts that a silence may last, however irregular the heartbeats were."""
_MEMORY = 0.05
"""Weight of the newest interval in the mean: the last twenty count most."""
_LEAST_DEVIATION = 0.25
"""Of the mean: heartbeats never come more regularly than their timer and the machine let them."""
_MOST_PHI = 99.0


class Heartbeats:
    """The intervals between the heartbeats of one process, which are sent every ``interval_s`` seconds."""

    def __init__(self, interval_s: float) -> None:
        self._mean_s = interval_s
        self._variance = 0.0

    def add(self, interval_s: float) -> None:
        """A heartbeat came, so many seconds after the one before."""
        away_s = interval_s - self._mean_s
        self._mean_s += _MEMORY * away_s
        self._variance = (1 - _MEMORY) * (self._variance + _MEMORY * away_s * away_s)

    @property
    def _deviation_s(self) -> float:
        return max(math.sqrt(self._variance), _LEAST_DEVIATION * self._mean_s)

    def phi(self, silent_s: float) -> float:
        """How suspicious a silence is: 1 for one in ten, 3 for one in a thousand; at most 99."""
        chance = 0.5 * math.erfc((silent_s - self._mean_s) / self._deviation_s / math.sqrt(2))
        return min(-math.log10(chance), _MOST_PHI) if chance > 0 else _MOST_PHI

    def patience_s(self, timeout_s: float) -> float:
        """Seconds of silence after which the process is lost: ``timeout_s``, more for one that was often late."""
        return min(max(timeout_s, self._mean_s + LOST_DEVIATIONS * self._deviation_s), LONGEST * timeout_s)


class SessionState(enum.Enum):
    WAITING = "waiting"
    AWAITED = "awaited"
    JOINED = "joined"
    LIVE = "live"
    LOST = "lost"
    DONE = "done"


@dataclasses.dataclass
class Session:
    """One task of the cluster and its newest process."""

    task: TaskId
    state: SessionState = SessionState.WAITING
    number: int = 0
    address: str = ""
    pid: int = 0
    stream: int = 0
    """Number of the stream that carries the session; events of older streams are ignored. 0: none does."""
    broken_at: float = 0.0
    """When the last stream broke off; means something while none carries the session."""
    heard_at: float = 0.0
    heartbeats: Heartbeats = dataclasses.field(default_factory=lambda: Heartbeats(1.0))
    """How regularly this process was heard of."""
    lost_at: float = 0.0
    lost_why: str = ""
    served: int = 0
    """ps: the newest process that workers were sent to."""
    resumed: bool = False
    """The incarnation is older than the chief's, or has taken over what one that is held."""
    joining: bool = False
    """Worker of a ring that trained when it came: it is none of the ranks yet."""
    waits: bool = False
    """Of such a worker: it can be taken in."""
    taken_in: int = 0
    """Of a worker that a ring has taken in: its incarnation; 0 of those it began with."""
    copies: tuple[int, int] = (0, 0)
    """Of this process, a ps: which copy is to be dropped, and up to which those it keeps are."""
    leaving: bool = False
    """This process, a ps, was told to end, and waits until what it holds is in a checkpoint."""
    bytes_held: int = 0
    """By this process, a ps."""
    left: bool = False
    """This process, a worker, has ended since it was not wanted."""
    given_up: bool = False
    """Lost for long, and the cluster does without it."""

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(str(self.task), self.number)

    @property
    def open(self) -> bool:
        """Whether the process takes part; its stream may have broken off a moment ago."""
        return self.state in (SessionState.JOINED, SessionState.LIVE)

    @property
    def member(self) -> Member:
        """The task as the others see it."""
        # A worker that has not come back to a restarted chief yet is no loss: others of its ring would break it off.
        is_awaited = self.state is SessionState.AWAITED and self.task.type == "worker"
        is_live = self.state is SessionState.LIVE or is_awaited
        return Member(str(self.task), self.address, self.number, is_live, self.joining, self.waits, *self.copies)


@dataclasses.dataclass(frozen=True)
class Announce:
    """Tell every task the membership."""


@dataclasses.dataclass(frozen=True)
class Prepare:
    """A ps joined: bring it up to date, then call :meth:`Sessions.prepared`."""

    incarnation: Incarnation


@dataclasses.dataclass(frozen=True)
class Fence:
    """Make the servers refuse an incarnation; report each with :meth:`Sessions.fence_acknowledged`."""

    incarnation: Incarnation
    servers: tuple[Incarnation, ...]


@dataclasses.dataclass(frozen=True)
class Release:
    """Every live ps refuses the incarnation: its units may go to others."""

    incarnation: Incarnation


@dataclasses.dataclass(frozen=True)
class Dismiss:
    """End a stream, if it is still there."""

    incarnation: Incarnation
    stream: int
    reason: str
    """Why the incarnation is over; empty when it goes on over a newer stream."""


@dataclasses.dataclass(frozen=True)
class StopJob:
    """The job is over."""

    exit_code: int
    reason: str


Action = Announce | Prepare | Fence | Release | Dismiss | StopJob
