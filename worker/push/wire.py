"""What a worker asks of a ps: requests as messages, replies in the worker's own types. No decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from google.protobuf import struct_pb2

from stratagem.cluster.initial_rows import InitialRows
from stratagem.cluster.units import Unit, Update
from stratagem.rpc.codec import to_wire_dtype
from stratagem.rpc.fields import to_message
from stratagem.rpc.generated import common_pb2, ps_pb2
from stratagem.rpc.units import unit_to_proto, update_to_proto
from stratagem.worker.push.layout import RowShard, Shard
from stratagem.worker.push.ps_client import PendingCall, PsClient

Version = ps_pb2.Version
"""Of a shard group on one ps, as that ps tells it."""
GroupSpec = ps_pb2.GroupSpec
"""What one ps holds of a shard group."""
MAX_COMMITS = 1000
"""That one :class:`CommitMessage` makes of the same message of protobuf."""


class Transfer(NamedTuple):
    """Frames sent to one ps and named by a request."""

    transfer: int
    num_frames: int

    def to_proto(self) -> ps_pb2.TransferRef:
        return ps_pb2.TransferRef(transfer=self.transfer, num_frames=self.num_frames)


def shard_spec(
    variable: str,
    shape: Sequence[int],
    shard: Shard | RowShard,
    offset: int,
    param_group: int,
    initial: InitialRows | None = None,
) -> ps_pb2.ShardSpec:
    """A shard of a variable, at ``offset`` in the flat tensor of its group; ``initial``: of a table."""
    spec = to_message(ps_pb2.ShardSpec, shard, variable=variable, shape=shape, offset=offset, param_group=param_group)
    if initial is not None:
        spec.rows.distribution = ps_pb2.InitialRows.Distribution.Value(initial.distribution.upper())
        spec.rows.first, spec.rows.second, spec.rows.seed = initial.first, initial.second, initial.seed
        if initial.zero_row is not None:
            spec.rows.zero_row = initial.zero_row
    return spec


def group_spec(group: int, optimizer: str, dtype: torch.dtype, shards: Sequence[ps_pb2.ShardSpec]) -> GroupSpec:
    """The shards of a group on one ps."""
    spec = GroupSpec(group=group, optimizer=optimizer, shards=shards)
    spec.dtype = to_wire_dtype(dtype)  # type: ignore[assignment]  # an enum is an int on the wire
    return spec


def create_variables(
    client: PsClient, groups: Sequence[GroupSpec], can_initialize: bool
) -> Callable[[], ps_pb2.CreateVariablesReply]:
    """Tells one ps what it holds. What it returns waits for the reply, while which the ps makes the rows of tables."""
    request = ps_pb2.CreateVariablesRequest(groups=groups, can_initialize=can_initialize, num_ps=client.num_ps())
    return client.ask("CreateVariables", request)


def assign_values(
    client: PsClient,
    values: Transfer,
    groups: Sequence[int],
    slot: str = "",
    step_counts: Sequence[int] = (),
    scalars: Mapping[str, Any] | None = None,
) -> dict[int, Version]:
    """Gives groups the values that went before, or a slot of the optimizer; returns the versions that this makes."""
    request = ps_pb2.AssignValuesRequest(
        values=values.to_proto(), groups=groups, slot=slot, step_counts=step_counts, scalars=to_struct(scalars or {})
    )
    reply: ps_pb2.AssignValuesReply = client.call("AssignValues", request, sequenced=True)
    return versions_of(reply.versions)


def pull_weights(
    client: PsClient, have: Mapping[int, Version | None], wait_s: float = 0.0, slot: str = ""
) -> PendingCall:
    """Asks for groups newer than the versions that this process has, or for a slot of the optimizer."""
    wants = [ps_pb2.PullWeightsRequest.Want(group=group, have=version) for group, version in have.items()]
    request = ps_pb2.PullWeightsRequest(groups=wants, wait_s=wait_s, slot=slot, reply_transfer=client.new_transfer())
    return client.start("PullWeights", request)


def close_units(client: PsClient, closes: Sequence[tuple[Unit, int]]) -> None:
    """Tells a ps that units are complete on this worker, and how many of their updates it acknowledged."""
    told = [ps_pb2.UnitClose(unit=unit_to_proto(unit), num_updates=num_updates) for unit, num_updates in closes]
    client.call("CloseUnits", ps_pb2.CloseUnitsRequest(closes=told))


def step_slice(
    step: int, units: Sequence[Unit], weight: float, is_set: bool, gradients: Literal["mean", "sum"]
) -> ps_pb2.StepSlice:
    """Staleness 0: the step of the job that an update belongs to."""
    merge = ps_pb2.MEAN if gradients == "mean" else ps_pb2.SUM
    planned = [unit_to_proto(unit) for unit in units]
    return ps_pb2.StepSlice(step=step, units=planned, weight=weight, is_set=is_set, merge=merge)


def group_commit(
    group: int, present: Sequence[bool], hyper: Sequence[struct_pb2.Struct], have: Version | None = None
) -> ps_pb2.GroupCommit:
    """One optimizer step for one group; ``present``: which of its shards have a gradient."""
    bits = sum(1 << index for index, bit in enumerate(present) if bit)
    return ps_pb2.GroupCommit(
        group=group,
        present=b"" if all(present) else bits.to_bytes(-(-len(present) // 8), "little"),
        hyper_parameters=hyper,
        have=have,
    )


def prepare_update(
    update: Update,
    gradients: Transfer,
    groups: Sequence[ps_pb2.GroupCommit],
    of_step: ps_pb2.StepSlice,
    want_facts: bool,
) -> ps_pb2.PrepareUpdateRequest:
    return ps_pb2.PrepareUpdateRequest(
        update=update_to_proto(update),
        gradients=gradients.to_proto(),
        groups=groups,
        slice=of_step,
        want_facts=want_facts,
    )


class CommitMessage:
    """The commits to one ps as one message, which keeps what has not changed since the step before.

    What is taken out of a message of protobuf keeps its memory as long as that message lives: another one follows after
    :data:`MAX_COMMITS`.
    """

    def __init__(self) -> None:
        self._message = ps_pb2.CommitUpdateRequest()
        self._num_commits = 0
        self._groups: tuple[object, object] = None, None
        self._commits: list[tuple[int, ps_pb2.GroupCommit]] = []

    def set_groups(
        self,
        given: Sequence[bool],
        hyper: Sequence[struct_pb2.Struct],
        make: Callable[[], Sequence[ps_pb2.GroupCommit]],
    ) -> None:
        """Groups, their presence and hyper-parameters. They are made anew (``make``) where what presence follows from
        (``given``), or ``hyper``, is another object."""
        if self._groups[0] != given or self._groups[1] is not hyper or self._num_commits == MAX_COMMITS:
            self._message, self._num_commits = ps_pb2.CommitUpdateRequest(groups=make()), 0
            self._commits = [(commit.group, commit) for commit in self._message.groups]
            self._groups = given, hyper

    def set_versions(self, have: Mapping[int, Version]) -> None:
        """Versions that this process has, by group."""
        for group, commit in self._commits:
            version = have.get(group)
            if version is None:
                commit.ClearField("have")
            else:
                commit.have.epoch, commit.have.counter = version.epoch, version.counter

    def commit(
        self,
        update: common_pb2.Update,
        gradients: Transfer,
        of_step: ps_pb2.StepSlice | None,
        scale: float | None,
        closes: Sequence[tuple[Unit, int]],
        reply_transfer: int,
        num_servers: int,
    ) -> ps_pb2.CommitUpdateRequest:
        """An update, its gradients multiplied by ``scale``; None: it counts as done and is not applied."""
        message = self._message
        self._num_commits += 1
        message.update.CopyFrom(update)
        message.gradients.transfer, message.gradients.num_frames = gradients
        if of_step is None:
            message.ClearField("slice")
        else:
            message.slice.CopyFrom(of_step)
        message.action = ps_pb2.SKIP if scale is None else ps_pb2.APPLY
        message.scale = 1.0 if scale is None else scale
        del message.closes[:]
        for unit, num_updates in closes:
            close = message.closes.add()
            close.num_updates = num_updates
            close.unit.dataset, close.unit.epoch, close.unit.index = unit
        message.reply_transfer, message.num_servers = reply_transfer, num_servers
        return message


def versions_of(replied: Iterable[Any]) -> dict[int, Version]:
    """The groups' versions, as a reply has them."""
    return {each.group: each.version for each in replied}


def num_made(replied: Iterable[Any], default: int = 0) -> int:
    """Updates of these groups that the job has applied or skipped, whoever sent them."""
    return max((each.num_updates + each.num_skipped for each in replied), default=default)


def scalars_of(reply: Any) -> dict[str, list[float]]:
    """The optimizer's numbers in the reply to a pull: of each a value for each shard."""
    found = reply.scalars.fields.items()
    return {name: [value.number_value for value in values.list_value.values] for name, values in found}


def to_struct(values: Mapping[str, Any]) -> struct_pb2.Struct:
    """Hyper-parameters or numbers by name."""
    struct = struct_pb2.Struct()
    struct.update(dict(values))
    return struct
