"""A chief in this process on port 0, and scripted ps and workers that talk to it over real gRPC."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from stratagem.chief.job import ChiefJob
from stratagem.chief.leasing.positions import minus, plus
from stratagem.chief.servicer import SERVICE, ChiefServicer
from stratagem.chief.web.page_watch import PageWatch
from stratagem.cluster.config import ChiefConfig, ServerConfig
from stratagem.cluster.units import Unit, UnitBitmap, Update, positions_of
from stratagem.errors import CheckpointError, ProtocolError
from stratagem.rpc.channels import connect_aio
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc, common_pb2, ps_pb2, ps_pb2_grpc
from stratagem.rpc.server import serve_aio
from stratagem.rpc.units import unit_sets_to_proto, unit_to_proto

DEADLINE_S = 30.0
SYNC: dict[str, Any] = {"num_examples": 8, "batch_size": 4, "num_slices": 2, "staleness": 0.0}
"""A dataset whose batches are steps of two workers."""

SAVED_UNITS: dict[bytes, tuple[dict[Update, int], dict[tuple[int, int], UnitBitmap]]] = {}
"""What a fake ps had applied, by what it wrote into a checkpoint."""

# The poller thread of grpc.aio lives as long as the process; started here, before the first test looks for leaks.
grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # the stubs lack it


async def until(condition: Callable[[], Any]) -> Any:
    """Polls until ``condition()`` is true; returns what it gave."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not (found := condition()):
        assert asyncio.get_running_loop().time() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)
    return found


class Chief:
    """A chief that serves."""

    def __init__(self, job: ChiefJob, server: Any) -> None:
        self.job = job
        self.address: str = server.address
        self._server = server
        self._running = asyncio.create_task(job.run())

    async def exit_code(self) -> int:
        return await asyncio.wait_for(asyncio.shield(self._running), DEADLINE_S)

    async def kill(self) -> None:
        """Ends without a word, as kill -9 does (what the journal has in the file stays)."""
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running
        await self._server.server.stop(None)
        self.job.close()


@contextlib.asynccontextmanager
async def chief(bind: str = "127.0.0.1:0", **config: Any) -> AsyncIterator[Chief]:
    """A chief for two workers and two ps, unless ``config`` says otherwise."""
    defaults: dict[str, Any] = {"num_workers": 2, "num_ps": 2, "heartbeat_interval_s": 0.05}
    defaults["session_timeout_s"] = 60.0  # longer than a scenario may last: a fake that is silent is not lost
    defaults["session_grace_s"] = 0.0  # a fake that dies is dead
    defaults["checkpoint_roots"] = tempfile.gettempdir()
    settings = ChiefConfig(bind=bind, **{**defaults, **config})
    job = ChiefJob(settings)
    server = await serve_aio(
        settings,
        lambda server: chief_pb2_grpc.add_ChiefServicer_to_server(ChiefServicer(job), server),
        services=[SERVICE],
    )
    running = Chief(job, server)
    try:
        yield running
    finally:
        await running.kill()


