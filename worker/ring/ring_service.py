"""What the other ranks may ask of this worker: to meet, to open lanes, to break, to report its position."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from stratagem.cluster.membership import Membership
from stratagem.cluster.task import Incarnation
from stratagem.errors import ConfigurationError, FencedError, PeerUnavailableError
from stratagem.rpc.grpc_lane import ServedGrpcLane
from stratagem.rpc.inbox import INBOX_BYTES
from stratagem.rpc.lane_listener import MAX_LANES_PER_PEER, ExpectedLanes, LaneListener, LaneTicket
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.rpc.security import OPEN, Security
from stratagem.worker.ring.communicator import Communicator
from stratagem.worker.ring.failure_diagnosis import ANSWER_S, FailureDiagnosis
from stratagem.worker.ring.lane_plan import PairLane, RankInfo
from stratagem.worker.ring.members import RankPosition, members_of
from stratagem.worker.ring.peers import PATIENCE_S

T = TypeVar("T")

MAX_NAMED = 10
"""Missing ranks that a message names."""
PeerKey = tuple[str, int, int, str]
"""Task, incarnation, generation, purpose."""


class MeetingRoom(Generic[T]):
    """The rendezvous at rank 0: in each round, no rank continues before all of the generation have come. A call may be
    repeated: a rank's latest message counts until the round is complete."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._generation = 0
        self._said: dict[tuple[int, int], dict[int, T]] = {}
        self._closed = False

    def meet(self, generation: int, meeting: int, size: int, rank: int, what: T, timeout_s: float) -> list[T] | None:
        """What every rank said, in rank order; None when somebody is missing after ``timeout_s`` seconds, or as soon as
        a newer generation meets. Raises PeerUnavailableError: a newer generation meets already, or the room is closed;
        ConfigurationError: no such rank."""
        if not 0 <= rank < size:
            raise ConfigurationError(f"expected a rank below {size}, got {rank}")
        with self._changed:
            if generation < self._generation or self._closed:
                raise PeerUnavailableError(f"generation {generation} is over; generation {self._generation} is forming")
            if generation > self._generation:
                self._generation = generation
                self._said = {key: said for key, said in self._said.items() if key[0] == generation}
            said = self._said.setdefault((generation, meeting), {})
            if len(said) < size:
                said[rank] = what
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: len(said) == size or generation < self._generation or self._closed, timeout_s
            )
            return [said[other] for other in range(size)] if len(said) == size else None

    def came(self, generation: int, meeting: int) -> set[int]:
        """The ranks that have come so far."""
        with self._changed:
            return {*self._said.get((generation, meeting), ())}

    def close(self) -> None:
        """Sends everybody home."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class RingService:
    """The ring side of a worker's server; it exists before the ring does and after it broke. ``membership``: the
    chief's current one; ``max_lanes_per_peer``: see ``WorkerConfig``; ``max_inbox_bytes``: of a lane, see
    ``WorkerConfig``."""

    def __init__(
        self,
        host: str,
        membership: Callable[[], Membership],
        meter: BytesMeter,
        security: Security = OPEN,
        *,
        max_lanes_per_peer: int = MAX_LANES_PER_PEER,
        max_inbox_bytes: int = INBOX_BYTES,
    ) -> None:
        self.listener = LaneListener(host, security, max_lanes_per_peer)
        self.max_inbox_bytes = max_inbox_bytes
        self.grpc_lanes = ExpectedLanes[ServedGrpcLane](_let_go, max_lanes_per_peer)
        self.communicator: Communicator | None = None
        self.diagnosis: FailureDiagnosis | None = None
        self.elsewhere: Callable[[], str] = str
        """The collective of another group that this process is in, in words; empty: none."""
        self.given_up = (0, 0)
        """The newest meeting (generation and number) of whose lanes some rank could not open all, or has seen one
        break."""
        self._forming: tuple[tuple[int, int], Callable[[str], None]] | None = None
        """Of the newest group that was made: its meeting, and what closes it."""
        self._membership = membership
        self._meter = meter
        self._room: MeetingRoom[RankInfo] = MeetingRoom()

    @property
    def is_closed(self) -> bool:
        """Whether it opens nothing any more."""
        return self.grpc_lanes.closed.is_set()

    def meet(
        self, caller: Incarnation, generation: int, meeting: int, info: RankInfo, patience_s: float = PATIENCE_S
    ) -> Sequence[RankInfo]:
        """Holds the caller until every rank has come; returns what all said, in rank order. Raises
        PeerUnavailableError: not all came within ``patience_s`` seconds, at most :data:`PATIENCE_S`; ask again."""
        membership = self._membership()
        members = members_of(membership)
        self._check(caller)
        if membership.generation not in (0, generation):
            raise PeerUnavailableError(f"generation {generation} is not known here; ask again")
        rank = members.rank_of(caller.task)
        said = self._room.meet(generation, meeting, len(members.ranks), rank, info, min(patience_s, PATIENCE_S))
        if said is None:
            came = self._room.came(generation, meeting)
            missing = [one.task for index, one in enumerate(members.ranks) if index not in came]
            raise PeerUnavailableError(f"not every rank has arrived yet: {', '.join(missing[:MAX_NAMED])} to come")
        return said

    def open_lane(self, caller: Incarnation, generation: int, kind: PairLane, purpose: str) -> LaneTicket:
        """A token for one lane. Raises FencedError: the caller is no live worker; LimitError: too many lanes of the
        caller are not open yet."""
        self._check(caller)
        peer_key = (caller.task, caller.number, generation, purpose)
        if kind == "grpc":
            return LaneTicket(self.grpc_lanes.expect(peer_key, caller.task))
        return self.listener.expect(peer_key, kind, caller.task)

    def exchange(self, token: bytes, messages: Iterator[bytes], cancel: Callable[[], object]) -> None:
        """Serves a grpc lane until it ends, or ``cancel`` ends its stream. Raises FencedError: the token is unknown."""
        if (known := self.grpc_lanes.identify(token)) is None:
            raise FencedError("a lane needs a token from OpenLane, and each works once")
        peer_key, task = known
        lane = ServedGrpcLane(task, self._meter)
        self.grpc_lanes.arrive(peer_key, task, lane)
        try:
            lane.serve(messages, cancel)
        finally:  # nobody took it: it would keep its call
            self.grpc_lanes.leave(lane)

    def forget(self, generation: int, purpose: str) -> None:
        """All ranks have tried to open the lanes of this purpose: those that nobody has taken are let go."""

        def is_meant(peer_key: PeerKey) -> bool:
            return peer_key[2] == generation and peer_key[3].partition("/")[0].endswith(purpose)

        self.listener.forget(is_meant)
        self.grpc_lanes.forget(is_meant)

    def abort(self, caller: Incarnation, meeting: tuple[int, int], reason: str, is_out_of_step: bool) -> None:
        """A rank found out that the collectives of a group are broken. ``meeting``: generation and number of that in
        which it was made; ``is_out_of_step``: see :class:`stratagem.worker.ring.group.OutOfStepError`."""
        self._check(caller)
        self.given_up = max(self.given_up, meeting)
        if self.diagnosis is not None and meeting == self.diagnosis.meeting:
            self.diagnosis.told(reason, is_out_of_step)
        if (forming := self._forming) is not None and meeting == forming[0]:
            forming[1](reason)

    def forms(self, meeting: tuple[int, int], close: Callable[[str], None]) -> None:
        """A group waits for the others in its first barrier: ``close`` ends it, if it is not formed by then."""
        self._forming = meeting, close
        if self.given_up >= meeting:
            close("another rank could not open its lanes")

    def will_not_form(self, reason: str) -> None:
        """A group that waits in its first barrier ends."""
        if (forming := self._forming) is not None:
            forming[1](reason)

    def has_formed(self) -> None:
        """From here on the diagnosis is told what breaks."""
        self._forming = None

    def called(self, ordinal: int) -> str:
        """See :meth:`Communicator.called`."""
        return "" if self.communicator is None else self.communicator.called(ordinal)

    def position(self, ordinal: int = 0) -> RankPosition:
        """Where this worker stands, and what it called as the collective ``ordinal``."""
        if self.communicator is None or self.diagnosis is None:
            return RankPosition("the start: its ring is not formed yet")
        waiting_on = self.communicator.group.waiting_on()
        position, broken = self.communicator.position, self.diagnosis.reason(ANSWER_S)
        told = str(position)
        if waiting_on is None and not broken:
            # whoever asks goes on there, while this rank waits for an answer itself
            waits = self.diagnosis.waits
            waiting_on, told = waits[0] if waits else (self.diagnosis.suspect, told + self.elsewhere())
        return RankPosition(told, position.ordinal, broken, waiting_on, self.called(ordinal))

    def close(self) -> None:
        """Opens nothing any more."""
        self.grpc_lanes.close()
        self._room.close()
        self.listener.close()

    def _check(self, caller: Incarnation) -> None:
        # What the chief said last; it may tell the caller of a change before it tells this worker.
        membership = self._membership()
        known = membership.member(caller.task)
        if membership.members and (known is None or caller.number < known.incarnation):
            raise FencedError(f"{caller} is no live member of this cluster")
        if known is not None and not known.live and caller.number == known.incarnation:
            raise PeerUnavailableError(
                f"{caller} is lost, as the chief has reported here; if it still runs, it is disconnected"
            )
        if known is None or not known.live or caller.number > known.incarnation:
            raise PeerUnavailableError(f"{caller} is not known here yet; ask again")


def _let_go(lane: ServedGrpcLane) -> None:
    with contextlib.suppress(Exception):
        lane.close("the ring did not form, or this worker has ended")
