"""Protobuf messages to requests and results to protobuf messages. No decisions."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf import struct_pb2

from stratagem.checkpoint.manifest import SavedFile
from stratagem.cluster.units import Unit, UnitBitmap, Update
from stratagem.errors import FrameError, ProtocolError, VariableError
from stratagem.ps.checkpointing import StoreDescription
from stratagem.ps.requests import (
    AssignValues,
    CommitResult,
    CommitUpdate,
    Facts,
    Family,
    GroupCommit,
    GroupVersion,
    Merge,
    PrepareUpdate,
    PullResult,
    PullWeights,
    Purpose,
    RequestedSlice,
    Sender,
    TransferRef,
    UpdateAction,
    Version,
)
from stratagem.ps.row_values import Distribution, InitialRows
from stratagem.ps.specs import GroupSpec, ShardSpec
from stratagem.ps.units import Epoch, UnitClose
from stratagem.rpc.codec import from_wire_dtype
from stratagem.rpc.generated import common_pb2, lane_pb2, ps_pb2

_FAMILIES: dict[int, Family] = {lane_pb2.TCP: "tcp", lane_pb2.SHM: "shm"}
_DISTRIBUTIONS: dict[int, Distribution] = {
    ps_pb2.InitialRows.NORMAL: "normal",
    ps_pb2.InitialRows.UNIFORM: "uniform",
    ps_pb2.InitialRows.CONSTANT: "constant",
    ps_pb2.InitialRows.ASSIGNED: "assigned",
}
_PURPOSES: dict[str, Purpose] = {"up": "up", "down": "down"}
_ACTIONS = {ps_pb2.APPLY: UpdateAction.APPLY, ps_pb2.SKIP: UpdateAction.SKIP}
_MERGES = {ps_pb2.MEAN: Merge.MEAN, ps_pb2.SUM: Merge.SUM}


def sender_from(message: common_pb2.Sender) -> Sender:
    """Who sends."""
    if not message.task or not message.incarnation:
        raise ProtocolError("a request must name its sender: task id and incarnation")
    return Sender(message.task, message.incarnation, message.sequence)


def lane_from(message: lane_pb2.OpenLaneRequest) -> tuple[Family, Purpose]:
    """Which lane is asked for, and which direction of it."""
    family = _FAMILIES.get(message.kind)
    if family is None or message.purpose not in _PURPOSES:
        raise ProtocolError(f"expected a tcp or shm lane, up or down; got kind {message.kind}, {message.purpose!r}")
    return family, _PURPOSES[message.purpose]


def sender_of_lane(metadata: Iterable[tuple[str, Any]]) -> Sender:
    """Who opens a Transfer stream, from its metadata."""
    named = dict(metadata)
    task, incarnation = named.get("stratagem-task", ""), named.get("stratagem-incarnation", "")
    if not task or not str(incarnation).isdecimal():
        raise ProtocolError("a Transfer stream must name its sender in stratagem-task and stratagem-incarnation")
    return Sender(str(task), int(incarnation))


def unit_from(message: common_pb2.Unit) -> Unit:
    """A unit."""
    return Unit(message.dataset, message.epoch, message.index)


def update_from(message: common_pb2.Update) -> Update:
    """An update."""
    return Update(tuple(unit_from(unit) for unit in message.units), message.ordinal)


def closes_from(messages: Iterable[ps_pb2.UnitClose]) -> tuple[UnitClose, ...]:
    """Units to close."""
    return tuple(UnitClose(unit_from(close.unit), close.num_updates) for close in messages)


def unit_sets_from(messages: Iterable[common_pb2.UnitSet]) -> dict[Epoch, UnitBitmap]:
    """Bitmaps by (dataset, epoch)."""
    return {(message.dataset, message.epoch): UnitBitmap(message.bitmap) for message in messages}


def group_spec_from(message: ps_pb2.GroupSpec) -> GroupSpec:
    """A shard group."""
    shards = tuple(
        ShardSpec(shard.variable, tuple(shard.shape), shard.first_row, shard.num_rows, shard.offset, shard.param_group)
        for shard in message.shards
    )
    try:
        dtype = from_wire_dtype(message.dtype)
    except FrameError as error:
        raise VariableError(f"group {message.group}: {error}") from None
    rows = _initial_rows(message.rows) if message.HasField("rows") else None
    return GroupSpec(message.group, message.optimizer, dtype, shards, rows)


def _initial_rows(message: ps_pb2.InitialRows) -> InitialRows:
    distribution = _DISTRIBUTIONS.get(message.distribution)
    if distribution is None:
        raise ProtocolError(f"expected NORMAL, UNIFORM, CONSTANT or ASSIGNED initial rows, got {message.distribution}")
    zero_row = message.zero_row if message.HasField("zero_row") else None
    return InitialRows(distribution, message.first, message.second, message.seed, zero_row)


def assign_from(message: ps_pb2.AssignValuesRequest) -> AssignValues:
    """An assignment."""
    return AssignValues(
        sender_from(message.sender),
        _transfer(message.values),
        tuple(message.groups),
        message.slot,
        tuple(message.step_counts),
        {name: _numbers(name, values) for name, values in plain(message.scalars).items()},
    )


def prepare_from(message: ps_pb2.PrepareUpdateRequest) -> PrepareUpdate:
    """First half of an update."""
    return PrepareUpdate(
        sender_from(message.sender),
        update_from(message.update),
        _transfer(message.gradients),
        _group_commits(message.groups),
        _slice(message.slice) if message.HasField("slice") else None,
        message.want_facts,
    )


def commit_from(message: ps_pb2.CommitUpdateRequest) -> CommitUpdate:
    """An update."""
    if message.action not in _ACTIONS:
        raise ProtocolError(f"expected action APPLY or SKIP, got {message.action}")
    return CommitUpdate(
        sender_from(message.sender),
        update_from(message.update),
        _transfer(message.gradients),
        _group_commits(message.groups),
        message.reply_transfer,
        _slice(message.slice) if message.HasField("slice") else None,
        _ACTIONS[message.action],
        message.scale,
        closes_from(message.closes),
        message.num_servers,
    )


def pull_from(message: ps_pb2.PullWeightsRequest) -> PullWeights:
    """A pull."""
    wants = tuple((want.group, _version(want.have) if want.HasField("have") else None) for want in message.groups)
    return PullWeights(sender_from(message.sender), wants, message.reply_transfer, message.slot, message.wait_s)


def plain(struct: struct_pb2.Struct) -> dict[str, Any]:
    """A Struct as JSON values."""
    return {name: _plain_value(value) for name, value in struct.fields.items()}


def facts_to(facts: Facts) -> ps_pb2.PrepareUpdateReply:
    """Facts about a gradient."""
    return ps_pb2.PrepareUpdateReply(squared_norm=facts.squared_norm, finite=facts.finite, not_finite=facts.not_finite)


def commit_to(result: CommitResult) -> ps_pb2.CommitUpdateReply:
    """Outcome of a commit."""
    return ps_pb2.CommitUpdateReply(
        applied=result.applied, versions=versions_to(result.versions), left_out=result.left_out
    )


def pull_to(result: PullResult) -> ps_pb2.PullWeightsReply:
    """Outcome of a pull."""
    scalars = struct_pb2.Struct()
    scalars.update({name: list(values) for name, values in result.scalars.items()})
    return ps_pb2.PullWeightsReply(
        versions=versions_to(result.versions), slots=result.slots, step_counts=result.step_counts, scalars=scalars
    )


def versions_to(versions: Iterable[GroupVersion]) -> list[ps_pb2.GroupVersion]:
    """Versions, and the frames that bring them."""
    return [
        ps_pb2.GroupVersion(
            group=one.group,
            version=ps_pb2.Version(store_epoch=one.version.store_epoch, counter=one.version.counter),
            num_frames=one.num_frames,
            num_updates=one.num_updates,
        )
        for one in versions
    ]


def description_to(description: StoreDescription) -> ps_pb2.DescribeUnitsReply:
    """What a ps has applied."""
    closed = [
        common_pb2.UnitSet(dataset=dataset, epoch=epoch, bitmap=bitmap.to_bytes())
        for (dataset, epoch), bitmap in sorted(description.units.closed.items())
    ]
    return ps_pb2.DescribeUnitsReply(
        closed=closed,
        open=[
            ps_pb2.AppliedUpdate(update=_update_to(update), num_servers=num_servers)
            for update, num_servers in description.units.open
        ],
        store_epoch=description.store_epoch,
        step=description.step,
        initialized=description.initialized,
    )


def saved_to(files: Iterable[SavedFile], step: int) -> ps_pb2.SaveShardsReply:
    """Files of a snapshot."""
    saved = [ps_pb2.SavedFile(name=file.name, bytes=file.num_bytes, sha256=file.sha256) for file in files]
    return ps_pb2.SaveShardsReply(files=saved, step=step)


def _update_to(update: Update) -> common_pb2.Update:
    units = [common_pb2.Unit(dataset=unit.dataset, epoch=unit.epoch, index=unit.index) for unit in update.units]
    return common_pb2.Update(units=units, ordinal=update.ordinal)


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        raise ProtocolError(f"expected a list of numbers for {name!r}, got {values!r}")
    return tuple(map(float, values))


def _transfer(message: ps_pb2.TransferRef) -> TransferRef:
    return TransferRef(message.transfer, message.num_frames)


def _version(message: ps_pb2.Version) -> Version:
    return Version(message.store_epoch, message.counter)


def _group_commits(messages: Iterable[ps_pb2.GroupCommit]) -> tuple[GroupCommit, ...]:
    return tuple(
        GroupCommit(
            message.group,
            message.present,
            tuple(_known(hyper.SerializeToString(deterministic=True)) for hyper in message.hyper_parameters),
            _version(message.have) if message.HasField("have") else None,
        )
        for message in messages
    )


@functools.lru_cache(maxsize=256)
def _known(struct: bytes) -> Mapping[str, Any]:
    """The hyper-parameters of a message: mostly those of the step before, and taking a Struct apart takes a while."""
    return MappingProxyType(plain(struct_pb2.Struct.FromString(struct)))


def _slice(message: ps_pb2.StepSlice) -> RequestedSlice:
    units = tuple(unit_from(unit) for unit in message.units)
    if message.merge not in _MERGES:
        raise ProtocolError(f"expected merge MEAN or SUM, got {message.merge}")
    return RequestedSlice(message.step, units, message.weight, _MERGES[message.merge])


def _plain_value(value: struct_pb2.Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return [_plain_value(item) for item in value.list_value.values]
    if kind == "struct_value":
        return plain(value.struct_value)
    return None if kind in (None, "null_value") else getattr(value, kind)
