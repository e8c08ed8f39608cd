"""The chief's stubs to the ps: domain values in and out, deadlines on every call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc.aio

from stratagem.checkpoint.manifest import SavedFile
from stratagem.chief import wire
from stratagem.chief.leasing.steps import StepClosing
from stratagem.chief.servers.servers import CommittedSlice, SavedShards, ServerDescription
from stratagem.cluster.incarnation import Incarnation
from stratagem.cluster.units import UnitBitmap, Update
from stratagem.errors import PeerUnavailableError
from stratagem.rpc.channels import connect_aio
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.fields import from_message
from stratagem.rpc.generated import common_pb2, ps_pb2, ps_pb2_grpc
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.units import unit_from_proto, unit_sets_to_proto, unit_to_proto, update_to_proto

CALL_TIMEOUT_S = 5.0
"""For calls that only change a few words of state; the caller repeats them while the ps is alive."""
DISK_TIMEOUT_S = 600.0
"""For calls that read or write all shards; a dead ps is noticed by keepalive long before."""


class ChiefPsClient:
    """One ps, at ``address``, for a process (``chief_epoch``) of ``chief``, over gRPC. Implements
    :class:`stratagem.chief.servers.servers.Server`."""

    def __init__(
        self, incarnation: Incarnation, address: str, *, chief: str, chief_epoch: int, security: Security = OPEN
    ) -> None:
        self.incarnation = incarnation
        self._sender = common_pb2.Sender(task=chief, incarnation=chief_epoch)
        self._address = address
        self._security = security
        self._certificates = security.certificates()
        self._closed = False
        self._channels: list[grpc.aio.Channel] = []
        self._stub: Any
        self._connect()

    async def fence(self, incarnation: Incarnation) -> list[CommittedSlice]:
        request = ps_pb2.FenceRequest(sender=self._sender, task=incarnation.task, incarnation=incarnation.number)
        reply: ps_pb2.FenceReply = await self._call("Fence", request)
        return [CommittedSlice(each.step, unit_from_proto(each.unit), each.ordinal) for each in reply.committed]

    async def close_step(self, closing: StepClosing) -> None:
        request = ps_pb2.CloseStepRequest(
            sender=self._sender,
            step=closing.step,
            included=[unit_to_proto(unit) for unit in closing.included],
            committed=[update_to_proto(Update((unit,), ordinal)) for unit, ordinal in closing.committed],
        )
        await self._call("CloseStep", request)

    async def describe_units(self) -> ServerDescription:
        request = ps_pb2.DescribeUnitsRequest(sender=self._sender)
        return wire.description_from_proto(await self._call("DescribeUnits", request))

    async def hold_commits(self, token: int, hold_s: float) -> ServerDescription:
        request = ps_pb2.HoldCommitsRequest(sender=self._sender, token=token, hold_s=hold_s)
        return wire.description_from_proto(await self._call("HoldCommits", request, CALL_TIMEOUT_S + hold_s))

    async def admit_updates(self, token: int, updates: Sequence[Update], wait_s: float) -> bool:
        request = ps_pb2.AdmitUpdatesRequest(
            sender=self._sender, token=token, updates=[update_to_proto(u) for u in updates], wait_s=wait_s
        )
        reply: ps_pb2.AdmitUpdatesReply = await self._call("AdmitUpdates", request, CALL_TIMEOUT_S + wait_s)
        return reply.complete

    async def save_shards(self, token: int, directory: str, nonce: str) -> SavedShards:
        request = ps_pb2.SaveShardsRequest(sender=self._sender, token=token, directory=directory, nonce=nonce)
        reply: ps_pb2.SaveShardsReply = await self._call("SaveShards", request, DISK_TIMEOUT_S)
        return SavedShards(tuple(from_message(SavedFile, file) for file in reply.files), reply.step)

    async def release_commits(self, token: int) -> None:
        await self._call("ReleaseCommits", ps_pb2.ReleaseCommitsRequest(sender=self._sender, token=token))

    async def restore_shards(self, directory: str, num_ps: int, *, is_fresh: bool = False) -> None:
        request = ps_pb2.RestoreShardsRequest(
            sender=self._sender, directory=directory, num_ps=num_ps, is_fresh=is_fresh
        )
        await self._call("RestoreShards", request, DISK_TIMEOUT_S)

    async def mark_lost(self, units: Mapping[tuple[int, int], UnitBitmap]) -> None:
        await self._call("MarkLost", ps_pb2.MarkLostRequest(sender=self._sender, units=unit_sets_to_proto(units)))

    async def take_over(self, holder: Incarnation, address: str, of: Incarnation) -> str:
        request = ps_pb2.TakeOverRequest(
            sender=self._sender,
            asked=common_pb2.Sender(task=self.incarnation.task, incarnation=self.incarnation.number),
            holder=holder.task,
            address=address,
            incarnation=of.number,
        )
        reply: ps_pb2.TakeOverReply = await self._call("TakeOver", request, DISK_TIMEOUT_S)
        return reply.refusal

    async def close(self) -> None:
        self._closed = True
        for channel in self._channels:
            await channel.close(None)

    async def _call(self, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        self._check_open()
        if (found := self._security.certificates()) != self._certificates:
            self._certificates = found
            self._connect()
        try:
            return await getattr(self._stub, method)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.incarnation.task) from None
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or not caller.cancelling():
                self._check_open()  # close() has cancelled the call, and nobody who made it
            raise

    def _check_open(self) -> None:
        """gRPC has no error of ours for a closed channel, and whoever lets go of a hold calls everybody."""
        if self._closed:
            raise PeerUnavailableError(f"{self.incarnation} is gone") from None

    def _connect(self) -> None:
        """A channel keeps the certificate it was made with: when that was renewed, later calls go over another one."""
        self._channels.append(connect_aio(self._address, self.incarnation.task, self._security))
        self._stub = ps_pb2_grpc.ParameterServerStub(self._channels[-1])