class Task:
    """A task with a session."""

    def __init__(
        self,
        chief_address: str,
        task: str,
        address: str = "",
        resume: int = 0,
        held: Any = (),
        store_epoch: int = 0,
    ) -> None:
        self.task = task
        self.address = address
        self.incarnation = resume
        self.events: list[chief_pb2.SessionEvent] = []
        self.error: grpc.aio.AioRpcError | None = None
        self.channel = connect_aio(chief_address)
        self.stub: Any = chief_pb2_grpc.ChiefStub(self.channel)
        self._outbox: asyncio.Queue[chief_pb2.SessionRequest | None] = asyncio.Queue()
        join = chief_pb2.Join(
            task=task, address=address, pid=7, resume_incarnation=resume, held=held, store_epoch=store_epoch
        )
        self._outbox.put_nowait(chief_pb2.SessionRequest(join=join))
        self._listening = asyncio.create_task(self._listen())

    @property
    def sender(self) -> common_pb2.Sender:
        return common_pb2.Sender(task=self.task, incarnation=self.incarnation)

    @property
    def membership(self) -> chief_pb2.Membership:
        found = [event.membership for event in self.events if event.HasField("membership")]
        return found[-1] if found else chief_pb2.Membership()

    def ended(self, kind: str) -> Any:
        """The event ``kind`` ("fenced", "stop") if it came."""
        return next((getattr(event, kind) for event in self.events if event.WhichOneof("event") == kind), None)

    async def welcomed(self) -> Task:
        await until(lambda: (self.incarnation and self.events) or self.error)
        if self.error is not None:
            raise self.error
        return self

    async def ready(self) -> Task:
        await until(lambda: self.membership.ready)
        return self

    async def stopped(self) -> Any:
        """The event that tells it to stop; it has said goodbye then."""
        stop = await until(lambda: self.ended("stop"))
        self.goodbye()
        return stop

    def goodbye(self, exit_code: int = 0, message: str = "") -> None:
        goodbye = chief_pb2.Goodbye(exit_code=exit_code, message=message)
        self._outbox.put_nowait(chief_pb2.SessionRequest(goodbye=goodbye))
        self._outbox.put_nowait(None)

    def beat(self, measures: dict[str, Any] | None = None, lines: Sequence[str] = (), **progress: Any) -> None:
        said = None if measures is None else chief_pb2.Measures(**measures)
        told = [chief_pb2.LogLine(at=1.0, level="WARNING", text=text) for text in lines]
        heartbeat = chief_pb2.Heartbeat(progress=chief_pb2.Progress(**progress), measures=said, lines=told)
        self._outbox.put_nowait(chief_pb2.SessionRequest(heartbeat=heartbeat))

    async def die(self) -> None:
        """The process is gone: all its connections break."""
        self._listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._listening
        await self.channel.close(None)

    async def _requests(self) -> AsyncIterator[chief_pb2.SessionRequest]:
        while (request := await self._outbox.get()) is not None:
            yield request

    async def _listen(self) -> None:
        try:
            async for event in self.stub.Session(self._requests()):
                if event.HasField("welcome"):
                    self.incarnation = event.welcome.incarnation
                self.events.append(event)
        except grpc.aio.AioRpcError as error:
            self.error = error

    # Verbs of a worker

    async def open(self, **plan: Any) -> Any:
        defaults = {"dataset": 1, "num_examples": 8, "batch_size": 2, "num_slices": 1, "staleness": float("inf")}
        return await self.stub.OpenDataset(chief_pb2.OpenDatasetRequest(sender=self.sender, **{**defaults, **plan}))

    async def next(
        self, accepted: Any = (), *, epoch: int = 0, want: int = 1, wait: bool = True, held: Any = (), **more: Any
    ) -> Any:
        request = chief_pb2.NextUnitsRequest(
            sender=self.sender, dataset=1, epoch=epoch, accepted=accepted, want=want, wait=wait, held=held, **more
        )
        return await self.stub.NextUnits(request, timeout=DEADLINE_S)


