"""``optimizer.step()`` under parameter servers: commit what was staged, take the new weights, exactly once.

The optimizer keeps its object and its ``param_groups``. A pre-hook of its ``step`` commits and sets the gradients to
None, so that torch's own step finds nothing to do; the post-hook puts them back (docs/protocol.md 7).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from google.protobuf import struct_pb2

from stratagem.cluster.units import Unit, Update
from stratagem.errors import ConfigurationError, NonFiniteGradientError, PeerUnavailableError, StaleStoreError
from stratagem.rpc.generated import common_pb2, ps_pb2
from stratagem.worker.close_reports import MAX_WAITING, CloseReports, unit_proto
from stratagem.worker.ps_client import PendingCall, PsClient
from stratagem.worker.remote_table import RemoteTable
from stratagem.worker.staging import GradientStaging
from stratagem.worker.step_meter import StepMeter
from stratagem.worker.variables import RemoteVariables

logger = logging.getLogger(__name__)

_NOT_SENT = {"params", "foreach", "fused", "capturable", "differentiable"}


@dataclasses.dataclass(frozen=True)
class PushPolicy:
    """How gradients are treated before they are applied."""

    gradients: Literal["mean", "sum"] = "mean"
    """Losses are means over examples, or already divided by the global batch."""
    clip_norm: float | None = None
    """Largest global norm of an optimizer's gradient; None leaves it alone."""
    nan: Literal["error", "skip"] = "error"
    """What a NaN or Inf in a gradient does: raise, or skip the update and count it."""


@dataclasses.dataclass(frozen=True)
class StepSlice:
    """Staleness 0: the step of the job that an update belongs to."""

    step: int
    units: tuple[Unit, ...]
    weight: float


class RolledBack(Exception):
    """All ps went back to a checkpoint (staleness 0): the update in hand belongs to a past that is gone."""


