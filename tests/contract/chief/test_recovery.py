"""Checkpoints, and the return of a ps, of the chief and of the whole job, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from stratagem.chief.checkpointing import checkpoints
from stratagem.cluster.units import Unit, UnitBitmap, Update
from stratagem.errors import PeerUnavailableError
from stratagem.rpc.generated import chief_pb2
from tests.contract.chief.fakes import FakePs, Task, chief, cluster, indices, ps, refused, run, until

SYNC = {"num_examples": 8, "batch_size": 4, "num_slices": 2, "staleness": 0.0}


def applied(servers: list[FakePs], *units: int, epoch: int = 0, close: bool = False) -> None:
    for server in servers:
        for index in units:
            server.apply(Unit(1, epoch, index))
            if close:
                server.close_unit(Unit(1, epoch, index))


async def save(worker: Task, directory: Path) -> chief_pb2.SaveCheckpointReply:
    request = chief_pb2.SaveCheckpointRequest(sender=worker.sender, directory=str(directory))
    reply: chief_pb2.SaveCheckpointReply = await worker.stub.SaveCheckpoint(request)
    return reply


def test_a_checkpoint_is_taken_with_commits_held_and_says_where_the_data_stands(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster() as (_, workers, servers):
            await workers[0].open()
            await workers[0].next(want=2)
            applied(servers, 0, 1)
            await workers[0].next([0], held=[1])
            reply = await save(workers[0], tmp_path)
            assert (reply.path, reply.step) == (str(tmp_path / "step-00000002"), 2)
            for server in servers:
                assert server.calls == ["hold", "save", "release"]
            manifest = checkpoints.ServersManifest.read(Path(reply.path))
            assert manifest is not None
            assert manifest.accepted == {(1, 0): UnitBitmap.of([0])}
            assert manifest.applied == {(1, 0): UnitBitmap.of([1])}
            assert manifest.plans[1].num_examples == 8 and not manifest.automatic
            assert sorted(each.name for each in Path(reply.path).iterdir()) == [
                "manifest.json",
                "ps-0.safetensors",
                "ps-1.safetensors",
            ]
            plain = json.loads((Path(reply.path) / "manifest.json").read_text())
            assert [file["name"] for file in plain["files"]] == ["ps-0.safetensors", "ps-1.safetensors"]

    run(scenario)


def test_an_update_under_way_is_let_through_before_the_shards_are_saved(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster() as (_, workers, servers):
            await workers[0].open()
            servers[0].apply(Unit(1, 0, 0))
            servers[1].on_admit = lambda update: servers[1].apply(update.units[0])
            await save(workers[0], tmp_path)
            assert servers[1].admits == [Update((Unit(1, 0, 0),), 0)]
            assert servers[1].calls == ["hold", "admit", "save", "release"]
            assert servers[0].calls == ["hold", "save", "release"]

    run(scenario)


def test_an_update_whose_worker_is_gone_makes_the_chief_release_and_try_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster() as (_, workers, servers):
            await workers[0].open()
            servers[0].apply(Unit(1, 0, 0))

            def on_admit(update: Update) -> None:
                if len(servers[1].admits) == 2:
                    servers[1].apply(update.units[0])

            servers[1].on_admit = on_admit
            await save(workers[0], tmp_path)
            assert servers[1].calls == ["hold", "admit", "release", "hold", "admit", "save", "release"]

    run(scenario)


def test_an_update_of_fewer_ps_is_not_taken_for_torn(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster() as (_, workers, servers):
            servers[0].apply(Unit(1, 0, 0), num_servers=1)
            await save(workers[0], tmp_path)
            assert servers[1].admits == []

    run(scenario)


def test_a_checkpoint_needs_every_ps(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster() as (running, workers, servers):
            assert servers[1].session is not None
            await servers[1].session.die()
            await until(lambda: len(running.job.sessions.servers) == 1)
            error = await refused(save(workers[0], tmp_path))
            assert isinstance(error, PeerUnavailableError) and "needs all 2 ps" in str(error)
            assert list(tmp_path.iterdir()) == []

    run(scenario)


def test_the_first_and_the_last_checkpoint_come_by_themselves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(checkpoint_dir=str(tmp_path)) as (running, workers, servers):
            await until(lambda: running.job.journal.history.checkpoint)
            assert (tmp_path / "latest").read_text() == "step-00000000\n"
            applied(servers, 0)
            for worker in workers:
                worker.goodbye()
            for server in servers:
                assert server.session is not None
                await until(functools.partial(server.session.ended, "stop"))
                server.session.goodbye()
            assert await running.exit_code() == 0
            assert (tmp_path / "latest").read_text() == "step-00000001\n"

    run(scenario)


def test_checkpoints_are_taken_by_time_and_only_some_are_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = {"checkpoint_dir": str(tmp_path), "checkpoint_every_s": 0.01, "keep_checkpoints": 2}
        async with cluster(**config) as (_, _, servers):
            for step in range(4):
                await until(functools.partial(Path.exists, tmp_path / f"step-{step:08d}"))
                applied(servers, step)
            await until(lambda: (tmp_path / "step-00000004").exists() and not (tmp_path / "step-00000002").exists())
            assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]

    run(scenario)


def test_a_directory_that_a_ps_does_not_see_stops_the_job_at_the_start(tmp_path: Path) -> None:
    class Elsewhere(FakePs):
        async def SaveShards(self, request: Any, context: Any) -> Any:
            request.nonce = "another file system"
            return await super().SaveShards(request, context)

    async def scenario() -> None:
        config: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "checkpoint_dir": str(tmp_path)}
        async with chief(**config) as running, ps(running.address, Elsewhere(0)) as server:
            worker = Task(running.address, "worker:0")
            stop = await until(lambda: worker.ended("stop"))
            assert stop.exit_code == 2 and "does not see the chief's directory" in stop.reason
            assert checkpoints.scan(str(tmp_path)) == []
            await worker.die()
            assert server.token == 0

    run(scenario)


@contextlib.contextmanager
def logged(caplog: pytest.LogCaptureFixture, pattern: str) -> Any:
    with caplog.at_level(logging.INFO, "stratagem"):
        yield
    assert any(re.search(pattern, record.getMessage()) for record in caplog.records), caplog.text


class Saved(FakePs):
    """Its checkpoint has unit 0."""

    async def RestoreShards(self, request: Any, context: Any) -> Any:
        reply = await super().RestoreShards(request, context)
        self.close_unit(Unit(1, 0, 0))
        return reply


def test_updates_that_a_restored_ps_lacks_are_counted_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with cluster(checkpoint_dir=str(tmp_path), num_ps=1) as (running, workers, servers):
            await until(lambda: running.job.journal.history.checkpoint)
            await workers[0].open()
            await workers[0].next(want=4)
            applied(servers, 0, 1, 2)
            await workers[0].next([0, 1], held=[2, 3], wait=False)
            assert servers[0].session is not None
            await servers[0].session.die()
            await until(lambda: not running.job.sessions.servers)
            reborn = Saved(0)
            async with ps(running.address, reborn):
                await until(lambda: running.job.sessions.live("ps"))
                assert reborn.closed == {(1, 0): UnitBitmap.of([0, 1])}
                assert running.job.get_status().updates_lost == 1
                # Unit 2 was applied before the ps died and is reported only now: it is lost as well.
                await workers[0].next([2], held=[3], wait=False)
                assert running.job.get_status().updates_lost == 2
                # Unit 3 is committed again after the restore.
                reborn.apply(Unit(1, 0, 3), num_servers=1)
                assert (await workers[0].next([3])).end
                assert running.job.get_status().updates_lost == 2

    with logged(caplog, r"ps:0 restored step 0 from step-00000000: 1 updates lost"):
        run(scenario)


def test_a_ps_that_lost_everything_without_a_checkpoint_stops_the_job() -> None:
    async def scenario() -> None:
        async with cluster(num_ps=1) as (running, workers, servers):
            await until(lambda: running.job.journal.history.initialized)
            assert servers[0].session is not None
            await servers[0].session.die()
            reborn = FakePs(0)
            reborn.initialized = False
            async with ps(running.address, reborn):
                stop = await until(lambda: workers[0].ended("stop"))
                assert stop.exit_code == 1 and "came back without its variables" in stop.reason

    run(scenario)


def test_a_returning_ps_hears_all_fences_before_workers_hear_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(num_ps=1) as (running, workers, servers):
            assert servers[0].session is not None
            await servers[0].session.die()
            await workers[1].die()
            await until(lambda: running.job.sessions.lead == "worker:0" and running.job.sessions.fenced)
            reborn = FakePs(0)
            reborn.fence_gate.clear()
            async with ps(running.address, reborn):
                assert not any(info.live for info in workers[0].membership.tasks if info.task == "ps:0")
                reborn.fence_gate.set()
                await until(lambda: any(i.live for i in workers[0].membership.tasks if i.task == "ps:0"))
                assert reborn.fenced == {"worker:1": workers[1].incarnation}
                assert reborn.session is not None
                assert workers[0].membership.routing_epoch == reborn.session.incarnation

    run(scenario)


def test_at_staleness_0_all_ps_go_back_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(checkpoint_dir=str(tmp_path)) as (running, workers, servers):
            await until(lambda: running.job.journal.history.checkpoint)
            for worker in workers:
                await worker.open(**SYNC)
                await worker.next()
            applied(servers, 0, 1)
            [second] = (await workers[0].next([0])).leases
            assert (second.step, second.unit.index) == (2, 2)
            # worker:1 is still in step 1 (its reply got lost with ps:1); worker:0 is in step 2.
            assert servers[1].session is not None
            await servers[1].session.die()
            await until(lambda: len(running.job.sessions.servers) == 1)
            async with ps(running.address, FakePs(1)) as reborn:
                await until(lambda: len(running.job.sessions.live("ps")) == 2)
                assert servers[0].restored_from == reborn.restored_from == str(tmp_path / "step-00000000")
                # worker:1 says that its slice is accepted, but it was so before the restore only.
                [first] = (await workers[1].next([1], held=[], wait=False)).leases
                assert running.job.lease_book.epoch(1, 0).num_accepted == 0
                # Both forget what they held and ask anew: the units come in the order of the plan, in a new step.
                [other] = (await workers[0].next([], held=[], wait=False)).leases
                assert {first.unit.index, other.unit.index} == {0, 1}
                assert first.step == other.step == 3
                for server in (servers[0], reborn):
                    server.apply(Unit(1, 0, other.unit.index))
                await workers[0].next([other.unit.index], held=[], wait=False)
                assert other.unit.index in running.job.lease_book.epoch(1, 0).accepted

    run(scenario)


def test_a_restarted_chief_goes_on_with_the_same_tasks(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with chief(state_dir=str(tmp_path), seed=3) as first:
                port = first.address
                servers = [await stack.enter_async_context(ps(port, FakePs(index))) for index in range(2)]
                workers = [Task(port, f"worker:{index}") for index in range(2)]
                for worker in workers:
                    await worker.ready()
                    await worker.open()
                held = list((await workers[0].next(want=2)).leases)
                lost = list((await workers[1].next(want=1)).leases)
                applied(servers, 0)
                assert indices(await workers[0].next([0], held=[1])) == [3]
                await first.kill()
            assert lost[0].unit.index == 2
            async with chief(bind=port, state_dir=str(tmp_path), session_timeout_s=1.0) as second:
                assert second.job.journal.history.chief_epoch == 2
                back = Task(port, "worker:0", resume=workers[0].incarnation, held=[held[1]])
                await back.welcomed()
                waiting = asyncio.create_task(back.next(want=9, held=[1]))
                resumed = []
                for server in servers:
                    assert server.session is not None
                    task = Task(port, f"ps:{server.index}", _address(second, server), server.session.incarnation)
                    await task.welcomed()
                    resumed.append(task)
                beating = asyncio.create_task(_beat([back, *resumed]))
                # worker:1 does not come back: after the session timeout its unit is leased to others; unit 3 was in a
                # reply that got lost.
                assert indices(await waiting) == [2, 3]
                assert all(server.fenced == {"worker:1": workers[1].incarnation} for server in servers)
                assert second.job.lease_book.epoch(1, 0).accepted == UnitBitmap.of([0])
                reply = await back.open()
                assert reply.seed == 3, "the plan of the job stands"
                assert (await back.next([1, 2, 3])).end
                beating.cancel()
                for task in (back, *resumed):
                    await task.die()
            for worker in workers:
                await worker.die()

    run(scenario)


def _address(running: Any, server: FakePs) -> str:
    """Where a ps served when it joined the chief before."""
    assert server.session is not None
    address: str = next(i.address for i in server.session.membership.tasks if i.task == f"ps:{server.index}")
    return address


async def _beat(tasks: list[Task]) -> None:
    while True:
        for task in tasks:
            task.beat()
        await asyncio.sleep(0.05)


def test_a_restarted_chief_finds_owners_for_the_slices_of_a_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with chief(num_ps=1, state_dir=str(tmp_path)) as first:
                port = first.address
                server = await stack.enter_async_context(ps(port, FakePs(0)))
                workers = [Task(port, f"worker:{index}") for index in range(2)]
                for worker in workers:
                    await worker.ready()
                    await worker.open(**SYNC)
                [mine] = (await workers[0].next()).leases
                await first.kill()
            async with chief(bind=port, num_ps=1, state_dir=str(tmp_path)) as second:
                assert server.session is not None
                tasks = [
                    Task(port, "worker:0", resume=workers[0].incarnation, held=[mine]),
                    Task(port, "worker:1", resume=workers[1].incarnation),
                    Task(port, "ps:0", _address(second, server), server.session.incarnation),
                ]
                [other] = (await _welcomed(tasks))[1]
                assert (other.unit.index, other.step, list(other.step_units)) == (1, 1, [0, 1])
                [later] = (await tasks[0].next([0])).leases
                assert later.step == 2
                for task in tasks:
                    await task.die()
            for worker in workers:
                await worker.die()

    async def _welcomed(tasks: list[Task]) -> list[Any]:
        for task in tasks:
            await task.welcomed()
        return [None, (await tasks[1].next()).leases]

    run(scenario)


def test_a_new_job_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster() as (_, workers, servers):
            await workers[0].open()
            await workers[0].next(want=3)
            applied(servers, 0, 2)
            await workers[0].next([0, 2], held=[1])
            await save(workers[0], tmp_path)
        async with cluster(checkpoint_dir=str(tmp_path), seed=99) as (running, workers, servers):
            assert (await workers[0].open()).seed == 0, "the plan of the checkpoint stands"
            assert indices(await workers[0].next(want=9)) == [1, 3]
            assert running.job.journal.history.chief_epoch == 2
            error = await refused(workers[1].open(batch_size=3))
            assert "batch_size is 2 in the job and 3 here" in str(error)

    run(scenario)
