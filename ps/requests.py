"""The requests to a parameter server, without the wire: frozen, decoded once by the servicer."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from stratagem.cluster.units import Unit, Update
from stratagem.ps.units import UnitClose


class Version(NamedTuple):
    epoch: int
    """Of the group in this process, since its last restore: nobody else counts on under it."""
    counter: int
    """Grows with every change of the weights."""


Family = Literal["tcp", "shm"]
"""Of a lane over a socket."""
Purpose = Literal["up", "down"]
"""Direction of a socket of a lane."""


class FrameKind(enum.Enum):
    """What a frame from a worker is for."""

    GRADIENT = "gradient"
    VALUES = "values"
    WANTED_ROWS = "row numbers"
    """Asks for rows of a table, which are sent at once."""


class Sender(NamedTuple):
    task: str
    incarnation: int
    sequence: int = 0
    """Position among the sender's state-changing requests to this ps, from 1; 0 for the others."""

    @property
    def key(self) -> tuple[str, int]:
        """Task and incarnation."""
        return self[:2]

    def __str__(self) -> str:
        return f"{self.task} (incarnation {self.incarnation})"


def is_fenced(key: tuple[str, int], task: str, incarnation: int) -> bool:
    """Whether a process is one of ``task`` up to ``incarnation``."""
    return key[0] == task and key[1] <= incarnation


class TransferRef(NamedTuple):
    """Frames that a control message waits for."""

    transfer: int
    num_frames: int


class GroupCommit(NamedTuple):
    """One optimizer step for one group."""

    group: int
    present: bytes
    """Presence mask of the shards; empty means all."""
    hyper_parameters: tuple[Mapping[str, Any], ...]
    """One per param_group of the optimizer."""
    have: Version | None = None
    """Version of the weights that the sender has."""


class Merge(enum.Enum):
    """How the slices of a synchronous step are summed."""

    MEAN = "mean"
    """Mean weighted by the weights of the slices that are included."""
    SUM = "sum"
    """Plain sum of the slices that are included."""


@dataclasses.dataclass(frozen=True)
class RequestedSlice:
    """Staleness 0: the step of the job that an update belongs to."""

    step: int
    units: tuple[Unit, ...]
    """Units of the planned slices, in slice order."""
    weight: float
    merge: Merge
    is_set: bool = False
    """The weight is what a script has set, not a number of examples."""


class UpdateAction(enum.Enum):
    APPLY = "apply"
    SKIP = "skip"


@dataclasses.dataclass(frozen=True)
class PrepareUpdate:
    """First half of a two-phase update."""

    sender: Sender
    update: Update
    gradients: TransferRef
    groups: tuple[GroupCommit, ...]
    slice: RequestedSlice | None = None
    want_facts: bool = False


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known about a gradient before it is applied."""

    squared_norm: float = 0.0
    finite: bool = True
    not_finite: tuple[str, ...] = ()
    """Names of variables with a NaN or Inf, at most 3."""


class CommitUpdate(NamedTuple):
    sender: Sender
    update: Update
    gradients: TransferRef
    groups: tuple[GroupCommit, ...]
    reply_transfer: int
    slice: RequestedSlice | None = None
    action: UpdateAction = UpdateAction.APPLY
    scale: float = 1.0
    closes: tuple[UnitClose, ...] = ()
    num_servers: int = 1
    as_it_came: Callable[[], bytes] = bytes
    """The request as its sender wrote it, for a backup."""


class GroupVersion(NamedTuple):
    """A group's version, and the frames that bring it."""

    group: int
    version: Version
    num_frames: int
    num_updates: int = 0
    """Applied to the group so far, whoever sent them."""
    num_skipped: int = 0
    """Of its updates, for a NaN or Inf."""


class CommitResult(NamedTuple):
    applied: bool
    versions: tuple[GroupVersion, ...]
    left_out: bool = False


@dataclasses.dataclass(frozen=True)
class AssignValues:
    """Assigns weights or slots whose frames were sent before."""

    sender: Sender
    values: TransferRef
    groups: tuple[int, ...]
    slot: str = ""
    step_counts: tuple[int, ...] = ()
    scalars: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PullWeights:
    sender: Sender
    groups: tuple[tuple[int, Version | None], ...]
    """Group, and the version the caller has."""
    reply_transfer: int
    slot: str = ""
    wait_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class PullResult:
    """What is being sent, and the optimizer's progress of the first group."""

    versions: tuple[GroupVersion, ...]
    slots: tuple[str, ...] = ()
    step_counts: tuple[int, ...] = ()
    scalars: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
