"""When a collective breaks: which rank is to blame, and how all others learn of it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator

from stratagem.cluster.membership import Membership
from stratagem.errors import CollectiveError, PeerUnavailableError
from stratagem.worker.ring.communicator import Position
from stratagem.worker.ring.group import LateError, OutOfStepError
from stratagem.worker.ring.members import MembershipSource
from stratagem.worker.ring.peers import Peers

logger = logging.getLogger(__name__)

BLAME_S = 6.0
"""Seconds that finding out may take; a killed process is known at once, a stopped one when it has not answered."""
ASK_S = 2.5
"""Seconds to wait for one peer's answer: on a busy machine one that lives may need more than one."""
ANSWER_S = 0.5
"""Seconds that an answer may wait for what this rank is just finding out; less than the other waits for it."""
TURN_S = 2 * ANSWER_S
"""Seconds to wait for a rank that answers to say why it has closed its lane: it may ask this one first."""
CHIEF_S = 1.0
"""Seconds by which the chief may hear of a loss later than the peers do."""
TELL_S = 3.0
"""Seconds to wait until the other ranks have heard of a failure."""
LOST = "who waits for each other may be on a network that drops large packets: look at its MTU"
LEFT = (
    "did one of them leave its loop early, with break or return, skip a call that the other makes, or go backward from "
    "a loss that does not come from the model? (model(torch.zeros_like(x)) * 0).sum() is a loss of nothing that does"
)
LIVES_S = 5.0
"""Seconds that a rank may take to say where it stands, while nothing has failed."""


