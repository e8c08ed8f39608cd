"""The ps, as the chief calls them: domain values in and out, a deadline on every call; one of them, or all together."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import grpc.aio

from stratagem.checkpoint.durable import Patience
from stratagem.checkpoint.manifest import SavedFile
from stratagem.chief.leasing.positions import Positions, has, plus
from stratagem.chief.leasing.steps import StepClosing
from stratagem.chief.membership.sessions import Sessions
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Unit, UnitBitmap, Update, positions_of
from stratagem.errors import PeerUnavailableError, UnreadableError
from stratagem.rpc.channels import connect_aio
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.fields import from_message
from stratagem.rpc.generated import common_pb2, ps_pb2, ps_pb2_grpc
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.units import (
    unit_from_proto,
    unit_sets_from_proto,
    unit_sets_to_proto,
    unit_to_proto,
    update_from_proto,
    update_to_proto,
)

logger = logging.getLogger(__name__)

RETRY_S = 0.1
"""Pause before a call to a ps that did not answer is made again."""
CALL_TIMEOUT_S = 5.0
"""For calls that only change a few words of state; the caller repeats them while the ps is alive."""
READ_AGAIN_S = 30.0
"""For so long a disk that cannot be read is tried again: less than workers wait for a ps."""
DISK_TIMEOUT_S = 600.0
"""For calls that read or write all shards; a dead ps is noticed by keepalive long before."""

_Result = TypeVar("_Result")


async def read_patiently(read: Callable[[], Awaitable[_Result]]) -> _Result:
    """What ``read`` gives; it is called again where the disk does not answer. UnreadableError: for too long."""
    patience = Patience(READ_AGAIN_S)
    while True:
        try:
            return await read()
        except UnreadableError as error:
            patience.bear(error)
            await asyncio.sleep(RETRY_S)


@dataclasses.dataclass(frozen=True)
class CommittedSlice:
    """A slice of a synchronous step that its worker has committed."""

    step: int
    unit: Unit
    ordinal: int


@dataclasses.dataclass(frozen=True)
class ServerDescription:
    """What a ps has applied."""

    closed: Mapping[tuple[int, int], UnitBitmap] = dataclasses.field(default_factory=dict)
    """Closed units of each (dataset, epoch)."""
    open: Mapping[Update, int] = dataclasses.field(default_factory=dict)
    """Updates applied of units that are not closed, with the number of ps that take part in each."""
    halves: Mapping[tuple[int, int], UnitBitmap] = dataclasses.field(default_factory=dict)
    """Units not closed that have fewer updates here than closed ones had, or than their workers count."""
    store_epoch: int = 0
    step: int = 0
    """Largest number of updates applied to any group."""
    num_updates: int = 0
    """Of all groups together."""
    initialized: bool = False
    """The ps holds variables with values."""
    complete: bool = False
    """It knows what it is to hold, perhaps nothing, and all of that has values."""
    origin_elements: int = 0
    """Where it began from a checkpoint of another number of ps: elements of the variables in that."""
    taken_elements: int = 0
    """Of these: what it holds by now."""
    groups: Sequence[int] = ()
    """Shard groups that have values here; a model that is prepared adds some."""
    untrained: bool = False
    """No optimizer changes any of these: no update has a part here."""
    accumulates: bool = False
    """An update of several units has come."""
    dropped: Mapping[tuple[int, int], UnitBitmap] = dataclasses.field(default_factory=dict)
    """Units not closed that lack an update over several here, which was applied for others of these already."""

    @property
    def holds_rows(self) -> bool:
        """Whether there are rows of a variable here, as far as workers have said."""
        return self.initialized and (not self.origin_elements or self.taken_elements > 0)

    @property
    def has_part(self) -> bool:
        """Whether updates change anything here."""
        return self.holds_rows and not self.untrained

    def has_closed(self, unit: Unit) -> bool:
        return has(self.closed, unit)

    def ordinals(self, unit: Unit) -> list[int]:
        """Ordinals of the updates of an open unit that are applied here; [0] for a closed unit."""
        if self.has_closed(unit):
            return [0]
        return sorted(update.ordinal for update in self.open if unit in update.units)

    def applied(self) -> Positions:
        """Units with at least one update here."""
        return plus(self.closed, positions_of(unit for update in self.open for unit in update.units))

    def has(self, update: Update) -> bool:
        return update in self.open or (bool(update.units) and all(self.has_closed(unit) for unit in update.units))


@dataclasses.dataclass(frozen=True)
class SavedShards:
    """What one ps wrote into a checkpoint."""

    files: tuple[SavedFile, ...]
    step: int


class Server:
    """A ps at ``address``, as called by a process (``chief_epoch``) of ``chief``. Any call may be repeated without
    harm.

    All raise ``PeerUnavailableError`` when the ps does not answer in time.
    """

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
        """Makes the ps refuse it; what it had committed of steps still incomplete there."""
        request = ps_pb2.FenceRequest(task=incarnation.task, incarnation=incarnation.number)
        reply: ps_pb2.FenceReply = await self._call("Fence", request)
        return [CommittedSlice(each.step, unit_from_proto(each.unit), each.ordinal) for each in reply.committed]

    async def close_step(self, closing: StepClosing) -> None:
        request = ps_pb2.CloseStepRequest(
            step=closing.step,
            included=[unit_to_proto(unit) for unit in closing.included],
            committed=[update_to_proto(Update((unit,), ordinal)) for unit, ordinal in closing.committed],
        )
        await self._call("CloseStep", request)

    async def describe_units(self) -> ServerDescription:
        return _description(await self._call("DescribeUnits", ps_pb2.DescribeUnitsRequest()))

    async def hold_commits(self, token: int, hold_s: float) -> ServerDescription:
        """Stops commits for at most ``hold_s`` seconds; what is applied then."""
        request = ps_pb2.HoldCommitsRequest(token=token, hold_s=hold_s)
        return _description(await self._call("HoldCommits", request, CALL_TIMEOUT_S + hold_s))

    async def admit_updates(self, token: int, updates: Sequence[Update], wait_s: float) -> bool:
        """Lets updates through the hold; whether all were applied within ``wait_s`` seconds."""
        request = ps_pb2.AdmitUpdatesRequest(token=token, updates=map(update_to_proto, updates), wait_s=wait_s)
        reply: ps_pb2.AdmitUpdatesReply = await self._call("AdmitUpdates", request, CALL_TIMEOUT_S + wait_s)
        return reply.complete

    async def save_shards(self, token: int, directory: str, nonce: str) -> SavedShards:
        request = ps_pb2.SaveShardsRequest(token=token, directory=directory, nonce=nonce)
        reply: ps_pb2.SaveShardsReply = await self._call("SaveShards", request, DISK_TIMEOUT_S)
        return SavedShards(tuple(from_message(SavedFile, file) for file in reply.files), reply.step)

    async def release_commits(self, token: int) -> None:
        await self._call("ReleaseCommits", ps_pb2.ReleaseCommitsRequest(token=token))

    async def restore_shards(self, directory: str, num_ps: int, *, is_fresh: bool = False) -> None:
        """Puts the ps back to a committed checkpoint, as one of so many. One that was just made (``is_fresh``) is not
        looked through once more. CheckpointError: it is damaged. UnreadableError: its disk could not be read for
        :data:`READ_AGAIN_S`."""
        request = ps_pb2.RestoreShardsRequest(directory=directory, num_ps=num_ps, is_fresh=is_fresh)
        await read_patiently(lambda: self._call("RestoreShards", request, DISK_TIMEOUT_S))

    async def mark_lost(self, units: Mapping[tuple[int, int], UnitBitmap]) -> None:
        """Closes units without their updates."""
        await self._call("MarkLost", ps_pb2.MarkLostRequest(units=unit_sets_to_proto(units)))

    async def take_over(self, holder: Incarnation, address: str, of: Incarnation) -> str:
        """Has the ps take the copy that ``holder`` has of the process ``of``. Why it could not; empty: it has."""
        asked = common_pb2.Sender(task=self.incarnation.task, incarnation=self.incarnation.number)
        request = ps_pb2.TakeOverRequest(asked=asked, holder=holder.task, address=address, incarnation=of.number)
        reply: ps_pb2.TakeOverReply = await self._call("TakeOver", request, DISK_TIMEOUT_S)
        return reply.refusal

    async def close(self) -> None:
        self._closed = True
        for channel in self._channels:
            await channel.close(None)

    async def _call(self, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        self._check_open()
        request.sender.CopyFrom(self._sender)
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


class PsPool:
    """The connections to the ps with an open session. Calls are repeated while the ps is alive, and given up after."""

    def __init__(self, connect: Callable[[Incarnation, str], Server], sessions: Sessions) -> None:
        self._connect = connect
        self._sessions = sessions
        self.without_memory: set[Incarnation] = set()
        """ps that came back, and to which nothing could be given: they are in no checkpoint."""
        self._servers: dict[Incarnation, Server] = {}

    @property
    def num_ps(self) -> int:
        """How many there are when all are there."""
        return self._sessions.num_ps

    @property
    def servers(self) -> list[Server]:
        """Those with an open session, by index."""
        return [self._servers[incarnation] for incarnation in sorted(self._servers) if self._is_open(incarnation)]

    @property
    def ready(self) -> list[Server]:
        """Those that workers may use; a ps that has just come back has no values."""
        ready = (server for server in self.servers if self._sessions.is_live(server.incarnation))
        return [server for server in ready if server.incarnation not in self.without_memory]

    def add(self, incarnation: Incarnation, address: str) -> Server:
        if incarnation not in self._servers:
            self._servers[incarnation] = self._connect(incarnation, address)
        return self._servers[incarnation]

    def get(self, incarnation: Incarnation) -> Server | None:
        return self._servers.get(incarnation)

    async def drop_lost(self) -> None:
        for incarnation in [incarnation for incarnation in self._servers if not self._is_open(incarnation)]:
            await self._servers.pop(incarnation).close()

    async def insist(self, server: Server, call: Callable[[Server], Awaitable[_Result]]) -> _Result | None:
        """Calls until an answer comes; None when the ps is lost before, or has been left out and taken in again since.
        StratagemError: the ps refused."""
        level = logging.INFO
        while self._is_open(server.incarnation) and self._servers.get(server.incarnation) is server:
            try:
                return await call(server)
            except PeerUnavailableError as error:
                logger.log(level, "%s did not answer; retrying until it does: %s", server.incarnation.task, error)
                level = logging.DEBUG
                await asyncio.sleep(RETRY_S)
        return None

    async def insist_all(self, call: Callable[[Server], Awaitable[_Result]]) -> dict[Incarnation, _Result]:
        """As :meth:`insist` on every ps at once, without those that serve no more when all have answered."""
        servers = self.servers
        answers = zip(servers, await asyncio.gather(*(self.insist(server, call) for server in servers)), strict=True)
        here = self.servers
        return {server.incarnation: each for server, each in answers if each is not None and server in here}

    async def describe(self) -> dict[Incarnation, ServerDescription]:
        return await self.insist_all(lambda server: server.describe_units())

    async def describe_all(self) -> dict[Incarnation, ServerDescription]:
        """The same of all there are: one that is away may have most updates. PeerUnavailableError: one is."""
        described = await self.describe()
        if len(described) < (num_ps := self.num_ps):
            raise PeerUnavailableError(f"{num_ps - len(described)} of {num_ps} ps are away")
        return described

    def _is_open(self, incarnation: Incarnation) -> bool:
        return incarnation in self._sessions.servers

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()
        self._servers.clear()


def _description(reply: ps_pb2.DescribeUnitsReply) -> ServerDescription:
    opened = {update_from_proto(each.update): each.num_servers for each in reply.open}
    units = {name: unit_sets_from_proto(getattr(reply, name)) for name in ("closed", "halves", "dropped")}
    return from_message(ServerDescription, reply, open=opened, **units)
