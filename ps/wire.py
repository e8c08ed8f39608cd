"""Protobuf messages to requests and results to protobuf messages. No decisions."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf import struct_pb2

from stratagem.cluster.initial_rows import Distribution, InitialRows
from stratagem.cluster.task import TaskId
from stratagem.cluster.units import Update
from stratagem.errors import FrameError, ProtocolError, VariableError
from stratagem.ps import requests, snapshot
from stratagem.ps.checkpointing import StoreDescription
from stratagem.ps.copies import StoreImage
from stratagem.ps.specs import GroupSpec, ShardSpec
from stratagem.ps.units import UnitClose
from stratagem.rpc.codec import from_wire_dtype
from stratagem.rpc.fields import from_message, to_message
from stratagem.rpc.generated import common_pb2, lane_pb2, ps_pb2
from stratagem.rpc.units import unit_from_proto, unit_sets_to_proto, update_from_proto, update_to_proto

_FAMILIES: dict[int, requests.Family] = {lane_pb2.TCP: "tcp", lane_pb2.SHM: "shm"}
_DISTRIBUTIONS: dict[int, Distribution] = {
    ps_pb2.InitialRows.NORMAL: "normal",
    ps_pb2.InitialRows.UNIFORM: "uniform",
    ps_pb2.InitialRows.CONSTANT: "constant",
    ps_pb2.InitialRows.ASSIGNED: "assigned",
}
_PURPOSES: dict[str, requests.Purpose] = {"up": "up", "down": "down"}
_ACTIONS = {ps_pb2.APPLY: requests.UpdateAction.APPLY, ps_pb2.SKIP: requests.UpdateAction.SKIP}
_MERGES = {ps_pb2.MEAN: requests.Merge.MEAN, ps_pb2.SUM: requests.Merge.SUM}


def sender_from(message: common_pb2.Sender) -> requests.Sender:
    if not message.task or not message.incarnation:
        raise ProtocolError("a request must name its sender: task id and incarnation")
    return requests.Sender(message.task, message.incarnation, message.sequence)


def lane_from(message: lane_pb2.OpenLaneRequest) -> tuple[requests.Family, requests.Purpose]:
    """Which lane is asked for, and which direction of it."""
    family = _FAMILIES.get(message.kind)
    if family is None or message.purpose not in _PURPOSES:
        raise ProtocolError(f"expected a tcp or shm lane, up or down; got kind {message.kind}, {message.purpose!r}")
    return family, _PURPOSES[message.purpose]


def sender_of_lane(metadata: Iterable[tuple[str, Any]]) -> requests.Sender:
    """Who opens a Transfer stream, from its metadata."""
    named = dict(metadata)
    task, incarnation = named.get("stratagem-task", ""), named.get("stratagem-incarnation", "")
    if not task or not str(incarnation).isdecimal():
        raise ProtocolError("a Transfer stream must name its sender in stratagem-task and stratagem-incarnation")
    return requests.Sender(str(task), int(incarnation))


def closes_from(messages: Iterable[ps_pb2.UnitClose]) -> tuple[UnitClose, ...]:
    return tuple([UnitClose(unit_from_proto(close.unit), close.num_updates) for close in messages])


def group_spec_from(message: ps_pb2.GroupSpec) -> GroupSpec:
    shards = tuple(
        from_message(ShardSpec, shard, rows=_initial_rows(shard.rows) if shard.HasField("rows") else None)
        for shard in message.shards
    )
    try:
        dtype = from_wire_dtype(message.dtype)
    except FrameError as error:
        raise VariableError(f"group {message.group}: {error}") from None
    return GroupSpec(message.group, message.optimizer, dtype, shards)


def _initial_rows(message: ps_pb2.InitialRows) -> InitialRows:
    distribution = _DISTRIBUTIONS.get(message.distribution)
    if distribution is None:
        raise ProtocolError(f"expected NORMAL, UNIFORM, CONSTANT or ASSIGNED initial rows, got {message.distribution}")
    zero_row = message.zero_row if message.HasField("zero_row") else None
    return InitialRows(distribution, message.first, message.second, message.seed, zero_row)


def assign_from(message: ps_pb2.AssignValuesRequest) -> requests.AssignValues:
    sender, values = sender_from(message.sender), _transfer(message.values)
    scalars = {name: _numbers(name, numbers) for name, numbers in plain(message.scalars).items()}
    return from_message(requests.AssignValues, message, sender=sender, values=values, scalars=scalars)


def prepare_from(message: ps_pb2.PrepareUpdateRequest) -> requests.PrepareUpdate:
    return requests.PrepareUpdate(
        sender_from(message.sender),
        update_from_proto(message.update),
        _transfer(message.gradients),
        _group_commits(message.groups),
        _slice(message.slice) if message.HasField("slice") else None,
        message.want_facts,
    )


def commit_from(message: ps_pb2.CommitUpdateRequest) -> requests.CommitUpdate:
    if message.action not in _ACTIONS:
        raise ProtocolError(f"expected action APPLY or SKIP, got {message.action}")
    return requests.CommitUpdate(
        sender_from(message.sender),
        update_from_proto(message.update),
        _transfer(message.gradients),
        _group_commits(message.groups),
        message.reply_transfer,
        _slice(message.slice) if message.HasField("slice") else None,
        _ACTIONS[message.action],
        message.scale,
        closes_from(message.closes),
        message.num_servers,
        message.SerializeToString,
    )


def closing_from(message: ps_pb2.CloseUnitsRequest) -> requests.CommitUpdate:
    """An update of nothing that closes units."""
    sender, closes = sender_from(message.sender), closes_from(message.closes)
    return requests.CommitUpdate(
        sender, Update((), 0), requests.TransferRef(0, 0), (), 0, action=requests.UpdateAction.SKIP, closes=closes
    )


def pull_from(message: ps_pb2.PullWeightsRequest) -> requests.PullWeights:
    """The groups that are wanted, each with the version that the worker has already."""
    wants = tuple((want.group, _version(want.have) if want.HasField("have") else None) for want in message.groups)
    return requests.PullWeights(
        sender_from(message.sender), wants, message.reply_transfer, message.slot, message.wait_s
    )


def plain(struct: struct_pb2.Struct) -> dict[str, Any]:
    """A Struct as JSON values."""
    return {name: _plain_value(value) for name, value in struct.fields.items()}


def commit_to(result: requests.CommitResult) -> ps_pb2.CommitUpdateReply:
    reply = ps_pb2.CommitUpdateReply(applied=result.applied, left_out=result.left_out)
    add_versions(reply.versions, result.versions)
    return reply


def pull_to(result: requests.PullResult) -> ps_pb2.PullWeightsReply:
    scalars = struct_pb2.Struct()
    scalars.update({name: list(values) for name, values in result.scalars.items()})
    reply = ps_pb2.PullWeightsReply(slots=result.slots, step_counts=result.step_counts, scalars=scalars)
    add_versions(reply.versions, result.versions)
    return reply


def add_versions(target: Any, versions: Iterable[requests.GroupVersion]) -> None:
    """Versions, and the frames that bring them, into a repeated field. Keyword arguments, and messages that are copied,
    cost twice as much."""
    for group, version, num_frames, num_updates, num_skipped in versions:
        message = target.add()
        message.group, message.num_frames, message.num_updates = group, num_frames, num_updates
        message.num_skipped = num_skipped
        message.version.epoch, message.version.counter = version


def description_to(description: StoreDescription) -> ps_pb2.DescribeUnitsReply:
    opened = [
        ps_pb2.AppliedUpdate(update=update_to_proto(update), num_servers=num_servers)
        for update, num_servers in description.units.open
    ]
    units = {
        "closed": unit_sets_to_proto(description.units.closed),
        "halves": unit_sets_to_proto(description.units.halves),
        "dropped": unit_sets_to_proto(description.units.dropped),
    }
    accumulates = description.units.accumulates
    return to_message(ps_pb2.DescribeUnitsReply, description, open=opened, accumulates=accumulates, **units)


def image_to(image: StoreImage) -> ps_pb2.FollowReply:
    """What a store holds, without the tensors."""
    described = snapshot.describe(TaskId.parse(image.source.task).index, image.content)
    return ps_pb2.FollowReply(
        server=to_message(common_pb2.Sender, image.source),
        state=json.dumps(described, separators=(",", ":")).encode(),
        done=[to_message(common_pb2.Sender, one) for one in image.done],
        number=image.number,
    )


def image_from(message: ps_pb2.FollowReply) -> StoreImage:
    """The same; the elements of its tensors are yet to be read. ``ProtocolError``: it is none."""
    try:
        content = snapshot.without_values(json.loads(message.state))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ProtocolError(f"expected what {message.server.task} holds, got something else: {error!r}") from None
    done = tuple(requests.Sender(one.task, one.incarnation, one.sequence) for one in message.done)
    return StoreImage(sender_from(message.server), content, done, message.number)


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        raise ProtocolError(f"expected a list of numbers for {name!r}, got {values!r}")
    return tuple(map(float, values))


def _transfer(message: ps_pb2.TransferRef) -> requests.TransferRef:
    return requests.TransferRef(message.transfer, message.num_frames)


def _version(message: ps_pb2.Version) -> requests.Version:
    return requests.Version(message.epoch, message.counter)


def _group_commits(messages: Iterable[ps_pb2.GroupCommit]) -> tuple[requests.GroupCommit, ...]:
    return tuple(
        [
            requests.GroupCommit(
                message.group,
                message.present,
                tuple([_known(hyper.SerializeToString()) for hyper in message.hyper_parameters]),
                _version(message.have) if message.HasField("have") else None,
            )
            for message in messages
        ]
    )


@functools.lru_cache(maxsize=256)
def _known(struct: bytes) -> Mapping[str, Any]:
    """The hyper-parameters of a message: mostly those of the step before, and taking a Struct apart takes a while."""
    return MappingProxyType(plain(struct_pb2.Struct.FromString(struct)))


def _slice(message: ps_pb2.StepSlice) -> requests.RequestedSlice:
    units = tuple(unit_from_proto(unit) for unit in message.units)
    if message.merge not in _MERGES:
        raise ProtocolError(f"expected merge MEAN or SUM, got {message.merge}")
    return requests.RequestedSlice(message.step, units, message.weight, _MERGES[message.merge], message.is_set)


def _plain_value(value: struct_pb2.Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return [_plain_value(item) for item in value.list_value.values]
    if kind == "struct_value":
        return plain(value.struct_value)
    return None if kind in (None, "null_value") else getattr(value, kind)