class GradientPush:
    """Pushes the gradients of one optimizer.

    Args:
        optimizer: the optimizer; its parameters are the variables of ``variables.layout`` named by ``indices``.
        parameters: the parameters in the layout's order.
        variables: the remote variables (one optimizer's groups).
        staging: sends the frames.
        policy: clipping and NaN policy.
        closes: closed units to report with the commit.
        meter: times what is exposed.
        tables: tables that the optimizer changes.
        recover: connects to a ps that was lost.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        variables: RemoteVariables,
        staging: GradientStaging,
        policy: PushPolicy,
        closes: CloseReports,
        meter: StepMeter,
        tables: Sequence[RemoteTable],
        recover: Callable[[PsClient], None],
    ) -> None:
        self.optimizer = optimizer
        self._tables = list(tables)
        self._reconnect = recover
        self._parameters = list(parameters)
        self._variables = variables
        self._clients: Sequence[PsClient] = variables.clients
        self._layout = variables.layout
        self._staging = staging
        self._policy = policy
        self._closes = closes
        self._meter = meter
        of_tables = (ps for table in tables for ps in table.link.placement.servers)
        self._servers = tuple(sorted({*self._layout.servers_of(self._layout.groups), *of_tables}))
        self._hyper: tuple[list[dict[str, Any]], list[struct_pb2.Struct]] = [], []
        self._store_epochs: dict[int, int] = {}
        self._corks = contextlib.ExitStack()
        """What holds the frames back that leave with the first request."""
        self._calls: dict[int, PendingCall | None] = {}
        self._applied: dict[int, tuple[int, int]] = {}
        """Of each ps: updates by its count, and how many it has forgotten."""
        self.num_pushed = 0
        """Updates of this worker."""
        self.reattached()

    def push(self, update: Update, step_slice: StepSlice | None) -> bool:
        """Commits the gradients as ``update`` and takes the new weights.

        Returns:
            False when there was no gradient at all, and nothing happened.

        Raises:
            NonFiniteGradientError: NaN or Inf under the policy "error".
            RolledBack: the job went back to a checkpoint.
            PeerUnavailableError: a ps did not come back in time.
        """
        rows = [table.gradient() for table in self._tables]
        if all(parameter.grad is None for parameter in self._parameters) and not any(rows):
            return False
        self._check_stores(step_slice)  # a ps may have been found changed when rows were asked for
        scale, action = self._judge_own(step_slice is None)
        with (
            self._meter.exposed(lambda: self._waiting_text(step_slice), step_slice.step if step_slice else 0),
            contextlib.ExitStack() as self._corks,
        ):
            for client in (self._clients[ps] for ps in self._servers):
                if client.is_connected:
                    self._corks.enter_context(client.lane.corked())
            references = self._stage_all(step_slice)
            if step_slice is not None:
                scale, action = self._prepare(update, step_slice, references, scale, action)
            self._commit(update, step_slice, references, scale, action)
        self._staging.reset()
        self.num_pushed += 1
        self._closes.pushed(update.units, self._servers)
        with contextlib.suppress(PeerUnavailableError):  # a ps that is away hears of them when it is back
            self._closes.flush(MAX_WAITING)
        if action == ps_pb2.SKIP:
            self._meter.skipped += 1
            logger.warning("skipped an update with a NaN or Inf gradient (%d so far)", self._meter.skipped)
        return True

    @property
    def num_applied(self) -> int:
        """Updates that the job has applied to what the optimizer changes, whoever sent them, as of the last reply."""
        return max((count + forgotten for count, forgotten in self._applied.values()), default=0)

    def reattached(self) -> None:
        """The variables are those of the ps as they are now."""
        self._store_epochs = self._epochs_now()

    def _epochs_now(self) -> dict[int, int]:
        return {ps: self._clients[ps].store_epoch for ps in self._servers}

    # -- before anything is sent ----------------------------------------------------------------------------

    def _judge_own(self, own_is_all: bool) -> tuple[float, int]:
        """Scale and action from this worker's own gradient. ``own_is_all``: no other worker contributes."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        gradients += [gradient.values for table in self._tables if (gradient := table.gradient()) is not None]
        if self._policy.clip_norm is None and _surely_finite(gradients):
            return 1.0, ps_pb2.APPLY
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            if self._policy.nan == "error":
                raise NonFiniteGradientError(self._name_non_finite())
            return 1.0, ps_pb2.SKIP
        if own_is_all and self._policy.clip_norm is not None:
            return min(1.0, self._policy.clip_norm / (norm + 1e-6)), ps_pb2.APPLY
        return 1.0, ps_pb2.APPLY

    def _name_non_finite(self) -> str:
        names = [
            spec.name
            for spec, parameter in zip(self._layout.variables, self._parameters, strict=True)
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ]
        names += [
            table.link.name
            for table in self._tables
            if (gradient := table.gradient()) is not None and not bool(torch.isfinite(gradient.values).all())
        ]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        if not names:
            return "the norm of the gradients overflows although every element is finite: lower the loss scale."
        return (
            f"expected finite gradients, got NaN or Inf in {', '.join(names[:3])}{more}; nothing was applied. "
            'Lower the learning rate, look at the loss, or call prepare(nan="skip") to skip and count such updates.'
        )

    # -- sending ----------------------------------------------------------------------------------------------

    def _stage_all(self, step_slice: StepSlice | None) -> dict[int, ps_pb2.TransferRef]:
        while True:
            try:
                return self._staging.complete(self._servers)
            except PeerUnavailableError:
                for ps in self._servers:
                    if not self._clients[ps].is_connected:
                        self._recover(ps, step_slice)

    def _prepare(
        self,
        update: Update,
        step_slice: StepSlice,
        references: dict[int, ps_pb2.TransferRef],
        scale: float,
        action: int,
    ) -> tuple[float, int]:
        """First phase of a synchronous update: every ps has this slice; perhaps facts about the merged gradient."""
        want_facts = self._policy.clip_norm is not None or self._policy.nan == "skip"

        def request(ps: int) -> Any:
            return ps_pb2.PrepareUpdateRequest(
                update=_update_proto(update),
                gradients=references[ps],
                groups=self._group_commits(ps),
                slice=self._slice_proto(step_slice),
                want_facts=want_facts,
            )

        replies: list[ps_pb2.PrepareUpdateReply] = []
        self._on_all("PrepareUpdate", request, references, step_slice, lambda _, call: replies.append(call.result()))
        if not want_facts:
            return scale, action
        if not all(reply.finite for reply in replies):
            return 1.0, ps_pb2.SKIP
        if self._policy.clip_norm is None:
            return 1.0, ps_pb2.APPLY
        norm = math.sqrt(sum(reply.squared_norm for reply in replies))
        return min(1.0, self._policy.clip_norm / (norm + 1e-6)), ps_pb2.APPLY

    def _commit(
        self,
        update: Update,
        step_slice: StepSlice | None,
        references: dict[int, ps_pb2.TransferRef],
        scale: float,
        action: int,
    ) -> None:
        num_closes: dict[int, int] = {}

        def request(ps: int) -> Any:
            closes = self._closes.for_ps(ps)
            num_closes[ps] = len(closes)
            return ps_pb2.CommitUpdateRequest(
                update=_update_proto(update),
                gradients=references[ps],
                groups=self._group_commits(ps),
                slice=self._slice_proto(step_slice) if step_slice is not None else None,
                action=action,  # type: ignore[arg-type]  # an enum is an int on the wire
                scale=scale,
                closes=closes,
                reply_transfer=self._clients[ps].new_transfer(),
                num_servers=len(self._servers),
            )

        def finish(ps: int, call: PendingCall) -> None:
            reply: ps_pb2.CommitUpdateReply = self._variables.take(self._clients[ps], call)
            if reply.left_out:
                raise RolledBack
            self._count(ps, max((version.num_updates for version in reply.versions), default=0))
            self._closes.acknowledged(ps, num_closes[ps])

        self._on_all("CommitUpdate", request, references, step_slice, finish)
        self._variables.targets.finish()

    def _count(self, ps: int, num_updates: int) -> None:
        before, forgotten = self._applied.get(ps, (0, 0))
        self._applied[ps] = num_updates, forgotten + max(0, before - num_updates)

    def _on_all(
        self,
        method: str,
        build: Callable[[int], Any],
        references: dict[int, ps_pb2.TransferRef],
        step_slice: StepSlice | None,
        finish: Callable[[int, PendingCall], None],
    ) -> None:
        """One sequenced call on every ps at once; a ps that goes away is waited for and asked again."""
        requests: dict[int, Any] = {}
        self._calls.clear()
        for ps in self._servers:
            requests[ps] = build(ps)
            try:
                self._calls[ps] = self._clients[ps].start(method, requests[ps], sequenced=True)
            except PeerUnavailableError:
                self._calls[ps] = None
        self._corks.close()
        for ps, request in requests.items():
            while True:
                call = self._calls[ps]
                try:
                    if call is None:
                        raise PeerUnavailableError("not connected")
                    finish(ps, call)
                    break
                except StaleStoreError:
                    raise RolledBack from None
                except PeerUnavailableError:
                    self._recover(ps, step_slice)
                    references[ps] = self._staging.restage(ps)
                    request.gradients.CopyFrom(references[ps])
                    self._calls[ps] = self._repeat(method, request, ps)

    def _repeat(self, method: str, request: Any, ps: int) -> PendingCall | None:
        client = self._clients[ps]
        try:
            return client.restart(method, request)
        except PeerUnavailableError:
            return None

    def _recover(self, ps: int, step_slice: StepSlice | None) -> None:
        self._reconnect(self._clients[ps])
        self._check_stores(step_slice)

    def _check_stores(self, step_slice: StepSlice | None) -> None:
        if step_slice is not None and self._store_epochs != self._epochs_now():
            raise RolledBack

    # -- what a request says -----------------------------------------------------------------------------------

    def _group_commits(self, ps: int) -> list[ps_pb2.GroupCommit]:
        hyper = self._hyper_parameters()
        commits = []
        for group in self._layout.groups:
            shards = self._layout.shards.get((group, ps))
            if not shards:
                continue
            present = [self._parameters[shard.variable].grad is not None for shard in shards]
            commits.append(
                ps_pb2.GroupCommit(
                    group=group,
                    present=b"" if all(present) else _bitmap(present),
                    hyper_parameters=hyper,
                    have=self._variables.have(group, ps),
                )
            )
        for table in self._tables:
            rows = table.link.placement.on(ps)
            if rows:
                present = [table.gradient() is not None] * len(rows)
                commits.append(
                    ps_pb2.GroupCommit(
                        group=table.link.group,
                        present=b"" if all(present) else _bitmap(present),
                        hyper_parameters=hyper,
                    )
                )
        return commits

    def _hyper_parameters(self) -> list[struct_pb2.Struct]:
        """One a param_group; made again only when a value has changed, because that takes a while."""
        values = [_hyper_values(self.optimizer, group) for group in self.optimizer.param_groups]
        if values != self._hyper[0]:
            structs = [struct_pb2.Struct() for _ in values]
            for struct, of_group in zip(structs, values, strict=True):
                struct.update(of_group)
            self._hyper = values, structs
        return self._hyper[1]

    def _slice_proto(self, step_slice: StepSlice) -> ps_pb2.StepSlice:
        return ps_pb2.StepSlice(
            step=step_slice.step,
            units=[unit_proto(unit) for unit in step_slice.units],
            weight=step_slice.weight,
            merge=ps_pb2.MEAN if self._policy.gradients == "mean" else ps_pb2.SUM,
        )

    def _waiting_text(self, step_slice: StepSlice | None) -> str:
        late = [ps for ps in self._servers if (call := self._calls.get(ps)) is None or not call.done]
        servers = ", ".join(self._clients[ps].task for ps in late or self._servers)
        return f"{servers} to apply " + (f"step {step_slice.step}" if step_slice else "its update")


