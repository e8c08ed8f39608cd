"""Units of evaluation data: leased while commits are held, so that all are evaluated on one version of the weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from stratagem.chief.chief_state import ChiefState, Note
from stratagem.chief.counting.metric_states import MetricState
from stratagem.chief.leasing.evaluations import Evaluations, RunningEvaluation, Versions
from stratagem.chief.leasing.leases import Leases
from stratagem.chief.leasing.lending import EvaluationPass, LeaseRequest, UnitLender
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Topic
from stratagem.errors import PeerUnavailableError, ProtocolError

logger = logging.getLogger(__name__)


class EvaluationUnits(UnitLender[EvaluationPass]):
    """Leases units of evaluation data, accepted once their counts have arrived; ``write`` keeps those."""

    def __init__(self, state: ChiefState, write: Callable[[MetricState], None]) -> None:
        super().__init__(state)
        self._write = write
        self._pinning = asyncio.Lock()
        self.evaluations = Evaluations()
        metric_states = self._journal.history.metric_states
        for name, pin in self._journal.history.evaluations.items():
            self.evaluations.restore(name, pin, metric_states.units(name), metric_states.logs(name) is not None)

    async def accept(self, request: LeaseRequest[EvaluationPass]) -> None:
        """Takes in what was counted. ConfigurationError: the evaluation is over other data. ProtocolError: it has no
        such unit."""
        evaluated = request.units_of
        name, evaluation = evaluated.name, self.evaluations.open(evaluated.name, evaluated.plan)
        if evaluated.attempt != evaluation.attempt:
            return
        for state in request.states:
            if state.unit.index >= evaluation.plan.num_units:
                raise ProtocolError(
                    f"{request.incarnation} counted {state.unit} of {name}, which has {evaluation.plan.num_units} units"
                )
            self._journal.history.metric_states.check(state)
            # Whoever has it leased: the first who counted it does, as after a restart of the chief.
            if evaluation.leases.mark_accepted(state.unit.index):
                self._write(state)
                if evaluation.leases.closed:
                    self._changed.notify()

    async def leave(self, request: LeaseRequest[EvaluationPass]) -> None:
        self.evaluations.leave(request.units_of.name, request.incarnation)
        await self._let_go_of_deserted()
        self._changed.notify()

    async def ask(self, request: LeaseRequest[EvaluationPass], note: Note) -> Leases:
        """Leases units of the weights that there are now. PeerUnavailableError: commits cannot be held now."""
        evaluated = request.units_of
        name, evaluation = evaluated.name, self.evaluations.open(evaluated.name, evaluated.plan)
        while True:
            await self._pin(name, evaluation)
            held = frozenset(request.held) if evaluated.attempt == evaluation.attempt else ()
            leases = self.evaluations.ask(name, request.incarnation, held, request.want, request.at_most)
            if not leases.end or evaluation.is_proven:
                return leases
            await self._prove(name, evaluation)

    def what_for(self, request: LeaseRequest[EvaluationPass]) -> str:
        return f"to finish their part of {request.units_of.name}"

    async def _pin(self, name: Topic, evaluation: RunningEvaluation) -> None:
        """Holds commits and notes of which weights the evaluation is, unless that is so, or it is over."""
        async with self._pinning:
            if evaluation.is_pinned or evaluation.is_proven:
                return
            if not evaluation.is_held:
                await self._commit_hold.enter("an evaluation")
                evaluation.is_held = True
            self._note(name, evaluation, await self._versions())
            evaluation.is_pinned = True

    async def _prove(self, name: Topic, evaluation: RunningEvaluation) -> None:
        """Everything is counted: it counts if the weights are what they were."""
        async with self._pinning:
            if evaluation.is_proven:
                return
            if not self._note(name, evaluation, await self._versions()):
                evaluation.is_proven = True
                await self._let_go(evaluation)
        self._changed.notify()

    def _note(self, name: Topic, evaluation: RunningEvaluation, versions: Versions) -> bool:
        before = evaluation.record
        begins_anew = evaluation.pin(versions)
        if begins_anew:
            logger.warning("The weights changed during %s: it starts over", name)
        if evaluation.record != before:
            record = evaluation.record.to_record()
            self._journal.write("evaluation", durable=False, name=[name.group, name.ordinal], pin=record)
        return begins_anew

    async def _versions(self) -> Versions:
        described = await self._ps_pool.describe_all()
        return {incarnation.task: (each.store_epoch, each.step) for incarnation, each in described.items()}

    async def _let_go(self, evaluation: RunningEvaluation) -> None:
        if evaluation.is_held:
            evaluation.is_held = evaluation.is_pinned = False
            # The call that ends an evaluation may be cancelled, the hold has to end all the same.
            await asyncio.shield(self._commit_hold.leave())

    async def _let_go_of_deserted(self) -> None:
        """Nobody works at these evaluations any more: training may go on. Whoever asks again holds commits again."""
        async with self._pinning:
            for evaluation in [*self.evaluations.values()]:
                if not evaluation.askers:
                    await self._let_go(evaluation)

    async def release(self, incarnation: Incarnation) -> None:
        self.evaluations.forget(incarnation)
        await self._let_go_of_deserted()
        self._changed.notify()

    async def pin_again(self) -> None:
        """A ps came back: what runs now is of the weights that there are now."""
        # Where another one is away, or dies just now, this is called once more when that is back.
        with contextlib.suppress(PeerUnavailableError):
            async with self._pinning:
                for name, evaluation in [*self.evaluations.items()]:
                    if evaluation.is_pinned:
                        self._note(name, evaluation, await self._versions())
        self._changed.notify()