@dataclasses.dataclass(eq=False, repr=False)
class FailureDiagnosis:
    """Why the collectives of a generation are broken; only the first reason counts."""

    _session: MembershipSource
    _peers: Peers
    _close_group: Callable[[str], None]
    """Breaks this rank's lanes, so that a call that waits there ends."""
    _called: Callable[[int], str]
    """What this rank called as the collective of an ordinal."""

    def __post_init__(self) -> None:
        self.meeting = self._peers.meeting
        """The newest one when the group was made."""
        self.is_out_of_step = False
        """Whether a rank stands still or is in another collective, as this rank or another one has seen."""
        self._changed = threading.Condition()
        self._reason = ""
        self._explaining = False
        self.suspect: int | None = None
        """The rank on which this one waited when a collective failed here."""
        self.waits: list[tuple[int | None, str]] = []
        """What is waited for outside of the collectives, the oldest first: a rank (None: any), and what of it."""
        self.has_ended = False
        """Whether this rank has ended the group itself."""
        self._lost_rank = ""
        self._cause = ""
        """Of the error that is to be explained, if it was found already."""

    def reason(self, timeout_s: float = 0.0) -> str:
        """Why the collectives are broken, empty while they work. Waits a while when that is just being found out."""
        with self._changed:
            self._changed.wait_for(lambda: self._reason or not self._explaining, timeout_s)
            return self._reason

    @contextlib.contextmanager
    def waiting_for(self, rank: int | None, what: str) -> Iterator[None]:
        """Around a wait for a rank outside of the collectives: others who ask hear of it, and an error names the rank
        that is behind it. The collectives go on."""
        wait = (rank, what)
        self.waits.append(wait)
        try:
            yield
        except CollectiveError as error:
            if self.has_ended:  # that is the cause, and no other rank
                raise
            cause = self._find_cause(error)
            if error.rank is not None and not isinstance(error, OutOfStepError):
                self._lost_rank = self._lost_rank or cause
            raise CollectiveError(cause, error.rank) from None
        finally:
            self.waits.remove(wait)

    def circle(self, rank: int | None) -> str:
        """Who waits for whom, and where, if a wait for a rank leads to ranks that wait for each other; else empty."""
        asked: dict[int, str] = {}
        while rank is not None and rank != self._peers.rank and rank not in asked:
            try:
                reply = self._peers.position(rank, ASK_S)
            except PeerUnavailableError:
                return ""
            asked[rank], rank = reply.position, reply.waiting_on
        return "" if rank is None else self._circle(asked, rank, Position())

    def answers(self, rank: int) -> bool:
        """Whether a rank says where it stands."""
        try:
            return bool(self._peers.position(rank, LIVES_S).position)
        except PeerUnavailableError:
            return False

    def end(self, reason: str, has_failed: bool = False) -> None:
        """This rank ends. When that is because it has failed or another one is gone, the others hear of it before they
        see this one's lanes close, and know no more than that it has ended."""
        self.has_ended = True
        if (has_failed or self._lost_rank) and not self._reason:
            self._peers.abort(": ".join(filter(None, [reason, self._lost_rank])), False, TELL_S)

    def told(self, reason: str, is_out_of_step: bool = False) -> None:
        """Somebody else found out."""
        with self._changed:
            if is_out_of_step and not self.is_out_of_step:
                self._reason, self.is_out_of_step = reason, True
            self._reason = self._reason or reason
            self._changed.notify_all()
        self._close_group(reason)

    def hears(self, timeout_s: float) -> bool:
        """Waits until another rank says why the collectives are broken, or the chief that the members are others."""
        members = self._peers.members
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._reason) or members.are_others(self._session.membership), timeout_s
            )

    def all_answer(self, error: CollectiveError) -> bool:
        """Whether everybody behind an error of the group says where he stands: then it is only a connection that
        broke."""
        self.suspect = error.rank
        self._cause = self._find_cause(error)
        if self._lost_rank:
            logger.warning("The ring is stalled: %s; waiting for the chief to say who is lost", self._lost_rank)
        return not self._lost_rank

    def membership_changed(self, membership: Membership) -> None:
        """The chief says who lives; called at every change."""
        with self._changed:
            self._changed.notify_all()
        lost = self._peers.members.lost(membership)
        if lost and self._peers.rank not in lost:
            self.told(self.lost(lost))

    def explain(self, error: CollectiveError, position: Position, passes_on: bool = False) -> CollectiveError:
        """Finds out what is behind an error of the group, tells every rank, and returns the error to raise. With
        ``passes_on`` also what another rank found out, which may be cut off from some."""
        with self._changed:
            self._explaining = True
            self.suspect = error.rank
        cause = self.reason() or self._cause or self._find_cause(error, position)
        with self._changed:
            is_new = isinstance(error, OutOfStepError) and not self.is_out_of_step
            self.is_out_of_step |= is_new
            first = is_new or not self._reason
            if first:
                self._reason = f"{cause} [{self._session.task} was at {position}]"
            self._explaining = False
            self._changed.notify_all()
        if first or passes_on:
            # Until they have heard of it: one that only saw our lanes close would blame this rank, which may end now.
            self._peers.abort(self._reason, self.is_out_of_step, TELL_S)
        return CollectiveError(f"aborted at {position}: {cause if first else self._reason}", error.rank)

    def _find_cause(self, error: CollectiveError, position: Position | None = None) -> str:
        deadline = time.monotonic() + BLAME_S
        suspect = None if error.rank == self._peers.rank else error.rank  # this one stood still: the others gave it up
        asked: dict[int, str] = {}
        hint = f" ({LOST})" if isinstance(error, LateError) else ""
        differing = error.ordinal if isinstance(error, OutOfStepError) else 0
        told = str(error)
        while suspect is not None and suspect not in asked and time.monotonic() < deadline:
            if self._reason:
                return self._reason
            task = self._peers.members.ranks[suspect].task
            try:
                reply = self._peers.position(suspect, ASK_S, differing)
            except PeerUnavailableError:
                self._lost_rank = f"{task} has ended or does not answer {self._session.task} ({error})"
                return self.reason() or self._from_chief() or self._lost_rank
            if reply.broken:
                return reply.broken
            asked[suspect] = reply.position
            own, left = self._called(differing), ""
            if suspect == error.rank and reply.called and own and reply.called != own:
                told += f"; as collective {differing}, {task} called {reply.called}, {self._session.task} {own}"
            if position is not None and isinstance(error, OutOfStepError) and reply.ordinal == position.ordinal:
                left = f" ({LEFT})" if f"({position.what.split()[0]}" not in reply.position else ""
            if (
                reply.waiting_on in (None, self._peers.rank)
                and self._explaining
                and not isinstance(error, OutOfStepError)
            ):
                # Two that are cut off from each other answer the others: one finds out. So did who is out of step.
                is_circle = reply.waiting_on is not None and len(asked) > 1
                self.hears(max(0.0, deadline - time.monotonic()) if is_circle else TURN_S)
                if why := self.reason():
                    return why
            if reply.waiting_on is None:
                return f"{task} is at {reply.position} and does not take part: {told}{left}"
            if reply.waiting_on == self._peers.rank and len(asked) > 1:
                return f"{self._circle(asked, self._peers.rank, position)}: {told}{hint}"
            if reply.waiting_on == self._peers.rank:
                return f"{task} is at {reply.position} and waits for {self._session.task}: {told}{hint}{left}"
            suspect = reply.waiting_on
        if suspect in asked:
            told = f"{self._circle(asked, suspect, position)}: {told}{hint}"
        return self._from_chief() or told

    def _circle(self, asked: dict[int, str], last: int, position: Position | None) -> str:
        """``asked``: ranks that wait for each other, up to ``last``, and where each said that it is: told of those
        that are elsewhere than this one."""
        words = [
            self._peers.members.ranks[rank].task + (f" (at {where})" if position and where != str(position) else "")
            for rank, where in asked.items()
        ]
        words.append(self._peers.members.ranks[last].task)
        return f"{self._session.task} waits for {', which waits for '.join(words)}"

    def _from_chief(self) -> str:
        """What the chief knows; it may hear of a loss a moment later than the peers do."""
        members = self._peers.members
        if self._session.wait_membership(lambda now: bool(members.lost(now)), CHIEF_S):
            return self.lost(members.lost(self._session.membership))
        return ""

    def lost(self, ranks: list[int]) -> str:
        """What is said of ranks that the chief has lost."""
        tasks = [self._peers.members.ranks[rank].task for rank in ranks]
        return f"{', '.join(tasks)} left the job or died"