class FakePs(ps_pb2_grpc.ParameterServerServicer):
    """A ps without tensors: it knows which units it has applied, and what the chief asked of it."""

    session: Task
    """The one with which it joined."""

    def __init__(self, index: int, saved: dict[str, Any] | None = None) -> None:
        self.index = index
        self.calls: list[str] = []
        self.num_described = self.num_fencing = 0
        self.fenced: dict[str, int] = {}
        self.open: dict[Update, int] = {}
        self.closed: dict[tuple[int, int], UnitBitmap] = {}
        self.closings: dict[int, tuple[list[Unit], list[Update]]] = {}
        self.committed_slices: list[tuple[int, Unit]] = []
        self.step = 0
        self.num_of_second = 0
        """Updates of a second model, which has had fewer than the first."""
        self.initialized = True
        self.complete: bool | None = None
        """None: where it has values."""
        self.groups: list[int] = []
        """Those that have values."""
        self.untrained = False
        self.per_unit = 0
        self.token = 0
        self.accumulates = False
        self.dropped: list[Unit] = []
        self.admits: list[Update] = []
        self.on_admit: Callable[[Update], None] = lambda update: None
        self.restored_from = ""
        self.num_ps = 0
        """Of how many it was told to be one."""
        self.taken_from: tuple[str, int] | None = None
        self.refusal = ""
        self.fence_gate = asyncio.Event()
        self.fence_gate.set()
        self.restore_gate = asyncio.Event()
        self.restore_gate.set()
        self.save_gate = asyncio.Event()
        self.save_gate.set()
        self.close_gate = asyncio.Event()
        self.close_gate.set()

    def apply(self, unit: Unit, ordinal: int = 0, num_servers: int = 2) -> None:
        self.open[Update((unit,), ordinal)] = num_servers
        self.step += 1

    def close_unit(self, unit: Unit) -> None:
        self.open = {update: num for update, num in self.open.items() if unit not in update.units}
        self.closed.setdefault((unit.dataset, unit.epoch), UnitBitmap()).add(unit.index)

    async def Fence(self, request: Any, context: Any) -> Any:
        self.num_fencing += 1
        await self.fence_gate.wait()
        self.fenced[request.task] = max(self.fenced.get(request.task, 0), request.incarnation)
        slices = [ps_pb2.CommittedSlice(step=step, unit=unit_to_proto(unit)) for step, unit in self.committed_slices]
        return ps_pb2.FenceReply(committed=slices)

    async def CloseStep(self, request: Any, context: Any) -> Any:
        included = [Unit(unit.dataset, unit.epoch, unit.index) for unit in request.included]
        self.closings[request.step] = (included, [_update(each) for each in request.committed])
        await self.close_gate.wait()
        return ps_pb2.CloseStepReply()

    def describe(self) -> Any:
        return ps_pb2.DescribeUnitsReply(
            closed=unit_sets_to_proto(self.closed),
            open=[ps_pb2.AppliedUpdate(update=_to_proto(u), num_servers=n) for u, n in self.open.items()],
            step=self.step,
            num_updates=self.step + self.num_of_second,
            initialized=self.initialized,
            complete=self.initialized if self.complete is None else self.complete,
            groups=self.groups,
            untrained=self.untrained,
            accumulates=self.accumulates,
            halves=self._halves(),
            dropped=unit_sets_to_proto(minus(positions_of(self.dropped), self.closed)),
        )

    def _halves(self) -> list[Any]:
        numbers = collections.Counter(unit for update in self.open for unit in update.units)
        return unit_sets_to_proto(positions_of(unit for unit, number in numbers.items() if number < self.per_unit))

    async def DescribeUnits(self, request: Any, context: Any) -> Any:
        self.num_described += 1
        return self.describe()

    async def HoldCommits(self, request: Any, context: Any) -> Any:
        if self.token > request.token:
            raise ProtocolError("a newer hold is on")
        self.token = request.token
        self.calls.append("hold")
        return self.describe()

    async def AdmitUpdates(self, request: Any, context: Any) -> Any:
        self.calls.append("admit")
        for update in request.updates:
            self.admits.append(_update(update))
            self.on_admit(_update(update))
        return ps_pb2.AdmitUpdatesReply(complete=all(_update(update) in self.open for update in request.updates))

    async def SaveShards(self, request: Any, context: Any) -> Any:
        self.calls.append("save")
        nonce = Path(request.directory, "nonce")
        if self.token != request.token or not nonce.exists() or nonce.read_text() != request.nonce:
            raise CheckpointError(f"ps:{self.index} does not see the chief's directory")
        content = repr(
            (self.step, sorted(self.open), self.groups, self.num_of_second)
        ).encode()  # tensors: units are in another file
        name = f"ps-{self.index}.safetensors"
        Path(request.directory, name).write_bytes(content)
        SAVED_UNITS[content] = self.open.copy(), self.closed.copy()
        file = ps_pb2.SavedFile(name=name, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        await self.save_gate.wait()
        return ps_pb2.SaveShardsReply(files=[file], step=self.step)

    async def ReleaseCommits(self, request: Any, context: Any) -> Any:
        self.calls.append("release")
        self.token = 0
        return ps_pb2.ReleaseCommitsReply()

    async def RestoreShards(self, request: Any, context: Any) -> Any:
        await self.restore_gate.wait()
        self.restored_from, self.num_ps = request.directory, request.num_ps
        self.calls.append("restore")
        self.open, self.closed, self.initialized = {}, {}, True
        paths = [*Path(request.directory).glob("ps-*.safetensors")]
        for path in paths:
            if len(paths) != request.num_ps or path.name == f"ps-{self.index}.safetensors":
                opened, closed = SAVED_UNITS.get(path.read_bytes(), ({}, {}))
                self.open.update(opened)
                self.closed = plus(self.closed, closed)
        return ps_pb2.RestoreShardsReply()

    async def MarkLost(self, request: Any, context: Any) -> Any:
        for each in request.units:
            mine = self.closed.get((each.dataset, each.epoch), UnitBitmap())
            self.closed[each.dataset, each.epoch] = mine | UnitBitmap(each.bitmap)
        return ps_pb2.MarkLostReply()

    async def TakeOver(self, request: Any, context: Any) -> Any:
        self.taken_from = (request.holder, request.incarnation)
        self.initialized = not self.refusal
        return ps_pb2.TakeOverReply(refusal=self.refusal)

    def _workers_only(self, request: Any, context: Any) -> Any:
        raise AssertionError("the chief does not call this")

    Hello = CreateVariables = AssignValues = PrepareUpdate = CommitUpdate = CloseUnits = PullWeights = _workers_only
    Transfer: Any = _workers_only
    OpenLane: Any = _workers_only


@contextlib.asynccontextmanager
async def ps(chief_address: str, fake: FakePs, resume: int = 0) -> AsyncIterator[FakePs]:
    """Serves a ps and joins it."""
    server = await serve_aio(
        ServerConfig(task="chief:0", max_message_bytes=1 << 20),
        lambda server: ps_pb2_grpc.add_ParameterServerServicer_to_server(fake, server),
        services=["stratagem.ParameterServer"],
    )
    fake.session = Task(chief_address, f"ps:{fake.index}", server.address, resume)
    try:
        await fake.session.welcomed()
        yield fake
    finally:
        await fake.session.die()
        await server.server.stop(None)


async def lose(running: Chief, server: FakePs) -> None:
    """A ps dies, and the chief knows."""
    lost = server.session.incarnation
    await server.session.die()
    await until(lambda: all(each.number != lost for each in running.job.sessions.servers))


def applied(servers: list[FakePs], *units: int, epoch: int = 0, close: bool = False) -> None:
    for server in servers:
        for index in units:
            server.apply(Unit(1, epoch, index))
            if close:
                server.close_unit(Unit(1, epoch, index))


def _update(update: Any) -> Update:
    return Update(tuple(Unit(each.dataset, each.epoch, each.index) for each in update.units), update.ordinal)


def _to_proto(update: Update) -> Any:
    units = [common_pb2.Unit(dataset=each.dataset, epoch=each.epoch, index=each.index) for each in update.units]
    return common_pb2.Update(units=units, ordinal=update.ordinal)


@contextlib.asynccontextmanager
async def cluster(**config: Any) -> AsyncIterator[tuple[Chief, list[Task], list[FakePs]]]:
    """All tasks of a chief with ``config``; ``initialized=False``: the ps have no values yet."""
    initialized = config.pop("initialized", True)
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(chief(**config))
        job = running.job.config
        fakes = [FakePs(index) for index in range(job.num_ps)]
        for fake in fakes:
            fake.initialized = initialized
        servers = [await stack.enter_async_context(ps(running.address, fake)) for fake in fakes]
        workers = [Task(running.address, f"worker:{index}") for index in range(job.num_workers)]
        for worker in workers:
            stack.push_async_callback(worker.die)
            await worker.ready()
        yield running, workers, servers


@contextlib.asynccontextmanager
async def beating(tasks: Sequence[Task]) -> AsyncIterator[None]:
    """These tasks, also those that are added, are not silent."""

    async def beat() -> None:
        while True:
            for task in tasks:
                task.beat()
            await asyncio.sleep(0.05)

    pulse = asyncio.create_task(beat())
    try:
        yield
    finally:
        pulse.cancel()


async def refused(call: Awaitable[Any]) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value, "chief")


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 100))


def indices(reply: chief_pb2.NextUnitsReply) -> list[int]:
    return [lease.unit.index for lease in reply.leases]


def watches_of(monkeypatch: pytest.MonkeyPatch) -> list[PageWatch]:
    """What looks at jobs for their pages, from now on."""
    watches: list[PageWatch] = []
    run_one = PageWatch.run

    def run_watch(self: PageWatch) -> Any:
        watches.append(self)
        return run_one(self)

    monkeypatch.setattr(PageWatch, "run", run_watch)
    return watches