def _surely_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether no element is NaN or Inf: it would be in the sum too. False when the sum overflows, or when a GPU
    would have to be waited for once a gradient."""
    total = 0.0
    for gradient in gradients:
        if gradient.device.type != "cpu":
            return False
        total += float(gradient.sum(dtype=torch.float32 if gradient.dtype.itemsize < 4 else None))
    return math.isfinite(total)


def _update_proto(update: Update) -> common_pb2.Update:
    return common_pb2.Update(units=[unit_proto(unit) for unit in update.units], ordinal=update.ordinal)


def _bitmap(bits: Sequence[bool]) -> bytes:
    value = sum(1 << index for index, bit in enumerate(bits) if bit)
    return value.to_bytes(-(-len(bits) // 8), "little")


def _hyper_values(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the optimizer as they stand in one param_group, without those that only concern this process."""
    values: dict[str, Any] = {}
    for name in optimizer.defaults:
        if name in _NOT_SENT:
            continue
        value = group[name]
        if isinstance(value, torch.Tensor):
            value = value.item()
        elif isinstance(value, tuple | list):
            value = [item.item() if isinstance(item, torch.Tensor) else item for item in value]
        if not isinstance(value, float | int | str | list | type(None)):
            raise ConfigurationError(
                f"expected a number, text or list for the hyper-parameter {name} of {type(optimizer).__name__}, "
                f"got {type(value).__name__}"
            )
        values[name] = value
    return values
