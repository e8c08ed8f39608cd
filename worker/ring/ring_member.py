"""A worker's part in the ring: forming it, its communicator, leaving it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence

import torch

from stratagem.cluster.communication import CommunicationOptions
from stratagem.cluster.membership import Membership
from stratagem.errors import (
    ClusterTimeoutError,
    CollectiveError,
    ConfigurationError,
    PeerUnavailableError,
    StratagemError,
)
from stratagem.rpc.host_id import own_host_id
from stratagem.rpc.lane_meter import BytesMeter
from stratagem.worker.ring import building
from stratagem.worker.ring.communicator import Communicator, Position
from stratagem.worker.ring.failure_diagnosis import FailureDiagnosis
from stratagem.worker.ring.group import Group, OutOfStepError
from stratagem.worker.ring.healing import Healing
from stratagem.worker.ring.host_group import HostGroup
from stratagem.worker.ring.lane_plan import RankInfo, alike, plan_lanes, wants_nccl
from stratagem.worker.ring.members import Members, MembershipSource, members_of
from stratagem.worker.ring.peers import MembersChangedError, Peers
from stratagem.worker.ring.ring_group import RingGroup
from stratagem.worker.ring.ring_service import RingService
from stratagem.worker.ring.torch_group import free_store_address, gpu_of
from stratagem.worker.ring.two_level_group import TwoLevelGroup

logger = logging.getLogger(__name__)

OPEN_S = 15.0
"""Seconds that opening the lanes of one plan may take, if the timeout leaves so many."""
LEAST_S = 2.0
"""Seconds that it may take however late it is: some ranks came just in time."""
GIVE_UP_S = 1.0
"""Seconds to wait until the other ranks have heard that a lane could not be opened."""
MOST_TRIES = 3
"""How often the same lanes are opened, where a connection breaks meanwhile."""
NOTICE_S = 0.3
"""Seconds in which the chief has mostly heard of a worker that was killed."""
HEAR_S = 5.0
"""Seconds in which a ring that heals waits for the chief to say who was lost, before it looks for another reason."""
HEAL_S = 5.0
"""Seconds to wait until there are enough workers for the next generation: a rank may just be taking some in."""
_IsOver = Callable[[Membership], bool]
_Tell = Callable[[], None] | None
"""Of :class:`Peers`."""


def _never(_: Membership) -> bool:
    return False


def _somebody_waits(now: Membership) -> bool:
    return bool(now.waiting)


@dataclasses.dataclass(eq=False, repr=False)
class RingMember:
    """A worker's side of the ring."""

    ring_service: RingService
    """What the others ask of this worker."""
    _session: MembershipSource
    _meter: BytesMeter
    _take_in: Callable[[Sequence[tuple[str, int]]], None] = lambda newcomers: None
    """Tells the chief which newcomers (task, incarnation) are ranks from now on, or (none) that this worker waits to be
    one."""

    def __post_init__(self) -> None:
        self._peers: Peers | None = None
        self._device = torch.device("cpu")
        self._options = CommunicationOptions()
        self._chunk_bytes = 0
        """What the ring has found best for its lanes."""
        self._is_leaving = False
        self._held = (0, 0)
        """The newest generation, and how many meetings of it this worker has been to."""
        self._session.on_membership(self._membership_changed)

    def form(self, options: CommunicationOptions, device: torch.device, timeout_s: float) -> Communicator:
        """Meets the other workers, opens lanes and returns the communicator. ``options``: the same on every worker;
        ``timeout_s``: seconds for all of it. Raises ConfigurationError: workers want different things, or a lane that
        cannot be had; ClusterTimeoutError: somebody does not come."""
        if wants_nccl(options) and not self._session.security.allows_clear_text:
            raise ConfigurationError(
                "NCCL does not encrypt what it sends, and this job has --tls: take --transport auto, or add --insecure "
                "if the network of the GPUs is yours alone"
            )
        self._options, self._device = options, device
        deadline = time.monotonic() + timeout_s
        while True:
            self._session.wait_ready(max(1.0, deadline - time.monotonic()))
            if (me := self._session.membership.member(self._session.task)) is not None and me.joining:
                return self._start_alone(me.incarnation_name)
            members = members_of(self._session.membership)
            is_here = all(rank.live and rank.address for rank in members.ranks)
            if is_here and (formed := self._meet(members, deadline)) is not None:
                return self._start(formed)
            self._session.raise_if_stopped()
            self._session.wait_stopped(0.1)

    def _meet(
        self, members: Members, deadline: float, is_over: _IsOver = _never, tell: _Tell = None
    ) -> building.Formed | None:
        """The group of a generation; None: it is over before it was formed."""
        generation, num_meetings = self._held
        num_meetings = num_meetings if generation == members.generation else 0
        self._peers = Peers(self._session, members, num_meetings, is_over, tell)
        try:
            return self._form(self._peers, deadline)
        except MembersChangedError:
            self._peers.close()
            return None
        finally:
            self._held = members.generation, self._peers.num_meetings

    def _heal(self, error: CollectiveError | None) -> tuple[Group, tuple[str, ...]]:
        """Forms the next generation, of those who are left; the same one again, if it was only a connection that broke;
        without an error, between two steps, of all and newcomers. Raises CollectiveError: a rank is out of step, and
        not one that has just joined and ends; somebody has finished; or too few are left."""
        if error is None:
            return self._grow()
        diagnosis, peers, communicator = self.ring_service.diagnosis, self._peers, self.ring_service.communicator
        assert peers is not None and diagnosis is not None
        assert communicator is not None and communicator.healing is not None
        began, before = time.monotonic(), peers.members
        while True:
            self._session.raise_if_stopped()
            membership = self._session.membership
            members, passed_s = members_of(membership), time.monotonic() - began
            gone = ", ".join(before.ranks[rank].task for rank in before.lost(membership))
            has_grown = bool(set(members.names) - set(before.names))  # others have taken in somebody, between two steps
            if gone and members.generation == before.generation:
                raise CollectiveError(f"{gone} has finished its script, and {self._session.task} has not: {error}")
            if (gone or has_grown) and len(members.ranks) >= membership.min_workers:
                if (formed := self._next_generation(members)) is not None:
                    return self._told(f"without {gone or 'nobody'}", members, formed, began), members.names
            elif not gone and diagnosis.is_out_of_step:
                communicator.healing.refuse_parted(diagnosis.reason(), error.rank)
                if not self._session.wait_membership(lambda now: bool(before.lost(now)), self._timeout_s):
                    raise CollectiveError(diagnosis.reason(), error.rank)
            elif not gone:
                tell_again = functools.partial(peers.abort, diagnosis.reason(), False, GIVE_UP_S)
                try:
                    formed = self._next_generation(members, lambda _: diagnosis.is_out_of_step, tell_again)
                except ClusterTimeoutError as late:
                    raise CollectiveError(f"{error}; {late}", error.rank) from None
                if formed is not None:
                    return self._told("after a connection broke", members, formed, began), members.names
                if passed_s > self._timeout_s:
                    raise error
            elif passed_s > HEAL_S:
                raise CollectiveError(
                    f"{error}; {len(members.ranks)} workers are left, and a ring continues with at least "
                    f"{membership.min_workers}"
                )
            known = members.generation
            self._session.wait_membership(lambda now, known=known: now.generation > known, 0.5)  # type: ignore[misc]

    def _grow(self) -> tuple[Group, tuple[str, ...]]:
        """The group of all ranks and of those who wait to be taken in; who waits himself comes back as one of them.

        The first rank has the chief say that they are ranks: what it says last, all hear in the end.
        """
        began, before = time.monotonic(), None if self._peers is None else self._peers.members
        while True:
            self._session.raise_if_stopped()
            membership = self._session.membership
            members = members_of(membership)
            me = membership.member(self._session.task)
            waiting = membership.waiting
            is_next = before is None or members.generation > before.generation
            # After a loss the others may be in a collective: they go on without who waits, until the step after that.
            is_broken = bool(self.ring_service.diagnosis and self.ring_service.diagnosis.reason())
            goes_on = before is None or is_broken or bool(before.lost(membership))
            leads = members.ranks[:1] == (me,)
            if me is None or me.joining:
                if me is not None and not me.waits:  # a chief that was started again has not heard it
                    self._take_in(())
            elif waiting and leads:
                self._take_in([(one.task, one.incarnation) for one in waiting])
            elif (
                (is_next or is_broken)
                and (goes_on or not waiting)
                # That somebody has come may be heard before that it waits; who leads is waited for to take it in.
                and (group := self._next_generation(members, _somebody_waits if leads or not goes_on else _never))
                is not None
            ):
                tasks = ", ".join(rank.task for rank in members.ranks)
                return self._told(f"with {tasks}", members, group, began), members.names
            self._session.wait_membership(lambda now, known=membership: now is not known, 0.5)  # type: ignore[misc]

    def _told(self, how: str, members: Members, group: Group, began: float) -> Group:
        words = "the ring continues %s: rank %d of %d, generation %d, after %.1f s"
        logger.warning(words, how, group.rank, group.size, members.generation, time.monotonic() - began)
        return group

    def _next_generation(self, members: Members, is_over: _IsOver = _never, tell: _Tell = None) -> Group | None:
        """The group of a generation, watched; None: it is over already, or the chief will say so.

        Where nobody is lost the one before stays until all have come: they may be in the middle of a collective.
        """
        if not all(rank.address for rank in members.ranks):  # a chief that was started again has not heard from all
            return None
        before = self._peers
        is_lost = before is not None and bool(before.members.lost(self._session.membership))
        if before is not None and is_lost:
            before.close()
        try:
            # As long as in a collective: one that is left may be in the middle of a long step.
            formed = self._meet(members, time.monotonic() + self._timeout_s, is_over, tell)
        except PeerUnavailableError as failure:
            logger.warning("generation %d of the ring did not form: %s", members.generation, failure)
            formed = None
        group = None if formed is None else formed.group
        if group is not None:
            self._watch(group)
        if group is None and not is_lost:
            self._peers = before
        elif before is not None:
            before.close()
        return group

    def _explain(self, error: CollectiveError, position: Position) -> CollectiveError:
        """What a collective raises: where the ring heals, at once if a member is lost."""
        diagnosis = self.ring_service.diagnosis
        assert diagnosis is not None and self._peers is not None
        members = self._peers.members
        heals = bool(self._session.membership.min_workers) and not self._is_leaving
        if heals and not isinstance(error, OutOfStepError):
            _ = diagnosis.hears(NOTICE_S) or diagnosis.all_answer(error) or diagnosis.hears(HEAR_S)
        if not heals or not members.are_others(self._session.membership):
            return diagnosis.explain(error, position, heals)
        if not (lost := members.lost(self._session.membership)):
            return error
        diagnosis.told(words := diagnosis.lost(lost))
        return CollectiveError(f"broken off at {position}: {words}", error.rank)

    def waiting(self) -> tuple[str, float] | None:
        """The worker that a collective waits for at this moment, in words, and since how many seconds it goes on."""
        communicator, peers = self.ring_service.communicator, self._peers
        found = communicator.waiting() if communicator is not None else None
        if found is None or peers is None:
            return None
        rank, what, seconds = found
        if rank >= len(peers.members.ranks):  # of a group that is just being replaced
            return None
        return f"{peers.members.ranks[rank].task} in {what}", seconds

    def opener(self, timeout_s: float) -> building.Opener:
        """Opens further lanes between ranks of the ring, within ``timeout_s`` seconds. Raises PeerUnavailableError:
        there is no ring."""
        if self._peers is None:
            raise PeerUnavailableError("there is no ring to open lanes in")
        return building.Opener(self.ring_service, self._peers, self._meter, time.monotonic() + timeout_s)

    def leave(self) -> None:
        """Waits for the others at the end of the script, so that nobody's last collective breaks."""
        communicator = self.ring_service.communicator
        if communicator is not None:
            self._is_leaving = True
            if communicator.healing is not None:
                communicator.healing.is_leaving = True
            try:
                communicator.barrier()
            except StratagemError as error:
                if self._peers is None or not self._peers.members.lost(self._session.membership):
                    logger.warning("left the ring out of step: %s", error)
                # Else somebody is through, and its lanes went before its last message was here: so is this rank.

    def close(self, reason: str) -> None:
        if self.ring_service.communicator is not None:
            self.ring_service.communicator.close(reason)
        self.ring_service.close()
        if self._peers is not None:
            self._peers.close()

    @property
    def _timeout_s(self) -> float:
        """Seconds that a peer may stand still in a collective."""
        return self._options.timeout_seconds or building.DEFAULT_TIMEOUT_S

    def _form(self, peers: Peers, deadline: float) -> building.Formed:
        options, device = self._options, self._device
        me = RankInfo(
            task=self._session.task,
            place=own_host_id(),
            gpu=gpu_of(device, peers.rank) if self._session.security.allows_clear_text else "",
            options=alike(options),
            store_address=free_store_address(peers.members.ranks[0].host) if peers.rank == 0 else "",
            chunk_bytes=self._chunk_bytes,
            has_formed=self.ring_service.communicator is not None,
        )
        said = peers.meet(me, deadline)
        building.check_agreement(said)
        self._chunk_bytes = max(one.chunk_bytes for one in said)
        options = dataclasses.replace(options, chunk_bytes=options.chunk_bytes or self._chunk_bytes)
        failures: dict[str, str] = {}
        num_tries = 0
        while True:
            plan = plan_lanes(said, options, failures)
            now = time.monotonic()
            left_s = max(LEAST_S, deadline - now)
            opener = building.Opener(self.ring_service, peers, self._meter, now + min(OPEN_S, left_s))
            # A rank that has its lanes waits in the first barrier for those that have not. NCCL keeps what it gets.
            barrier_s = self._timeout_s if plan.nccl else min(self._timeout_s, left_s)
            options = dataclasses.replace(options, timeout_seconds=barrier_s)
            group, told, num_tries = None, RankInfo(me.task), num_tries + 1
            purpose = f"round {peers.num_meetings}"
            try:
                group = building.build(plan, peers, opener, options, device, said[0].store_address, purpose)
            except building.LaneFailedError as error:
                peers.tell_again = functools.partial(peers.abort, str(error), False, GIVE_UP_S)
                if self.ring_service.given_up < peers.meeting:  # who waits for a lane of this rank need not
                    peers.tell_again()
                failed, broke = {error.lane: str(error)}, error.connection_broke
                told = RankInfo(me.task, failures=failed, connection_broke=broke, unreached=opener.unreached)
            try:
                replies = peers.meet(told, deadline)
            except BaseException:
                if group is not None:
                    group.close("the ring did not form")
                raise
            finally:
                self.ring_service.forget(peers.members.generation, purpose)
            new = building.failed_lanes(replies)
            if not new and group is not None:
                self.ring_service.has_formed()
                group.timeout_s = self._timeout_s
                break
            if group is not None:
                group.close("another rank could not open its lanes")
            is_late = time.monotonic() > deadline
            if any(one.connection_broke for one in replies) and num_tries < MOST_TRIES and not is_late:
                continue
            building.check_reached(replies, me, self._session.membership.min_workers)
            if is_late or not new.keys() - failures.keys():
                raise PeerUnavailableError(f"the ring did not form: {'; '.join(new.values())}")
            failures, num_tries = failures | new, 0
        self._meter.chose("ring", group.name, plan.reason, building.better(plan, options, said, failures))
        return building.Formed(group, plan, any(one.has_formed for one in said))

    def _start(self, formed: building.Formed) -> Communicator:
        assert self._peers is not None
        group, plan = formed.group, formed.plan
        healing: Healing | None = None
        if self._session.membership.min_workers:
            names = self._peers.members.names
            healing = Healing(names[group.rank], names, self._heal)
        communicator = Communicator(group, self._explain, healing)
        self.ring_service.communicator = communicator
        self._watch(group)
        if healing is not None and formed.is_late:
            healing.begin_late(communicator)
        chunk_bytes = self._options.chunk_bytes
        ring = group.ring if isinstance(group, TwoLevelGroup) else group
        if isinstance(group, RingGroup) and group.size > 1 and not chunk_bytes:
            self._chunk_bytes = chunk_bytes = building.choose_chunk_bytes(communicator)
        chunks = f", chunks of {chunk_bytes or building.DEFAULT_BYTES:,} bytes" if isinstance(ring, RingGroup) else ""
        logger.info("rank %d of %d: %s, because %s%s", group.rank, group.size, group.name, plan.reason, chunks)
        building.warn_of_idle(group, self._options)
        return communicator

    def _start_alone(self, name: str) -> Communicator:
        """The communicator of a newcomer, which meets the others when its script comes to its first batch."""
        healing = Healing(name, (name,), self._heal, self._session.membership.num_workers)
        group = HostGroup(0, 1, {}, timeout_s=self._timeout_s)
        communicator = Communicator(group, self._explain, healing)
        self.ring_service.communicator = communicator
        logger.info("%s is a newcomer to a ring that is training: it joins at its first batch", self._session.task)
        return communicator

    def _watch(self, group: Group) -> None:
        """Has the group broken off as soon as the chief says that one of its ranks is lost."""
        assert self._peers is not None
        self.ring_service.diagnosis = FailureDiagnosis(
            self._session, self._peers, group.close, self.ring_service.called
        )
        self._membership_changed(self._session.membership)

    def _membership_changed(self, membership: Membership) -> None:
        if (communicator := self.ring_service.communicator) is not None and communicator.healing is not None:
            communicator.healing.sees_newcomer = bool(membership.waiting)
        if self._peers is not None and self._peers.is_over:
            self.ring_service.will_not_form(building.MEMBERS_CHANGED)
        # Who is gone while this rank leaves has passed the last barrier already; if not, its lanes tell.
        if self.ring_service.diagnosis is not None and not self._is_leaving:
            self.ring_service.diagnosis.membership_changed(membership)
