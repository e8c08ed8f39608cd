"""How a ring continues with other members: what is repeated without a lost rank, who has which examples of which step,
and who still needs the state of the training.

Collectives that count together are *atomic*: their effects show after the last of them. Each rank counts those that it
has completed. The last one of each needs every rank, so after a loss no rank is more than one ahead, and what it has
beyond the others is one small result, which it has kept (:data:`KEPT_BYTES`; after a larger one all meet once more). So
in their new group the remaining ranks first compare their counts. A rank that is behind copies the result of one that
is ahead, with the lost rank's part in it; what no rank has completed, all repeat without the lost rank.

A newcomer is alone until its script asks for its first batch. The others admit it between two steps: all form a group
with it, compare counts as after a loss, and make one more atomic collective, which gives it the state.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from stratagem.errors import CollectiveError, ConfigurationError
from stratagem.measuring.flight import FLIGHT
from stratagem.worker.ring.group import Group

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEPT_BYTES = 64 << 10
"""The largest result that every rank keeps, in case another did not get it."""
MOST_AGAIN = 5
"""How often in a row the same ranks make the same collectives again, after a connection broke."""
COUNTS = (
    "what decides which collectives a step makes has to be an sg.Variable made in strategy.scope(), or follow from "
    "data.epoch; a count of the script's own, or enumerate, starts anew in a worker that joins"
)
"""The way out for a newcomer that is out of step."""
NUM_COUNTED = 1024
"""Steps of which a rank knows whether they have counted: a batch is asked about before so many more are given out."""


class Kept(NamedTuple):
    """The result of atomic collectives, the same on every rank."""

    lengths: list[int]
    data: torch.Tensor
    """Flat uint8."""


class Placement(NamedTuple):
    """Which ranks divide the examples of steps."""

    first_step: int
    """The first step that they share out."""
    members: tuple[str, ...]
    """By rank."""


class LostMembers(NamedTuple):
    """Lost members, and which of their examples were lost with them."""

    members: frozenset[str]
    after_step: int
    """The examples of this step and those before have counted."""
    last_step: int
    """The newest step of which they had a share."""


class _Told(NamedTuple):
    """What a rank tells the others of a new group."""

    num_done: int
    """Atomic collectives that it has completed."""
    step: int
    counted_step: int
    """The newest that has counted."""
    is_new: int
    takes_in: int


class Loop(Protocol):
    """A loop over the data that keeps books of its own for a script."""

    def hand_over(self) -> dict[str, Any]:
        """What a newcomer needs to go on with the others, between two steps."""

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Stands where the others stand, whose :meth:`hand_over` it is."""


class Ranks(Protocol):
    """What :class:`Healing` needs of a communicator."""

    step: int

    @property
    def is_broken(self) -> bool:
        """Whether its group cannot be used any more."""

    def renew(self, group: Group) -> None:
        """Goes on with another group, once nothing is queued for the old one."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See :class:`Communicator`."""

    def confirm(self) -> None:
        """A barrier that is no atomic collective of its own."""


Heal = Callable[[CollectiveError | None], tuple[Group, tuple[str, ...]]]
"""Forms the group of those who are left after an error, or (None) of all and those who wait to be taken in, and says
who they are; raises what cannot be healed."""


