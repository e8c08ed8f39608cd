"""``optimizer.step()`` under parameter servers: commit what was staged, take the new weights, exactly once.

The optimizer stays the same object with the same ``param_groups``. A pre-hook of its ``step`` commits, and torch's own
step finds nothing to do (docs/protocol.md 7).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from stratagem.arguments import some_of
from stratagem.cluster.units import Unit, Update
from stratagem.errors import NonFiniteGradientError, PeerUnavailableError, StaleStoreError
from stratagem.measuring import measures
from stratagem.measuring.flight import FLIGHT
from stratagem.rpc.lane import Lane
from stratagem.rpc.units import update_to_proto
from stratagem.worker.gradient_guard import GradientPolicy, are_finite, not_finite, skipped, total_norm
from stratagem.worker.push import wire
from stratagem.worker.push.close_reports import MAX_WAITING, CloseReports
from stratagem.worker.push.hyper_parameters import HyperParameters
from stratagem.worker.push.ps_client import PendingCall, PsClient, Rerouted, insist
from stratagem.worker.push.remote_tables import RemoteTables, by_group, every_table
from stratagem.worker.push.row_reads import RowReads, RowsAhead
from stratagem.worker.push.staging import GradientStaging
from stratagem.worker.push.table_handle import RowGradient
from stratagem.worker.push.variables import RemoteVariables
from stratagem.worker.step_meter import StepMeter

logger = logging.getLogger(__name__)


class StepSlice(NamedTuple):
    """Staleness 0: the step of the job that an update belongs to."""

    step: int
    units: tuple[Unit, ...]
    weight: float
    is_set: bool
    """The weight is what the script has set, not a number of examples."""


class RolledBack(Exception):
    """All ps rolled back to a checkpoint (staleness 0): the current update belongs to a past that is gone."""


NO_UNIT = (
    "an update of no batch was in flight when the number of parameter servers changed: it is not known which of them "
    "had applied it, and it %s"
)


@dataclasses.dataclass(eq=False, repr=False)
class GradientPush:
    """Pushes the gradients of one optimizer."""

    optimizer: torch.optim.Optimizer
    parameters: Sequence[torch.nn.Parameter]
    """What it changes, tables left out."""
    _variables: RemoteVariables
    """The same on the ps, in the same order."""
    _table_groups: Sequence[RemoteTables]
    on_backward: dataclasses.InitVar[Callable[[], None]]
    """Called in each backward that reaches a parameter."""
    _policy: GradientPolicy
    _models: Sequence[torch.nn.Module]
    """Prepared with it."""
    _closes: CloseReports
    """Closed units to report with the commit."""
    _meter: StepMeter
    _reconnect: Callable[[PsClient], None]
    """To a ps that was lost."""
    _reads: RowReads
    """Rows that it changes."""

    def __post_init__(self, on_backward: Callable[[], None]) -> None:
        self.staging = GradientStaging(
            self._variables, self.parameters, on_backward, self._table_groups, self._reads.turn
        )
        self._tables = [*every_table(self._table_groups)]
        self._clients: Sequence[PsClient] = self._variables.clients
        self._layout = self._variables.layout
        self._hyper = HyperParameters(self.optimizer)
        self._rows: tuple[RowGradient | None, ...] = ()
        """Of this step: the gradient of each table."""
        self._slice: Any = None
        """Of this step, as requests have it (staleness 0)."""
        self._is_part = False
        """Whether this step has parts of other workers too."""
        self._servers: tuple[int, ...] = ()
        self._messages: dict[int, wire.CommitMessage] = {}
        self._store_epochs: dict[int, int] = {}
        self._is_rerouted = False
        """While an update is under way: there is another number of ps."""
        self._num_answered = 0
        """Of the ps that an update goes to: those that have applied it."""
        self._corked: list[Lane] = []
        """Lanes that hold frames back, which leave with the first request."""
        self._calls: dict[int, PendingCall | None] = {}
        self._applied: dict[int, tuple[int, int]] = {}
        """Of each ps: updates by its count, and how many it has forgotten."""
        self.num_pushed = 0
        self.is_paced = False
        """Whether a scheduler of its optimizer is prepared."""
        self.rerouted()

    def has_begun(self) -> bool:
        """Whether the ps have made updates of what this optimizer changes, or were given a state that knows of some."""
        return any(any(reply.step_counts) for reply in self._pulls())

    def num_before(self) -> int:
        """Updates that the ps have made of what this optimizer changes, or skipped: the ps are asked."""
        return max([wire.num_made(reply.versions) for reply in self._pulls()], default=0)

    def _pulls(self) -> Iterator[Any]:
        of_tables = ((each.group, ps) for each in self._table_groups for ps in each.servers)
        for group, ps in (*self._layout.shards, *of_tables):
            peer, have = self._clients[ps], {group: None}
            yield insist(lambda: wire.pull_weights(peer, have).result(lambda _: None), lambda: self._reconnect(peer))  # noqa: B023

    def rerouted(self) -> None:
        """The variables lie elsewhere: an update that is under way begins anew."""
        of_tables = (ps for each in self._table_groups for ps in each.servers)
        self._servers = tuple(sorted({*(ps for _, ps in self._layout.shards), *of_tables}))
        self._messages = {ps: wire.CommitMessage() for ps in self._servers}
        self._applied = dict.fromkeys(self._servers, max(self._applied.values(), default=(0, 0)))
        self._calls.clear()
        self._is_rerouted = True
        self.reattached()

    def weigh(self, share: float) -> None:
        """Staleness 0: a batch begins. ``share``: the part of the global batch that this worker has.
        A gradient is noted with that of the batch that backward brings it of."""
        self.staging.weigh(share)
        for table in self._tables:
            table.pending.share = share

    def mixes_shares(self) -> bool:
        """Whether there is a gradient of a batch of which this worker had another share than it has of this one."""
        if self._policy.gradients == "sum":
            return False  # its updates have no weight
        return self.staging.mixes_shares() or any(table.pending.mixes_shares() for table in self._tables)

    def push(self, update: Update, step_slice: StepSlice | None, *, reads_ahead: bool = False) -> bool:
        """Commits the gradients as ``update`` and takes the new weights; with ``reads_ahead`` also the rows of the
        batch to come, in the same round trip. False: there was no gradient at all, and nothing happened. Raises
        NonFiniteGradientError: NaN or Inf under the policy "error"; RolledBack: the job went back to a checkpoint;
        PeerUnavailableError: a ps did not come back in time."""
        self._variables.copies.check()
        self._rows = tuple([table.pending.total() for table in self._tables])
        gradients = [parameter.grad for parameter in self.parameters]
        gradients += [None if rows is None else rows.values for rows in self._rows]
        given = [gradient is not None for gradient in gradients]
        if not any(given):
            with self._reads.turn:
                self._reads.clear()  # a step of the other workers may be over
            return False
        self._slice, self._is_part = None, step_slice is not None and len(step_slice.units) > 1
        if step_slice is not None:
            self._slice = wire.step_slice(*step_slice, self._policy.gradients)
        while True:
            self._is_rerouted, self._num_answered = False, 0
            try:
                with self._reads.turn:
                    ahead = self._reads.ahead() if reads_ahead else None
                    self._reads.clear()
                    self._push(update, given, gradients, ahead)
                return True
            except Rerouted:
                if not update.units:
                    logger.warning(NO_UNIT, "counts as applied" if self._num_answered else "is sent again")
                if not update.units and self._num_answered:
                    return True

    def _push(
        self,
        update: Update,
        given: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
        ahead: RowsAhead | None,
    ) -> None:
        self._check_stores()  # a ps may have been found changed when rows were asked for
        scale = self._judge_own([gradient for gradient in gradients if gradient is not None])
        step = 0 if self._slice is None else self._slice.step
        with self._meter.exposed(self._waiting_text, step, measures.PUSH), FLIGHT.happening("push", update):
            self._cork()
            try:
                self._stage_all()
                if self._slice is not None:
                    scale = self._prepare(update, scale)
                self._commit(update, given, scale, ahead)
            finally:
                self._uncork()
        self.staging.reset()
        self.num_pushed += 1
        self._closes.pushed(update.units, self._servers)
        with contextlib.suppress(PeerUnavailableError):  # a ps that is away hears of them when it is back
            self._closes.flush(MAX_WAITING)
        if scale is None:
            skipped(self._models, self._meter)

    @property
    def num_applied(self) -> int:
        """Updates that the job has applied to what the optimizer changes, or skipped, as of the last reply."""
        return max((count + forgotten for count, forgotten in self._applied.values()), default=0)

    @property
    def num_of_others(self) -> int | None:
        """Updates in this worker's copies in which it has no part (staleness 0); None: of tables it has no copies."""
        return self._variables.num_made - self.num_pushed if self._variables.named else None

    def reattached(self) -> None:
        """The variables are those of the ps as they are now."""
        self._store_epochs = self._epochs_now()

    def _epochs_now(self) -> dict[int, int]:
        return {ps: self._clients[ps].store_epoch for ps in self._servers}

    # -- before anything is sent ----------------------------------------------------------------------------

    def _judge_own(self, gradients: Sequence[torch.Tensor]) -> float | None:
        """The gradient's factor by this worker's own; None: skip the update."""
        if self._policy.clip_norm is None and are_finite(gradients):
            return 1.0
        norm = float(total_norm(gradients))
        if not math.isfinite(norm):
            if self._policy.nan == "error":
                raise self._non_finite()
            return None
        return self._policy.factor(norm) if self._slice is None else 1.0  # others contribute to a step of the job

    def _non_finite(self) -> NonFiniteGradientError:
        names = [
            spec.name
            for spec, parameter in zip(self._layout.variables, self.parameters, strict=True)
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ]
        names += [
            table.link.name
            for table, gradient in zip(self._tables, self._rows, strict=True)
            if gradient is not None and not bool(torch.isfinite(gradient.values).all())
        ]
        if not names:
            return NonFiniteGradientError(
                "the norm of the gradients overflows although every element is finite: lower the loss scale."
            )
        return not_finite(f" in {some_of(names)}")

    # -- sending ----------------------------------------------------------------------------------------------

    def _stage_all(self) -> None:
        while True:
            try:
                return self.staging.complete(self._servers, self._rows, self._is_part)
            except PeerUnavailableError:
                for ps in self._servers:
                    if not self._clients[ps].is_connected:
                        self._recover(ps)

    def _prepare(self, update: Update, scale: float | None) -> float | None:
        """First phase of a synchronous update: every ps has this slice, but for a single one, which gets it with the
        commit; perhaps facts about the merged gradient."""
        want_facts = self._policy.clip_norm is not None or self._policy.nan == "skip"
        if len(self._servers) == 1 and not want_facts:
            return scale
        hyper = self._hyper.messages()

        def request(ps: int) -> Any:
            gradients, commits = self.staging.reference(ps), self._group_commits(ps, hyper)
            return wire.prepare_update(update, gradients, commits, self._slice, want_facts)

        replies: list[Any] = []
        self._on_all("PrepareUpdate", request, lambda _, call: replies.append(call.result()))
        if not want_facts:
            return scale
        if not all(reply.finite for reply in replies):
            return None
        return self._policy.factor(math.sqrt(sum(reply.squared_norm for reply in replies)))

    def _commit(self, update: Update, given: Sequence[bool], scale: float | None, ahead: RowsAhead | None) -> None:
        num_closes: dict[int, int] = {}
        hyper, of_update = self._hyper.messages(), update_to_proto(update)

        def request(ps: int) -> Any:
            message, closes, transfer = self._messages[ps], self._closes.for_ps(ps), self._clients[ps].new_transfer()
            num_closes[ps] = len(closes)
            message.set_groups(given, hyper, lambda: self._group_commits(ps, hyper))
            message.set_versions(self._variables.have[ps])
            gradients = self.staging.reference(ps)
            return message.commit(of_update, gradients, self._slice, scale, closes, transfer, len(self._servers))

        def finish(ps: int, call: PendingCall) -> None:
            reply = self._variables.take(self._clients[ps], call)
            if reply.left_out:
                raise RolledBack
            num_updates = wire.num_made(reply.versions)
            before, forgotten = self._applied.get(ps, (0, 0))
            self._applied[ps] = num_updates, forgotten + max(0, before - num_updates)
            self._closes.acknowledged(ps, num_closes[ps])
            self._num_answered += 1

        self._on_all("CommitUpdate", request, finish, ahead)
        self._variables.finish()
        if ahead is not None:
            with self._meter.within(measures.ROWS_WAIT):
                self._reads.take(ahead)

    def _on_all(
        self,
        method: str,
        build: Callable[[int], Any],
        finish: Callable[[int, PendingCall], None],
        ahead: RowsAhead | None = None,
    ) -> None:
        """One sequenced call on every ps at once, and a request for rows behind it; a ps that goes away is waited for
        and called again."""
        requests: dict[int, Any] = {}
        self._calls.clear()
        for ps in self._servers:
            requests[ps] = build(ps)
            try:
                self._calls[ps] = self._clients[ps].start(method, requests[ps], sequenced=True)
            except PeerUnavailableError:
                self._calls[ps] = None
        if ahead is not None:
            ahead.send()
        self._uncork()
        for ps, request in requests.items():
            while True:
                call = self._calls[ps]
                try:
                    if call is None:
                        raise PeerUnavailableError("not connected")
                    with self._meter.within(measures.WAIT, self._clients[ps].task):
                        finish(ps, call)
                    break
                except (PeerUnavailableError, StaleStoreError) as error:
                    if self._slice is not None and isinstance(error, StaleStoreError):
                        raise RolledBack from None
                    self._recover(ps)
                    self._calls[ps] = self._repeat(method, request, ps)

    def _cork(self) -> None:
        """From now on frames wait for the first request behind them."""
        self._corked = [client.lane for ps in self._servers if (client := self._clients[ps]).is_connected]
        for lane in self._corked:
            lane.cork()

    def _uncork(self) -> None:
        for lane in self._corked:
            lane.uncork()
        self._corked.clear()

    def _repeat(self, method: str, request: Any, ps: int) -> PendingCall | None:
        """With the gradient's frames; None: the ps is away again."""
        try:
            request.gradients.CopyFrom(self.staging.restage(ps).to_proto())
            return self._clients[ps].restart(method, request)
        except PeerUnavailableError:
            return None

    def _recover(self, ps: int) -> None:
        self._variables.check_form()  # else the ps would end every connection with what it cannot take
        self._reconnect(self._clients[ps])
        if self._is_rerouted:
            raise Rerouted
        self._check_stores()

    def _check_stores(self) -> None:
        if self._slice is not None and self._store_epochs != self._epochs_now():
            raise RolledBack

    # -- what a request says -----------------------------------------------------------------------------------

    def _group_commits(self, ps: int, hyper: Sequence[Any]) -> list[Any]:
        commits = []
        for group in self._layout.groups:
            shards = self._layout.shards.get((group, ps))
            if not shards:
                continue
            present = [self.parameters[shard.variable].grad is not None for shard in shards]
            commits.append(wire.group_commit(group, present, hyper, self._variables.have[ps].get(group)))
        for each, gradients in by_group(self._table_groups, self._rows):
            if present := each.present(ps, gradients):
                commits.append(wire.group_commit(each.group, present, hyper))
        return commits

    def _waiting_text(self) -> str:
        late = [ps for ps in self._servers if (call := self._calls.get(ps)) is None or not call.done]
        servers = ", ".join(f"ps:{ps}" for ps in late or self._servers)
        return f"{servers} to apply " + (f"step {of.step}" if (of := self._slice) is not None else "its update")
