"""What the chief asks of a ps: the interface, and the answers in the chief's own words. No I/O here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from stratagem.checkpoint.manifest import SavedFile
from stratagem.chief.leasing.positions import Positions, has, plus, positions_of
from stratagem.chief.leasing.steps import StepClosing
from stratagem.cluster.incarnation import Incarnation
from stratagem.cluster.units import Unit, UnitBitmap, Update


@dataclasses.dataclass(frozen=True)
class CommittedSlice:
    """Of a synchronous step: a slice that its worker has committed."""

    step: int
    unit: Unit
    ordinal: int


@dataclasses.dataclass(frozen=True)
class ServerDescription:
    """What a ps has applied."""

    closed: Mapping[tuple[int, int], UnitBitmap] = dataclasses.field(default_factory=dict)
    """Closed units of each (dataset, epoch)."""
    open: Mapping[Update, int] = dataclasses.field(default_factory=dict)
    """Updates applied of units that are not closed, with the number of ps that take part in each."""
    halves: Mapping[tuple[int, int], UnitBitmap] = dataclasses.field(default_factory=dict)
    """Units not closed that have fewer updates here than closed ones had, or than their workers count."""
    store_epoch: int = 0
    step: int = 0
    """Largest number of updates applied to any group."""
    initialized: bool = False
    """The ps holds variables with values."""
    complete: bool = False
    """It knows what it is to hold, perhaps nothing, and all of that has values."""
    origin_elements: int = 0
    """Where it began from a checkpoint of another number of ps: elements of the variables in that."""
    taken_elements: int = 0
    """Of these: what it holds by now."""
    groups: Sequence[int] = ()
    """Shard groups that have values here; a model that is prepared adds some."""
    untrained: bool = False
    """No optimizer changes any of these: no update has a part here."""
    accumulates: bool = False
    """An update of several units has come."""

    @property
    def holds_rows(self) -> bool:
        """Whether there are rows of a variable here, as far as workers have said."""
        return self.initialized and (not self.origin_elements or self.taken_elements > 0)

    @property
    def has_part(self) -> bool:
        """Whether updates change anything here."""
        return self.holds_rows and not self.untrained

    def has_closed(self, unit: Unit) -> bool:
        return has(self.closed, unit)

    def ordinals(self, unit: Unit) -> list[int]:
        """Ordinals of the updates of an open unit that are applied here; [0] for a closed unit."""
        if self.has_closed(unit):
            return [0]
        return sorted(update.ordinal for update in self.open if unit in update.units)

    def applied(self) -> Positions:
        """Units with at least one update here."""
        return plus(self.closed, positions_of(unit for update in self.open for unit in update.units))

    def has(self, update: Update) -> bool:
        return update in self.open or (bool(update.units) and all(self.has_closed(unit) for unit in update.units))


@dataclasses.dataclass(frozen=True)
class SavedShards:
    """What one ps wrote into a checkpoint."""

    files: tuple[SavedFile, ...]
    step: int


class Server(Protocol):
    """A ps, as the chief uses it. Every method may be repeated without harm.

    All raise ``PeerUnavailableError`` when the ps does not answer in time.
    """

    @property
    def incarnation(self) -> Incarnation:
        """The process of the ps."""

    async def fence(self, incarnation: Incarnation) -> list[CommittedSlice]:
        """Makes the ps refuse it; what it had committed of steps still incomplete there."""

    async def close_step(self, closing: StepClosing) -> None:
        """Closes a step that lost a slice."""

    async def describe_units(self) -> ServerDescription:
        """What the ps has applied."""

    async def hold_commits(self, token: int, hold_s: float) -> ServerDescription:
        """Stops commits for at most ``hold_s`` seconds; what is applied then."""

    async def admit_updates(self, token: int, updates: Sequence[Update], wait_s: float) -> bool:
        """Lets updates through the hold; whether all were applied within ``wait_s`` seconds."""

    async def save_shards(self, token: int, directory: str, nonce: str) -> SavedShards:
        """Writes the shards of the ps into a directory."""

    async def release_commits(self, token: int) -> None:
        """Ends the hold."""

    async def restore_shards(self, directory: str, num_ps: int, *, is_fresh: bool = False) -> None:
        """Puts the ps back to a committed checkpoint, as one of so many. One that was just made (``is_fresh``) is not
        looked through once more."""

    async def mark_lost(self, units: Mapping[tuple[int, int], UnitBitmap]) -> None:
        """Closes units without their updates."""

    async def take_over(self, holder: Incarnation, address: str, of: Incarnation) -> str:
        """Has the ps take the copy that ``holder`` has of the process ``of``. Why it could not; empty: it has."""

    async def close(self) -> None:
        """Drops the connection."""
