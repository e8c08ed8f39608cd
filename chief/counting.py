"""What workers count and agree on: evaluations on held weights, tallies, decisions. One method for each verb."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from stratagem.chief.agreements import Agreements
from stratagem.chief.bell import Bell
from stratagem.chief.evaluations import Evaluations, RunningEvaluation, Versions
from stratagem.chief.fleet import Fleet
from stratagem.chief.journal import Journal
from stratagem.chief.lending import Lending, Loans
from stratagem.chief.lives import Life
from stratagem.chief.quiet import Quiet
from stratagem.chief.sessions import Sessions
from stratagem.chief.tallies import Delta, Logs, Page, TallyName, encode_delta
from stratagem.chief.waits import Waits
from stratagem.cluster.units import Plan
from stratagem.errors import PeerUnavailableError, ProtocolError

logger = logging.getLogger(__name__)


class Counting:
    """The chief's part in evaluations, in histories and in what workers decide together.

    Args:
        sessions: membership.
        lending: units of training data.
        fleet: the ps.
        quiet: holds commits while an evaluation runs.
        journal: its history has the tallies.
        bell: rung at every change.
        admit: waits until a life may speak.
        waits: what lives wait for, for the status page.
        num_ps: ps of the cluster.
        page_bytes: what fits into one reply.
    """

    def __init__(
        self,
        sessions: Sessions,
        lending: Lending,
        fleet: Fleet,
        quiet: Quiet,
        journal: Journal,
        bell: Bell,
        *,
        admit: Callable[[Life], Awaitable[None]],
        waits: Waits,
        num_ps: int,
        page_bytes: int,
    ) -> None:
        self._sessions = sessions
        self._lending = lending
        self._fleet = fleet
        self._quiet = quiet
        self._journal = journal
        self._bell = bell
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
            accepted = self._lending.epoch(delta.unit.dataset, delta.unit.epoch).accepted
            if delta.unit.index in accepted and not tallies.counts(delta.tally.group, delta.unit):
                self._keep(Delta(tallies.place(delta.tally), delta.unit, delta.data))

    # Evaluations

    async def next_evaluation_units(
        self,
        life: Life,
        name: TallyName,
        plan: Plan,
        attempt: int,
        deltas: Sequence[Delta],
        held: Sequence[int],
        want: int,
        wait: bool,
        leave: bool,
    ) -> tuple[Loans, int]:
        """Takes in what was counted and lends up to ``want`` units; also the number of the attempt.

        Raises:
            ConfigurationError: the evaluation is over other data.
            PeerUnavailableError: commits cannot be held now.
        """
        await self._admit(life)
        evaluation = self.evaluations.open(name, plan)
        self._report(life, name, evaluation, attempt, deltas)
        if leave:
            self.evaluations.leave(name, life)
            await self._let_go_of_deserted()
            self._bell.ring()
        if not want:
            return Loans(), evaluation.attempt
        with self._waits.of(life):
            while True:
                await self._pin(name, evaluation)
                loans = self.evaluations.ask(name, life, held if attempt == evaluation.attempt else (), want)
                if loans.end and not evaluation.is_proven:
                    await self._prove(name, evaluation)
                    continue
                if loans.loans or loans.end or not wait:
                    return loans, evaluation.attempt
                self._waits.note(life, f"to finish their part of {name}", loans.waits_for)
                await self._bell.heard()
                await self._admit(life)

    def _report(
        self, life: Life, name: TallyName, evaluation: RunningEvaluation, attempt: int, deltas: Sequence[Delta]
    ) -> None:
        if attempt != evaluation.attempt:
            return
        for delta in deltas:
            if delta.unit.index >= evaluation.plan.num_units:
                raise ProtocolError(
                    f"{life} counted {delta.unit} of {name}, which has {evaluation.plan.num_units} units"
                )
            self._journal.history.tallies.check(delta)
            # Whoever has it on loan: the first who counted it does, as after a restart of the chief.
            if evaluation.leases.settle(delta.unit.index):
                self._keep(delta)
                self._bell.ring()

    async def _pin(self, name: TallyName, evaluation: RunningEvaluation) -> None:
        """Holds commits and notes of which weights the evaluation is, unless that is so, or it is over."""
        async with self._pinning:
            if evaluation.is_pinned or evaluation.is_proven:
                return
            if not evaluation.is_held:
                await self._quiet.enter("an evaluation")
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
        self._bell.ring()

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
        described = await self._fleet.describe()
        if len(described) < self._num_ps:
            raise PeerUnavailableError(f"an evaluation needs all {self._num_ps} ps; {len(described)} are here now")
        return {life.task: (each.store_epoch, each.step) for life, each in described.items()}

    async def _let_go(self, evaluation: RunningEvaluation) -> None:
        if evaluation.is_held:
            evaluation.is_held = evaluation.is_pinned = False
            # The call that ends an evaluation may be cancelled, the hold has to end all the same.
            await asyncio.shield(self._quiet.leave())

    async def _let_go_of_deserted(self) -> None:
        """Nobody works at these evaluations any more: training may go on. Whoever asks again holds commits again."""
        async with self._pinning:
            for _, evaluation in self.evaluations.items():
                if not evaluation.askers:
                    await self._let_go(evaluation)

    async def release(self, life: Life) -> None:
        """``life`` is over."""
        self.evaluations.forget(life)
        await self._let_go_of_deserted()
        self._bell.ring()

    async def pin_again(self) -> None:
        """A ps came back: what runs now is of the weights that there are now."""
        async with self._pinning:
            if len(self._fleet.servers) < self._num_ps:
                return  # the last to come back is followed by another call
            for name, evaluation in self.evaluations.items():
                if evaluation.is_pinned:
                    self._note(name, evaluation, await self._versions())
        self._bell.ring()

    # Tallies

    async def get_deltas(self, life: Life, name: TallyName, first: int, only_logs: bool) -> Page:
        """Part of what was counted, or what came of it."""
        await self._admit(life)
        tallies = self._journal.history.tallies
        return Page(logs=tallies.logs(name)) if only_logs else tallies.page(name, first, self._page_bytes)

    async def settle_tally(self, life: Life, name: TallyName, logs: Logs) -> Logs:
        """Says what came of a tally; returns what stands."""
        await self._admit(life)
        tallies = self._journal.history.tallies
        if tallies.logs(name) is None:
            self._journal.write("settled", tally=[name.group, name.ordinal], logs=logs)
        return tallies.logs(name) or ()

    def _keep(self, delta: Delta) -> None:
        self._journal.history.tallies.check(delta)
        self._journal.write("delta", durable=False, delta=encode_delta(delta))

    # Agreements

    async def agree(self, life: Life, topic: TallyName, value: int) -> int:
        """Says a number; returns what is decided."""
        await self._admit(life)
        self._agreements.say(life, topic, value)
        self._bell.ring()
        with self._waits.of(life):
            while (decided := self._agreements.decided(topic)) is None:
                live = [session.life for session in self._sessions.live("worker")]
                missing = self._agreements.waits_for(topic, live, self._lending.founders)
                if missing:
                    self._waits.note(life, f"to come to {topic}", missing)
                    await self._bell.heard()
                    await self._admit(life)
                else:
                    self._decide(topic)
        return decided

    def leave(self, life: Life, group: str) -> None:
        """Nobody need wait for what ``life`` says in a group."""
        self._agreements.leave(life, group)
        self._bell.ring()

    def has_left(self, life: Life, group: str) -> bool:
        """Whether ``life`` takes part in a group no more."""
        return self._agreements.has_left(life, group)

    def _decide(self, topic: TallyName) -> None:
        outcome = self._agreements.outcome(topic)
        self._journal.write("agreed", topic=[topic.group, topic.ordinal], value=outcome)
        self._agreements.forget(topic)
        self._bell.ring()

    def begin_anew(self) -> None:
        """The job starts again from a checkpoint, every worker from the beginning of its script."""
        self._journal.write("anew")
        self.evaluations.clear()
        self._agreements.clear()