class Healing:
    """The books of one rank, ``me``. ``heal``: forms the next group; ``num_first``: this rank is a newcomer to a ring
    of so many at first: alone for now, without the state of the training."""

    def __init__(self, me: str, members: tuple[str, ...], heal: Heal, num_first: int = 0) -> None:
        self.me = me
        self.members = members
        """Those of the group as it is, by rank."""
        self.placements = [Placement(0, members)]
        self.losses: list[LostMembers] = []
        self.counted_steps = collections.deque([0], NUM_COUNTED)
        """The newest steps whose examples have had their effect; see ``is_training`` of :meth:`run`."""
        self.pending_steps: list[int] = []
        """Those whose gradients wait to be reduced with those of a later step, and count with it."""
        self.num_first, self.is_new = num_first, num_first > 0
        """Whether this rank has yet to be given the state of the training."""
        self.loop: Loop | None = None
        """Of this rank; None: the script goes round itself."""
        self.newcomers: frozenset[str] = frozenset()
        """Members of the group who have."""
        self.joined: frozenset[str] = frozenset()
        """Members who joined when the group formed."""
        self.sees_newcomer = False
        """Whether somebody waits to be taken in, as far as this rank has heard."""
        self.is_due = False
        """Whether all ranks know, since the same backward, that somebody waits."""
        self.is_leaving = False
        """Whether this rank is at the end of its script."""
        self._heal = heal
        self._num_done = 0
        self._num_again = 0
        """Groups of the same ranks since then."""
        self._kept: Kept | None = None
        self._is_training = False
        self._takes_in = False
        """Whether this rank is in :meth:`take_in`."""
        self._has_met = False
        """Whether another one was, when this group formed: then all of it have met for that."""
        self._inside = threading.local()

    def placement(self, step: int) -> Placement:
        """Who shares out the examples of a step."""
        return next(each for each in reversed(self.placements) if each.first_step <= step or not each.first_step)

    def rank_of(self, member: str) -> int:
        """The place of a member in the group as it is. Raises CollectiveError: it is lost, and what only it had with
        it."""
        if member not in self.members:
            raise CollectiveError(f"{member} is lost, and what it was about to send with it; start the job again")
        return self.members.index(member)

    def refuse_newcomer(self, what: str) -> None:
        """Raises ``ConfigurationError`` on a newcomer, for what cannot be joined in the middle."""
        if self.is_new:
            raise ConfigurationError(
                f"this worker joined a ring that is training, and {what} cannot be joined in the middle; the others "
                "continue without it. fit can be joined, and a loop over "
                "strategy.distribute_dataset that begins with data.epoch"
            )

    def refuse_parted(self, reason: str, rank: int | None) -> None:
        """Of a group whose ranks are in different collectives, those that joined when it formed end, because the others
        were in step before. Raises CollectiveError: this is one of them, or nobody joined."""
        names = ", ".join(sorted(self.joined))
        if self.me in self.joined:
            reason += f"; {names} joined when the others had been in step, and they continue without it: {COUNTS}"
        if self.me in self.joined or not self.joined:
            raise CollectiveError(reason, rank)
        logger.warning("the ring continues without %s, which joined last and is out of step: %s", names, reason)

    @property
    def donor(self) -> int:
        """The place of the first member that has the state."""
        return next(place for place, name in enumerate(self.members) if name not in self.newcomers)

    def take_in(self, ranks: Ranks, give: Callable[[], None]) -> None:
        """Between two steps: goes on with those who wait, if it is due, or takes this newcomer to the others. ``give``:
        collectives that give the newcomers the state of :attr:`donor`; once more after a loss. Raises CollectiveError:
        it cannot be healed."""

        def work() -> None:
            if self.newcomers:
                give()
            self.is_new = False
            ranks.confirm()

        self._takes_in = True
        if not (self.newcomers or self._has_met):  # else this rank has met them when it went on after a loss
            self._is_training = False
            with self._within():
                self._recover(ranks, None)
        self.run(ranks, work, lambda _: Kept([], torch.empty(0, dtype=torch.uint8)), lambda _: None, False)
        self.is_due, self.newcomers = False, frozenset()
        self._takes_in = self._has_met = False

    def run(
        self,
        ranks: Ranks,
        work: Callable[[], T],
        pack: Callable[[T], Kept | None],
        unpack: Callable[[Kept], T],
        is_training: bool,
    ) -> T:
        """Runs collectives of ``ranks`` as one; arguments and errors as of :meth:`Communicator.atomic`."""
        if getattr(self._inside, "here", False):
            return work()
        self._is_training = is_training
        results: list[T] = []
        kept: Kept | None = None
        with self._within():
            while True:
                try:
                    if not results:
                        results.append(work())
                        kept = pack(results[0])
                        if kept is not None:  # the caller may change what it gets
                            kept = kept._replace(data=kept.data.clone()) if kept.data.numel() <= KEPT_BYTES else None
                    if kept is None:
                        ranks.confirm()
                    self._done(ranks, kept)
                    return results[0]
                except CollectiveError as error:
                    if not ranks.is_broken:
                        raise
                    is_done, kept = self._recover(ranks, error)
                    if is_done:
                        self._done(ranks, kept)
                        return results[0] if results or kept is None else unpack(kept)
                    results.clear()

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        """Collectives that this thread makes inside are part of what is run."""
        self._inside.here = True
        try:
            yield
        finally:
            self._inside.here = False

    def _done(self, ranks: Ranks, kept: Kept | None) -> None:
        self._num_done, self._num_again, self._kept = self._num_done + 1, 0, kept
        if self._is_training and ranks.step != self.counted_steps[-1]:
            self.counted_steps.extend([*self.pending_steps, ranks.step])
            self.pending_steps.clear()

    def begin_late(self, ranks: Ranks) -> None:
        """Of others a group had formed before: they have lost a rank since, and compare counts with this one. Raises
        CollectiveError: it cannot be healed."""
        with self._within():
            try:
                self._bring_together(ranks, self.members)
            except CollectiveError as error:
                if not ranks.is_broken:
                    FLIGHT.tell(logger)
                    raise
                self._recover(ranks, error)

    def _recover(self, ranks: Ranks, error: CollectiveError | None) -> tuple[bool, Kept | None]:
        """Goes on in the next group. Whether others have completed what this rank has not, and its result."""
        try:
            while True:
                if error is not None and self._num_again == MOST_AGAIN:
                    raise CollectiveError(f"{error}; that was the {MOST_AGAIN}th time in a row", error.rank)
                group, members = self._heal(error)
                self._num_again = self._num_again + 1 if members == self.members else 0
                ranks.renew(group)
                try:
                    return self._bring_together(ranks, members)
                except CollectiveError as another:
                    if not ranks.is_broken:
                        raise
                    error = another
        except CollectiveError:
            if not self.is_leaving:
                FLIGHT.tell(logger)
            raise

    def _bring_together(self, ranks: Ranks, members: tuple[str, ...]) -> tuple[bool, Kept | None]:
        """Compares counts in a group that has formed; returns as :meth:`_recover`."""
        step, ranks.step = ranks.step, 0  # they may be a step apart
        try:
            step, is_behind, kept = self._compare(ranks, members, step)
            return is_behind, kept
        finally:
            ranks.step = step

    def _compare(self, ranks: Ranks, members: tuple[str, ...], own_step: int) -> tuple[int, bool, Kept | None]:
        mine = torch.tensor([self._num_done, own_step, self.counted_steps[-1], self.is_new, self._takes_in])
        every = [_Told(*map(int, each)) for each in ranks.all_gather(mine)]
        told = [each for each in every if not each.is_new]
        if not told:
            raise CollectiveError("no worker is left that has the state of the training; start the job again")
        if self.is_new and not any(each.takes_in for each in told):  # they repeat what it has no part in
            raise CollectiveError("the workers that were admitting this one are lost: start it again")
        ahead, fewest = max(told), min(each.num_done for each in told)
        newest, step = ahead.num_done, ahead.step
        if newest - fewest > 1:
            raise CollectiveError(
                f"the ring cannot heal: its ranks have completed {[each.num_done for each in told]} collectives, and "
                "more than one apart they cannot be brought together; start the job again from a checkpoint"
            )
        is_behind, kept = self._num_done < newest and not self.is_new, None
        if fewest < newest:
            kept = self._take_over(ranks, every.index(ahead))
        if self.is_new:
            self._num_done, own_step = newest, step
            self.counted_steps.append(ahead.counted_step)
        elif lost := frozenset(self.members) - frozenset(members):
            self.losses.append(LostMembers(lost, ahead.counted_step, step))
        self.placements = [each for each in self.placements if each.first_step <= step]
        self.placements.append(Placement(step + 1, members))
        self.members = members
        self._has_met = any(each.takes_in and each.num_done == newest for each in told)  # who is behind had met before
        self.newcomers = frozenset(name for name, each in zip(members, every, strict=True) if each.is_new)
        self.joined = self.newcomers
        return own_step, is_behind, kept if is_behind else None

    def _take_over(self, ranks: Ranks, donor: int) -> Kept | None:
        """The newest result of a rank, on every rank; None: they have it."""
        own = self._kept
        lengths = ranks.all_gather(torch.tensor([] if own is None else own.lengths, dtype=torch.int64))[donor]
        num_bytes = ranks.all_gather(torch.tensor([-1 if own is None else own.data.numel()]))[donor]
        if int(num_bytes) < 0:
            return None
        parts = ranks.all_gather(torch.empty(0, dtype=torch.uint8) if own is None else own.data)
        return Kept([int(length) for length in lengths], parts[donor])
