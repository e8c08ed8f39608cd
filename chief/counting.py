"""What workers count and agree on: evaluations on held weights, tallies, decisions. One method for each verb."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from stratagem.chief.agreements import Agreements
from stratagem.chief.change_event import ChangeEvent
from stratagem.chief.commit_hold import CommitHold
from stratagem.chief.evaluations import Evaluations, RunningEvaluation, Versions
from stratagem.chief.journal import Journal
from stratagem.chief.lease_book import LeaseBook, Leases
from stratagem.chief.ps_pool import PsPool
from stratagem.chief.sessions import Sessions
from stratagem.chief.tallies import Delta, Logs, Page, TallyName, encode_delta
from stratagem.chief.waits import Waits
from stratagem.cluster.incarnation import Incarnation
from stratagem.cluster.units import Plan
from stratagem.errors import PeerUnavailableError, ProtocolError

logger = logging.getLogger(__name__)


class Counting:
    """The chief's part in evaluations, in histories and in what workers decide together.

    Args:
        sessions: membership.
        lease_book: units of training data.
        ps_pool: the ps.
        commit_hold: holds commits while an evaluation runs.
        journal: its history has the tallies.
        changed: rung at every change.
        admit: waits until a life may speak.
        waits: what lives wait for, for the status page.
        num_ps: ps of the cluster.
        page_bytes: what fits into one reply.
    """

    def __init__(
        self,
        sessions: Sessions,
        lease_book: LeaseBook,
        ps_pool: PsPool,
        commit_hold: CommitHold,
        journal: Journal,
        changed: ChangeEvent,
        *,
        admit: Callable[[Incarnation], Awaitable[None]],
        waits: Waits,
        num_ps: int,
        page_bytes: int,
    ) -> None:
        self._sessions = sessions
        self._lease_book = lease_book
        self._ps_pool = ps_pool
        self._commit_hold = commit_hold
        self._journal = journal
        self._changed = changed
        self._admit = admit
        self._waits = waits
        self._num_ps = num_ps
        self._page_bytes = page_bytes
        self._pinning = asyncio.Lock()
        self.evaluations = Evaluations()
        tallies = journal.history.tallies
        for name, pin in journal.history.evaluations.items():
            self.evaluations.restore(name, pin, tallies.units(name), tallies.logs(name) is not None)
        self._agreements = Agreements(journal.history.agreed)

    # Units of training data

    def keep(self, deltas: Sequence[Delta]) -> None:
        """Keeps what was counted on units of training data that are accepted, once for each.

        Raises:
            LimitError: it is too much.
        """
        tallies = self._journal.history.tallies
        for delta in deltas:
            accepted = self._lease_book.epoch(delta.unit.dataset, delta.unit.epoch).accepted
            if delta.unit.index in accepted and not tallies.counts(delta.tally.group, delta.unit):
                self._keep(Delta(tallies.place(delta.tally), delta.unit, delta.data))

    # Evaluations

    async def next_evaluation_units(
        self,
        incarnation: Incarnation,
        name: TallyName,
        plan: Plan,
        attempt: int,
        deltas: Sequence[Delta],
        held: Sequence[int],
        want: int,
        wait: bool,
        leave: bool,
    ) -> tuple[Leases, int]:
        """Takes in what was counted and leases up to ``want`` units; also the number of the attempt.

        Raises:
            ConfigurationError: the evaluation is over other data.
            PeerUnavailableError: commits cannot be held now.
        """
        await self._admit(incarnation)
        evaluation = self.evaluations.open(name, plan)
        self._report(incarnation, name, evaluation, attempt, deltas)
        if leave:
            self.evaluations.leave(name, incarnation)
            await self._let_go_of_deserted()
            self._changed.notify()
        if not want:
            return Leases(), evaluation.attempt
        with self._waits.of(incarnation):
            while True:
                await self._pin(name, evaluation)
                granted = self.evaluations.ask(name, incarnation, held if attempt == evaluation.attempt else (), want)
                if granted.end and not evaluation.is_proven:
                    await self._prove(name, evaluation)
                    continue
                if granted.granted or granted.end or not wait:
                    return granted, evaluation.attempt
                self._waits.note(incarnation, f"to finish their part of {name}", granted.waits_for)
                await self._changed.wait()
                await self._admit(incarnation)

    def _report(
        self,
        incarnation: Incarnation,
        name: TallyName,
        evaluation: RunningEvaluation,
        attempt: int,
        deltas: Sequence[Delta],
    ) -> None:
        if attempt != evaluation.attempt:
            return
        for delta in deltas:
            if delta.unit.index >= evaluation.plan.num_units:
                raise ProtocolError(
                    f"{incarnation} counted {delta.unit} of {name}, which has {evaluation.plan.num_units} units"
                )
            self._journal.history.tallies.check(delta)
            # Whoever has it leased: the first who counted it does, as after a restart of the chief.
            if evaluation.leases.settle(delta.unit.index):
                self._keep(delta)
                self._changed.notify()

    async def _pin(self, name: TallyName, evaluation: RunningEvaluation) -> None:
        """Holds commits and notes of which weights the evaluation is, unless that is so, or it is over."""
        async with self._pinning:
            if evaluation.is_pinned or evaluation.is_proven:
                return
            if not evaluation.is_held:
                await self._commit_hold.enter("an evaluation")
                evaluation.is_held = True
            self._note(name, evaluation, await self._versions())
            evaluation.is_pinned = True

    async def _prove(self, name: TallyName, evaluation: RunningEvaluation) -> None:
        """Everything is counted: it counts if the weights are what they were."""
        async with self._pinning:
            if evaluation.is_proven:
                return
            if not self._note(name, evaluation, await self._versions()):
                evaluation.is_proven = True
                await self._let_go(evaluation)
        self._changed.notify()

    def _note(self, name: TallyName, evaluation: RunningEvaluation, versions: Versions) -> bool:
        before = evaluation.record
        begins_anew = evaluation.pin(versions)
        if begins_anew:
            logger.warning("The weights changed during %s: it begins anew", name)
        if evaluation.record != before:
            record = evaluation.record.to_record()
            self._journal.write("evaluation", durable=False, name=[name.group, name.ordinal], pin=record)
        return begins_anew

    async def _versions(self) -> Versions:
        described = await self._ps_pool.describe()
        if len(described) < self._num_ps:
            raise PeerUnavailableError(f"an evaluation needs all {self._num_ps} ps; {len(described)} are here now")
        return {incarnation.task: (each.store_epoch, each.step) for incarnation, each in described.items()}

    async def _let_go(self, evaluation: RunningEvaluation) -> None:
        if evaluation.is_held:
            evaluation.is_held = evaluation.is_pinned = False
            # The call that ends an evaluation may be cancelled, the hold has to end all the same.
            await asyncio.shield(self._commit_hold.leave())

    async def _let_go_of_deserted(self) -> None:
        """Nobody works at these evaluations any more: training may go on. Whoever asks again holds commits again."""
        async with self._pinning:
            for _, evaluation in self.evaluations.items():
                if not evaluation.askers:
                    await self._let_go(evaluation)

    async def release(self, incarnation: Incarnation) -> None:
        """``incarnation`` is over."""
        self.evaluations.forget(incarnation)
        await self._let_go_of_deserted()
        self._changed.notify()

    async def pin_again(self) -> None:
        """A ps came back: what runs now is of the weights that there are now."""
        async with self._pinning:
            if len(self._ps_pool.servers) < self._num_ps:
                return  # the last to come back is followed by another call
            for name, evaluation in self.evaluations.items():
                if evaluation.is_pinned:
                    self._note(name, evaluation, await self._versions())
        self._changed.notify()

    # Tallies

    async def get_deltas(self, incarnation: Incarnation, name: TallyName, first: int, only_logs: bool) -> Page:
        """Part of what was counted, or what came of it."""
        await self._admit(incarnation)
        tallies = self._journal.history.tallies
        return Page(logs=tallies.logs(name)) if only_logs else tallies.page(name, first, self._page_bytes)

    async def settle_tally(self, incarnation: Incarnation, name: TallyName, logs: Logs) -> Logs:
        """Says what came of a tally; returns what stands."""
        await self._admit(incarnation)
        tallies = self._journal.history.tallies
        if tallies.logs(name) is None:
            self._journal.write("settled", tally=[name.group, name.ordinal], logs=logs)
        return tallies.logs(name) or ()

    def _keep(self, delta: Delta) -> None:
        self._journal.history.tallies.check(delta)
        self._journal.write("delta", durable=False, delta=encode_delta(delta))

    # Agreements

    async def agree(self, incarnation: Incarnation, topic: TallyName, value: int) -> int:
        """Says a number; returns what is decided."""
        await self._admit(incarnation)
        self._agreements.say(incarnation, topic, value)
        self._changed.notify()
        with self._waits.of(incarnation):
            while (decided := self._agreements.decided(topic)) is None:
                live = [session.incarnation for session in self._sessions.live("worker")]
                missing = self._agreements.waits_for(topic, live, self._lease_book.founders)
                if missing:
                    self._waits.note(incarnation, f"to come to {topic}", missing)
                    await self._changed.wait()
                    await self._admit(incarnation)
                else:
                    self._decide(topic)
        return decided

    def leave(self, incarnation: Incarnation, group: str) -> None:
        """Nobody need wait for what ``incarnation`` says in a group."""
        self._agreements.leave(incarnation, group)
        self._changed.notify()

    def has_left(self, incarnation: Incarnation, group: str) -> bool:
        """Whether ``incarnation`` takes part in a group no more."""
        return self._agreements.has_left(incarnation, group)

    def _decide(self, topic: TallyName) -> None:
        outcome = self._agreements.outcome(topic)
        self._journal.write("agreed", topic=[topic.group, topic.ordinal], value=outcome)
        self._agreements.forget(topic)
        self._changed.notify()

    def begin_anew(self) -> None:
        """The job starts again from a checkpoint, every worker from the beginning of its script."""
        self._journal.write("anew")
        self.evaluations.clear()
        self._agreements.clear()
