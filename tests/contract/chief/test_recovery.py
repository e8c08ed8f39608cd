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
from stratagem.errors import ConfigurationError, PeerUnavailableError
from stratagem.rpc.generated import chief_pb2
from tests.contract.chief.fakes import (
    FakePs,
    Task,
    applied,
    beating,
    chief,
    cluster,
    indices,
    lose,
    ps,
    refused,
    run,
    until,
)


async def save(worker: Task, directory: Path) -> chief_pb2.SaveCheckpointReply:
    request = chief_pb2.SaveCheckpointRequest(sender=worker.sender, directory=str(directory))
    reply: chief_pb2.SaveCheckpointReply = await worker.stub.SaveCheckpoint(request)
    return reply


async def test_a_checkpoint_is_taken_with_commits_held_and_says_where_the_data_stands(tmp_path: Path) -> None:
    async with cluster() as (_, workers, servers):
        await workers[0].open()
        await workers[0].next(want=2)
        applied(servers, 0, 1)
        await workers[0].next([0], held=[1])
        reply = await save(workers[0], tmp_path)
        assert reply.path == str(tmp_path / "step-00000002")
        for server in servers:
            assert server.calls == ["hold", "save", "release"]
        manifest = checkpoints.ServersManifest.read(Path(reply.path))
        assert manifest is not None and manifest.step == 2
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


async def test_the_part_of_a_checkpoint_that_a_script_writes_is_named_by_its_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stratagem.chief")
    async with cluster() as (running, workers, _):
        await workers[0].open()
        reply = await save(workers[0], tmp_path / ".draft-02405616")
        assert reply.path == str(tmp_path / ".draft-02405616" / "step-00000000")
        place = f"part of what the script saves in {tmp_path}"
        assert running.job.get_status().checkpoint == f"{place}: step-00000000"
    assert f"Checkpoint of step 0: {place}" in caplog.messages


async def test_an_update_under_way_is_let_through_before_the_shards_are_saved(tmp_path: Path) -> None:
    async with cluster() as (_, workers, servers):
        await workers[0].open()
        servers[0].apply(Unit(1, 0, 0))
        servers[1].on_admit = lambda update: servers[1].apply(update.units[0])
        await save(workers[0], tmp_path)
        assert servers[1].admits == [Update((Unit(1, 0, 0),), 0)]
        assert servers[1].calls == ["hold", "admit", "save", "release"]
        assert servers[0].calls == ["hold", "save", "release"]


async def test_an_update_whose_worker_is_gone_makes_the_chief_release_and_try_again(tmp_path: Path) -> None:
    async with cluster() as (_, workers, servers):
        await workers[0].open()
        servers[0].apply(Unit(1, 0, 0))

        def on_admit(update: Update) -> None:
            if len(servers[1].admits) == 2:
                servers[1].apply(update.units[0])

        servers[1].on_admit = on_admit
        await save(workers[0], tmp_path)
        assert servers[1].calls == ["hold", "admit", "release", "hold", "admit", "save", "release"]


async def test_what_a_worker_that_is_gone_has_sent_is_saved_as_it_is_when_the_others_wait(tmp_path: Path) -> None:
    """Both save, or one waits for the other by the staleness bound: none would take the dead one's unit meanwhile."""
    async with cluster() as (_, workers, servers):
        await workers[0].open()
        servers[0].apply(Unit(1, 0, 0))
        saves = [asyncio.create_task(save(worker, tmp_path / worker.task)) for worker in workers]
        await asyncio.wait(saves, return_when=asyncio.FIRST_COMPLETED)
        assert servers[1].calls[:4] == ["hold", "admit", "save", "release"]
        servers[1].apply(Unit(1, 0, 0))  # one of the two goes on
        await asyncio.gather(*saves)


async def test_who_needs_one_cut_does_not_share_the_hold_of_one_who_does_not(tmp_path: Path) -> None:
    """A ps was told to end as the chief left: its checkpoint had a part of an update, under the hold of the chief's."""
    async with cluster(checkpoint_dir=str(tmp_path)) as (running, _, servers):
        await until(lambda: all("release" in server.calls for server in servers))  # after the first checkpoint
        servers[0].apply(Unit(1, 0, 0))
        servers[1].on_admit = lambda update: servers[1].apply(update.units[0])
        hold = running.job.commit_hold
        await hold.enter("a checkpoint", complete=False)
        with pytest.raises(PeerUnavailableError, match="It will be retried"):
            await hold.enter("a checkpoint")
        await hold.enter("a checkpoint", complete=False)
        await hold.leave()
        await hold.leave()
        assert not servers[1].admits
        await hold.enter("a checkpoint")
        assert servers[1].admits == [Update((Unit(1, 0, 0),), 0)]
        await hold.leave()


async def test_an_update_of_fewer_ps_is_not_taken_for_torn(tmp_path: Path) -> None:
    async with cluster() as (_, workers, servers):
        servers[0].apply(Unit(1, 0, 0), num_servers=1)
        await save(workers[0], tmp_path)
        assert servers[1].admits == []


async def test_a_checkpoint_needs_every_ps(tmp_path: Path) -> None:
    async with cluster() as (running, workers, servers):
        await servers[1].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        error = await refused(save(workers[0], tmp_path))
        assert isinstance(error, PeerUnavailableError) and "needs all 2 ps" in str(error)
        assert list(tmp_path.iterdir()) == []


async def test_the_first_and_the_last_checkpoint_come_by_themselves(tmp_path: Path) -> None:
    async with cluster(checkpoint_dir=str(tmp_path)) as (running, workers, servers):
        await until(lambda: running.job.journal.history.checkpoint)
        assert (tmp_path / "latest").read_text() == "step-00000000\n"
        applied(servers, 0)
        for worker in workers:
            worker.goodbye()
        for server in servers:
            await server.session.stopped()
        assert await running.exit_code() == 0
        assert (tmp_path / "latest").read_text() == "step-00000001\n"


async def test_checkpoints_are_taken_by_time_and_only_some_are_kept(tmp_path: Path) -> None:
    config = {"checkpoint_dir": str(tmp_path), "checkpoint_every_s": 0.01, "keep_checkpoints": 2}
    async with cluster(**config) as (_, _, servers):
        for step in range(4):
            await until(functools.partial(Path.exists, tmp_path / f"step-{step:08d}"))
            applied(servers, step)
        await until(lambda: (tmp_path / "step-00000004").exists() and not (tmp_path / "step-00000002").exists())
        assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]


async def test_a_directory_that_a_ps_does_not_see_stops_the_job_at_the_start(tmp_path: Path) -> None:
    class Elsewhere(FakePs):
        async def SaveShards(self, request: Any, context: Any) -> Any:
            request.nonce = "another file system"
            return await super().SaveShards(request, context)

    config: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "checkpoint_dir": str(tmp_path)}
    async with chief(**config) as running, ps(running.address, Elsewhere(0)) as server:
        worker = Task(running.address, "worker:0")
        stop = await until(lambda: worker.ended("stop"))
        assert stop.exit_code == 2 and "does not see the chief's directory" in stop.reason
        assert checkpoints.scan(str(tmp_path)) == []
        await worker.die()
        assert server.token == 0


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
            await lose(running, servers[0])
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
                await lose(running, reborn)
            # Once more, from the same checkpoint: what was lost before is no further loss, what came since is.
            async with ps(running.address, Saved(0)):
                await until(lambda: running.job.sessions.live("ps"))
                assert running.job.get_status().updates_lost == 3

    with logged(caplog, r"ps:0 restored step 0 from step-00000000: 1 updates lost; --checkpoint-every-s"):
        run(scenario)


@pytest.mark.parametrize("num_lost", [1, 0])
async def test_a_restored_ps_with_half_a_batch_has_lost_the_rest(tmp_path: Path, num_lost: int) -> None:
    """Of two optimizers' updates its checkpoint has one: that was taken for the batch, the other was lost untold. Where
    a batch has one update, as of two models in turn, that was told to be lost."""

    class Half(FakePs):
        async def RestoreShards(self, request: Any, context: Any) -> Any:
            reply = await super().RestoreShards(request, context)
            self.close_unit(Unit(1, 0, 0))
            self.apply(Unit(1, 0, 1), 0)
            self.per_unit = 2
            return reply

    async with cluster(checkpoint_dir=str(tmp_path), num_ps=1) as (running, workers, servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await workers[0].open(num_examples=16)
        await workers[0].next(want=3, steps_per_unit=1 + num_lost)
        applied(servers, 0, 1)
        await workers[0].next([0, 1], held=[2], wait=False)
        await lose(running, servers[0])
        reborn = Half(0)
        async with ps(running.address, reborn):
            await until(lambda: running.job.sessions.live("ps"))
            assert reborn.closed == {(1, 0): UnitBitmap.of(range(1 + num_lost))}
            assert running.job.get_status().updates_lost == num_lost
            # One that was leased after that may have fewer updates than another one, and not be closed there yet.
            await workers[1].open(num_examples=16)
            [lease] = (await workers[1].next(want=1)).leases
            reborn.apply(Unit(1, 0, lease.unit.index), 0)
            await workers[1].next([lease.unit.index], wait=False)
            await running.job.recovery.count_lost()
            assert running.job.get_status().updates_lost == num_lost


async def test_half_of_a_batch_that_is_computed_again_and_that_another_ps_has_closed_is_lost(tmp_path: Path) -> None:
    """It had gone back to its worker's successor before the ps was put back: the checkpoint was no cut."""
    async with cluster(checkpoint_dir=str(tmp_path)) as (running, workers, servers):
        await until(lambda: running.job.journal.history.checkpoint)
        servers[0].close_unit(Unit(1, 0, 0))
        await lose(running, servers[1])
        reborn = FakePs(1)
        reborn.per_unit = 2
        async with ps(running.address, reborn):
            await until(lambda: len(running.job.sessions.live("ps")) == 2)
            await workers[0].open()
            await workers[0].next(want=1)
            reborn.apply(Unit(1, 0, 0), 0)
            saved = await running.job.saving.save(str(tmp_path), automatic=True)
            assert reborn.closed == {(1, 0): UnitBitmap.of([0])} and not saved.manifest.unfinished
            assert running.job.get_status().updates_lost == 1


async def test_what_a_ps_lacks_that_is_told_what_it_holds_while_a_checkpoint_is_taken_is_counted(
    tmp_path: Path,
) -> None:
    """It was told between the count and the look at its values: the checkpoint called units accepted that it lacked."""

    class Told(FakePs):
        told_at = 1000

        def describe(self) -> Any:
            self.initialized = self.num_described >= self.told_at
            return super().describe()

    async with cluster(checkpoint_dir=str(tmp_path), num_workers=1) as (running, [worker], servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await worker.open()
        await worker.next(want=1)
        applied(servers, 0, close=True)
        await worker.next([0], held=[], wait=False)
        await lose(running, servers[1])
        running.job.journal.write("untold")
        reborn = Told(1)
        async with ps(running.address, reborn):
            await until(lambda: len(running.job.sessions.live("ps")) == 2 and running.job.is_open)
            reborn.told_at = reborn.num_described + 3  # the first two looks are of who counts
            with pytest.raises(PeerUnavailableError, match="needs the values of ps:1"):
                await running.job.saving.save(str(tmp_path), automatic=True)
            reborn.told_at = 0
            await running.job.saving.save(str(tmp_path), automatic=True)
            assert reborn.closed == {(1, 0): UnitBitmap.of([0])} and running.job.get_status().updates_lost == 1


async def test_a_chief_that_follows_knows_how_many_updates_a_batch_has(tmp_path: Path) -> None:
    """Of two, at staleness 0: it took a dead worker's slice with one for done, until workers had said so again."""
    config: dict[str, Any] = {
        "state_dir": str(tmp_path / "state"),
        "checkpoint_dir": str(tmp_path / "c"),
        "num_workers": 1,
    }
    async with contextlib.AsyncExitStack() as stack:
        async with chief(**config, num_ps=1) as first:
            await stack.enter_async_context(ps(first.address, FakePs(0)))
            worker = Task(first.address, "worker:0")
            stack.push_async_callback(worker.die)
            await worker.ready()
            await worker.open()
            await worker.next(steps_per_unit=2)
        async with chief(**config, num_ps=1, bind=first.address) as second:
            assert second.job.lease_book.steps.per_unit == 2


async def test_what_any_ps_has_of_a_dead_worker_is_not_made_again_where_updates_are_of_several_units() -> None:
    """One over two was on every ps and not closed yet: each was leased again beside another one, and the ps refused
    that update."""
    async with cluster(num_workers=2, num_ps=2) as (running, [first, second], servers):
        await first.open(num_examples=16)
        assert indices(await first.next(want=4, steps_per_unit=1)) == [0, 1, 2, 3]
        applied(servers, 0, 1)
        servers[0].apply(Unit(1, 0, 2))  # and the other ps lacks it
        servers[0].accumulates = True
        servers[1].per_unit = 2  # as one that was put back says where a further model has had no update
        first.goodbye(exit_code=1)
        await until(lambda: not running.job.lease_book.held(running.job.sessions.tasks["worker:0"].incarnation))
        assert indices(await second.next(want=2, steps_per_unit=1)) == [3, 4]
        assert [each.closed for each in servers] == [{(1, 0): UnitBitmap.of([0, 1, 2])}] * 2
        assert running.job.get_status().updates_lost == 1


@pytest.mark.parametrize("ends", [False, True])
async def test_what_a_ps_dropped_is_counted_before_a_checkpoint_has_it_and_as_the_job_ends(
    tmp_path: Path, ends: bool
) -> None:
    """Its update was over several units, of which the ps had one already."""
    async with cluster() as (running, workers, servers):
        await workers[0].open(num_examples=4)
        await workers[0].next(want=2)
        applied(servers, 0, 1)
        servers[0].dropped, servers[0].accumulates = [Unit(1, 0, 1)], True
        await workers[0].next([0, 1])
        if ends:
            for worker in workers:
                worker.goodbye()
        else:
            await save(workers[0], tmp_path)
        await until(lambda: running.job.get_status().updates_lost and servers[0].closed)
        assert [each.closed for each in servers] == [{(1, 0): UnitBitmap.of([1])}, {}]
        await save(workers[0], tmp_path / "again") if not ends else None
        assert running.job.get_status().updates_lost == 1


async def test_what_a_ps_dropped_of_a_dead_worker_is_told_to_be_lost_as_every_ps_closes_it() -> None:
    async with cluster(num_workers=2, num_ps=2) as (running, [first, second], servers):
        await first.open(num_examples=16)
        assert indices(await first.next(want=2, steps_per_unit=1)) == [0, 1]
        applied(servers, 0, 1)
        for server in servers:
            server.accumulates = True
        servers[1].dropped = [Unit(1, 0, 1)]
        first.goodbye(exit_code=1)
        await until(lambda: not running.job.lease_book.held(running.job.sessions.tasks["worker:0"].incarnation))
        assert indices(await second.next(want=2, steps_per_unit=1)) == [2, 3]
        assert running.job.get_status().updates_lost == 1


@pytest.mark.parametrize("on_both", [False, True])
async def test_what_a_dead_worker_had_yet_to_make_of_accumulated_batches_is_told_to_be_lost(on_both: bool) -> None:
    """Two optimizers; it died between their updates, and what the second one had of these batches was gone without a
    word: that it is on another ps, or on each, made no difference."""
    async with cluster(num_workers=2, num_ps=2) as (running, [first, second], servers):
        await first.open(num_examples=16)
        assert indices(await first.next(want=4, steps_per_unit=2)) == [0, 1, 2, 3]
        for server in servers if on_both else servers[:1]:
            for unit in (0, 1):
                server.apply(Unit(1, 0, unit), num_servers=1 + on_both)
            server.accumulates, server.per_unit = True, 2 if on_both else 1
        first.goodbye(exit_code=1)
        await until(lambda: not running.job.lease_book.held(running.job.sessions.tasks["worker:0"].incarnation))
        assert indices(await second.next(want=2, steps_per_unit=2)) == [2, 3]
        assert [each.closed for each in servers] == [{(1, 0): UnitBitmap.of([0, 1])}] * 2
        assert running.job.get_status().updates_lost == (4 if on_both else 2)


async def test_what_a_chief_that_died_had_yet_to_tell_a_ps_of_lost_updates_is_told_by_the_next() -> None:
    """Two optimizers, updates of several units: it had closed them on the first ps, as lost there. The next chief took
    them for whole on the other one, too."""
    async with cluster(num_workers=2, num_ps=2) as (running, [first, second], servers):
        await first.open(num_examples=16)
        assert indices(await first.next(want=4, steps_per_unit=2)) == [0, 1, 2, 3]
        for server in servers:
            server.apply(Unit(1, 0, 0))
            server.accumulates, server.per_unit = True, 2
        servers[0].close_unit(Unit(1, 0, 0))
        first.goodbye(exit_code=1)
        await until(lambda: not running.job.lease_book.held(running.job.sessions.tasks["worker:0"].incarnation))
        assert indices(await second.next(want=2, steps_per_unit=2)) == [1, 2]
        assert [each.closed for each in servers] == [{(1, 0): UnitBitmap.of([0])}] * 2
        assert running.job.get_status().updates_lost == 1


@pytest.mark.parametrize("knows", [0, 1])
async def test_what_any_ps_has_of_a_dead_worker_is_known_before_it_is_leased_again(tmp_path: Path, knows: int) -> None:
    """A ps was away, so all of it went back to others, and the ps that had it refused their updates; also where that
    was the one that was away, or looked so."""
    config = {"num_workers": 2, "num_ps": 2, "checkpoint_dir": str(tmp_path)}
    async with cluster(**config) as (running, [first, second], servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await first.open(num_examples=16)
        assert indices(await first.next(want=4, steps_per_unit=2)) == [0, 1, 2, 3], "of two models it trains one"
        for unit in range(3):
            servers[knows].apply(Unit(1, 0, unit), num_servers=1)
        servers[knows].accumulates = True
        await lose(running, servers[1])
        num_described = servers[0].num_described
        first.goodbye(exit_code=1)
        await until(lambda: servers[0].num_described > num_described)
        assert indices(await second.next(want=1, steps_per_unit=2)) == [4]
        assert running.job.lease_book.held(running.job.sessions.tasks["worker:0"].incarnation)
        async with ps(running.address, FakePs(1)):
            await until(lambda: not running.job.lease_book.held(running.job.sessions.tasks["worker:0"].incarnation))
            assert indices(await second.next(held=[4], want=2, steps_per_unit=2)) == ([3, 5] if knows == 0 else [0, 1])


async def test_what_others_have_closed_of_a_dead_worker_and_one_that_was_put_back_lacks_is_told_to_be_lost(
    tmp_path: Path,
) -> None:
    """Of several units an update: all ps closed it for good, and that one of them lacks it was never said."""
    config = {"num_workers": 2, "num_ps": 2, "checkpoint_dir": str(tmp_path)}
    async with cluster(**config) as (running, [first, second], servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await first.open(num_examples=16)
        assert indices(await first.next(want=2, steps_per_unit=1)) == [0, 1]
        servers[0].apply(Unit(1, 0, 0))
        servers[0].close_unit(Unit(1, 0, 0))
        servers[0].accumulates = True
        await lose(running, servers[1])
        async with ps(running.address, FakePs(1)):
            first.goodbye(exit_code=1)
            await until(lambda: not running.job.lease_book.held(running.job.sessions.tasks["worker:0"].incarnation))
            assert indices(await second.next(want=2, steps_per_unit=1)) == [1, 2]
            assert running.job.get_status().updates_lost == 1


class Accumulated(FakePs):
    """Its checkpoint has updates of several units, which nobody has closed: of 0 and 2."""

    async def RestoreShards(self, request: Any, context: Any) -> Any:
        reply = await super().RestoreShards(request, context)
        self.apply(Unit(1, 0, 0), num_servers=1)
        self.apply(Unit(1, 0, 2), num_servers=1)
        self.accumulates = True
        return reply


@pytest.mark.parametrize("counts", [False, True])
async def test_what_the_only_ps_has_of_a_dead_worker_is_known_before_it_is_leased_again(
    tmp_path: Path, counts: bool
) -> None:
    """It was away, or back and not put back yet: all went to others, whose updates it refused."""
    async with cluster(num_workers=2, num_ps=1, checkpoint_dir=str(tmp_path)) as (running, [first, second], servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await first.open(num_examples=16)
        assert indices(await first.next(want=4, steps_per_unit=1, counts=counts)) == [0, 1, 2, 3]
        lost = running.job.sessions.tasks["worker:0"].incarnation
        await lose(running, servers[0])
        first.goodbye(exit_code=1)
        await until(lambda: running.job.sessions.fenced.get("worker:0"))
        reborn = Accumulated(0)
        reborn.initialized = False
        reborn.restore_gate.clear()
        async with ps(running.address, reborn):
            await until(lambda: reborn.num_described)
            assert len(running.job.lease_book.held(lost)) == 4
            reborn.restore_gate.set()
            await until(lambda: not running.job.lease_book.held(lost))
            assert indices(await second.next(want=2, steps_per_unit=1)) == [1, 3]


async def test_what_a_checkpoint_has_of_several_units_is_not_leased_again_by_a_job_that_begins_from_it(
    tmp_path: Path,
) -> None:
    folders = {"checkpoint_dir": str(tmp_path), "state_dir": str(tmp_path / "state")}
    config: dict[str, Any] = {"num_workers": 1, "num_ps": 1, **folders}
    async with cluster(**config) as (running, [worker], _):
        await until(lambda: running.job.journal.history.checkpoint)
        await worker.open(num_examples=16)
    async with chief(**config) as running, ps(running.address, Accumulated(0)):
        worker = Task(running.address, "worker:0")
        await worker.ready()
        await worker.open(num_examples=16)
        assert indices(await worker.next(want=2, steps_per_unit=1)) == [1, 3]
        await worker.die()


async def test_what_a_ps_has_of_several_units_is_not_leased_again_by_a_chief_that_follows_while_another_ps_is_away(
    tmp_path: Path,
) -> None:
    """It had been reported to the last chief alone, as it died; the next one leased it beside other units."""
    config = {"state_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "checkpoints")}
    async with contextlib.AsyncExitStack() as stack:
        running, [_, worker], servers = await stack.enter_async_context(cluster(**config))
        await until(lambda: running.job.journal.history.checkpoint)
        await worker.open()
        applied(servers, 0, 1)
        servers[0].accumulates = True
        await lose(running, servers[1])
        place = running.job.sessions.tasks["ps:0"].address
        await running.kill()
        async with chief(bind=running.address, **config) as following:
            others = [Task(running.address, "worker:0").welcomed(), Task(running.address, "worker:1").welcomed()]
            stays = Task(running.address, "ps:0", place, servers[0].session.incarnation, store_epoch=1)
            num_described = servers[0].num_described
            tasks = [stays, *await asyncio.gather(*others)]
            await until(lambda: servers[0].num_described > num_described)
            async with ps(running.address, FakePs(1)):
                await tasks[-1].open()
                assert indices(await tasks[-1].next(want=2)) == [2, 3]
                assert following.job.get_status().updates_lost == 2
                for task in tasks:
                    await task.die()


async def test_what_one_ps_has_closed_of_several_units_is_not_leased_again_by_a_chief_that_follows(
    tmp_path: Path,
) -> None:
    """The other one takes part in no update, so it hears of closed units last: the batches came again, beside others,
    where the chief's machine had crashed before the journal had them."""
    config = {"state_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "checkpoints")}
    async with contextlib.AsyncExitStack() as stack:
        running, [_, worker], servers = await stack.enter_async_context(cluster(**config))
        await until(lambda: running.job.journal.history.checkpoint)
        await worker.open()
        for index in range(3):
            servers[0].apply(Unit(1, 0, index), num_servers=1)
        servers[0].close_unit(Unit(1, 0, 0))
        servers[0].accumulates = servers[1].untrained = True
        places = [running.job.sessions.tasks[f"ps:{index}"].address for index in range(2)]
        await running.kill()
        async with chief(bind=running.address, **config) as following:
            tasks = [
                Task(running.address, server.session.task, place, server.session.incarnation, store_epoch=1)
                for server, place in zip(servers, places, strict=True)
            ]
            tasks += [await Task(running.address, f"worker:{index}").welcomed() for index in range(2)]
            await tasks[-1].ready()
            await tasks[-1].open()
            assert indices(await tasks[-1].next(want=2)) == [3]
            assert following.job.get_status().updates_lost == 0
            for task in tasks:
                await task.die()


class Empty(FakePs):
    """None of the variables is here, as its checkpoint says, too."""

    async def RestoreShards(self, request: Any, context: Any) -> Any:
        reply = await super().RestoreShards(request, context)
        self.initialized, self.complete = False, True
        return reply


async def test_a_ps_without_variables_that_was_put_back_can_say_what_it_has_of_a_dead_worker(tmp_path: Path) -> None:
    """It was taken for one that is yet to be put back: what the worker held was leased to nobody for ever."""
    config: dict[str, Any] = {"num_workers": 2, "num_ps": 2, "checkpoint_dir": str(tmp_path)}
    async with cluster(**config) as (running, _, servers):
        servers[1].initialized, servers[1].complete = False, True
        await until(lambda: running.job.journal.history.checkpoint)
    async with chief(**config) as running, ps(running.address, FakePs(0)), ps(running.address, Empty(1)):
        first, second = [await Task(running.address, f"worker:{index}").welcomed() for index in range(2)]
        await first.ready()
        for worker in (first, second):
            await worker.open()
        assert indices(await first.next(want=2)) == [0, 1]
        first.goodbye(exit_code=1)
        await until(lambda: running.job.sessions.fenced.get("worker:0"))
        await until(lambda: not running.job.lease_book.held(running.job.sessions.tasks["worker:0"].incarnation))
        assert indices(await second.next(want=4)) == [0, 1, 2, 3]
        for worker in (first, second):
            await worker.die()


async def test_a_chief_that_follows_knows_which_ps_may_lack_what_is_reported_late(tmp_path: Path) -> None:
    config = {
        "state_dir": str(tmp_path / "state"),
        "checkpoint_dir": str(tmp_path / "c"),
        "num_workers": 1,
        "num_ps": 1,
    }

    async with contextlib.AsyncExitStack() as stack:
        async with cluster(**config) as (first, [worker], [server]):
            await until(lambda: first.job.journal.history.checkpoint)
            await worker.open()
            [lease] = (await worker.next()).leases
            applied([server], 0)
            await server.session.die()
            await until(lambda: not first.job.sessions.servers)
            port, reborn = first.address, FakePs(0)
            await stack.enter_async_context(ps(port, reborn))
            await until(lambda: first.job.sessions.live("ps"))
            place = first.job.sessions.tasks["ps:0"].address
            await first.kill()
        assert reborn.restored_from
        async with chief(bind=port, **config) as second:
            resumed = Task(port, "worker:0", resume=worker.incarnation, held=[lease])
            again = Task(port, "ps:0", place, reborn.session.incarnation, store_epoch=2)
            await resumed.welcomed()
            await resumed.next([0], wait=False)
            assert second.job.get_status().updates_lost == 1
            for task in (resumed, again):
                await task.die()


@pytest.mark.parametrize("per_unit", [1, 2])
async def test_at_staleness_0_what_went_back_to_the_middle_of_a_batch_is_computed_again(
    tmp_path: Path, per_unit: int
) -> None:
    """Of two optimizers the checkpoint had the first one's update; what a worker had reported late was believed. Of two
    models in turn that update is all: the report says so, and the batch was computed again, beside another one."""
    async with contextlib.AsyncExitStack() as stack:
        config = {"checkpoint_dir": str(tmp_path), "num_workers": 1, "num_ps": 1}
        running, [worker], [server] = await stack.enter_async_context(cluster(**config))
        await until(lambda: running.job.journal.history.checkpoint)
        await worker.open(staleness=0.0)
        await worker.next(steps_per_unit=2)
        await server.session.die()
        await until(lambda: not running.job.sessions.servers)
        reborn = FakePs(0)
        await stack.enter_async_context(ps(running.address, reborn))
        await until(lambda: running.job.sessions.live("ps"))
        reborn.apply(Unit(1, 0, 0), num_servers=1)
        await worker.next([0], wait=False, steps_per_unit=per_unit)
        assert (0 in running.job.lease_book.epoch(1, 0).accepted) == (per_unit == 1)
        reborn.apply(Unit(1, 0, 0), ordinal=1, num_servers=1)
        await worker.next([0], wait=False)
        assert 0 in running.job.lease_book.epoch(1, 0).accepted


async def test_a_ps_that_dies_while_a_checkpoint_is_written_goes_back_to_that(tmp_path: Path) -> None:
    """What it had given to it was counted as lost, and is not."""
    async with cluster(checkpoint_dir=str(tmp_path), num_workers=1) as (running, [worker], servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await worker.open()
        await worker.next()
        applied(servers, 0, close=True)
        await worker.next([0], wait=False)
        servers[0].save_gate.clear()
        saving = asyncio.create_task(save(worker, tmp_path))
        await until(lambda: all("save" in server.calls[-1:] for server in servers))
        await servers[1].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        async with ps(running.address, Saved(1)) as reborn:
            await until(lambda: running.job.ps_pool.get(running.job.sessions.tasks["ps:1"].incarnation))
            servers[0].save_gate.set()
            await saving
            await until(lambda: len(running.job.sessions.live("ps")) == 2)
            assert reborn.restored_from == str(tmp_path / "step-00000001")


@pytest.mark.parametrize("refusal", ["", "ps:1 has no complete copy of ps:0 (incarnation 1)"])
def test_a_ps_that_comes_back_takes_the_copy_of_the_process_that_served_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refusal: str
) -> None:
    async def scenario() -> None:
        async with cluster(checkpoint_dir=str(tmp_path), ps_replicas=2) as (running, workers, servers):
            await until(lambda: running.job.journal.history.checkpoint)
            await workers[0].open()
            await workers[0].next(want=4)
            applied(servers, 0, 1, 2)
            await workers[0].next([0, 1], held=[2, 3], wait=False)
            await servers[0].session.die()
            await until(lambda: len(running.job.sessions.servers) == 1)
            unfinished = FakePs(0)  # dies before it is put back: workers never heard of it
            unfinished.initialized, unfinished.fence_gate = False, asyncio.Event()
            workers[1].goodbye(1)
            await until(lambda: running.job.sessions.fenced)
            async with ps(running.address, unfinished):
                pass
            await until(lambda: len(running.job.sessions.servers) == 1)
            reborn = Saved(0)
            reborn.initialized, reborn.refusal, reborn.closed = False, refusal, servers[0].closed
            reborn.open = servers[0].open
            async with ps(running.address, reborn):
                await until(lambda: len(running.job.sessions.live("ps")) == 2)
                assert reborn.taken_from == ("ps:1", 1)
                assert bool(reborn.restored_from) == bool(refusal)
                assert running.job.get_status().updates_lost == (1 if refusal else 0)

    pattern = (
        r"ps:0 restored step 0 from step-00000000: 1 updates lost"
        if refusal
        else r"ps:0 resumes from step 0, of which ps:1 had a copy: 0 updates lost"
    )
    with logged(caplog, pattern):
        run(scenario)


async def test_the_copy_of_a_ps_that_was_put_back_lacks_what_that_one_lacked(tmp_path: Path) -> None:
    """What was reported only then was gone without a word."""
    async with cluster(checkpoint_dir=str(tmp_path), ps_replicas=2) as (running, [worker, *_], servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await worker.open()
        await worker.next(want=2)
        applied(servers, 0, 1)
        await worker.next([0], held=[1], wait=False)
        await lose(running, servers[0])
        put_back, copied = FakePs(0), FakePs(0)
        put_back.initialized, put_back.refusal = False, "ps:1 has no complete copy of ps:0"
        async with ps(running.address, put_back):
            await until(lambda: len(running.job.sessions.live("ps")) == 2)
            assert put_back.restored_from and running.job.get_status().updates_lost == 1
            await lose(running, put_back)
        copied.initialized, copied.closed = False, put_back.closed
        async with ps(running.address, copied):
            await until(lambda: len(running.job.sessions.live("ps")) == 2)
            assert copied.taken_from and running.job.get_status().updates_lost == 1
            await worker.next([1], wait=False)
            assert running.job.get_status().updates_lost == 2 and copied.closed == {(1, 0): UnitBitmap.of([0, 1])}


@pytest.mark.parametrize("num_copies", [1, 2])
async def test_what_processes_of_a_ps_that_are_gone_may_have_lacked_is_kept_no_longer(
    tmp_path: Path, num_copies: int
) -> None:
    """The chief kept the bitmaps of all epochs for each death of a ps."""
    async with cluster(checkpoint_dir=str(tmp_path), ps_replicas=num_copies) as (running, [worker, *_], servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await worker.open()
        await worker.next(want=2)
        await lose(running, servers[0])
        for _ in range(4):
            reborn = FakePs(0)
            reborn.initialized = False
            async with ps(running.address, reborn):
                await until(lambda: len(running.job.sessions.live("ps")) == 2)
                assert reborn.taken_from if num_copies == 2 else reborn.restored_from
                await lose(running, reborn)
        assert len(running.job.recovery.ps_return._in_doubt) <= 2


@pytest.mark.parametrize("refusal", ["", "ps:1 has no complete copy of ps:0"])
async def test_a_ps_that_died_while_no_chief_was_there_takes_the_copy(tmp_path: Path, refusal: str) -> None:
    """Where there was none it was put back, and then took the copy of itself: what it had lost was not counted."""
    config: dict[str, Any] = {"num_workers": 1, "ps_replicas": 2, "state_dir": str(tmp_path / "state")}
    config["checkpoint_dir"] = str(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        async with chief(**config) as first:
            port = first.address
            dead = await stack.enter_async_context(ps(port, FakePs(0)))
            holder = await stack.enter_async_context(ps(port, FakePs(1)))
            worker = await Task(port, "worker:0").ready()
            await until(lambda: first.job.journal.history.checkpoint)
            await worker.open()
            await worker.next(want=2)
            applied([dead, holder], 0)
            await worker.next([0], held=[1], wait=False)
            of_incarnation = dead.session.incarnation
            await first.kill()
        async with chief(bind=port, **config) as second:
            reborn = FakePs(0)
            reborn.initialized, reborn.open, reborn.refusal = False, dead.open, refusal
            async with ps(port, reborn):
                tasks = [
                    Task(port, "ps:1", holder.session.address, holder.session.incarnation),
                    Task(port, "worker:0", resume=worker.incarnation),
                ]
                await until(lambda: second.job.is_open and len(second.job.sessions.live("ps")) == 2)
                assert reborn.taken_from == ("ps:1", of_incarnation)
                assert bool(reborn.restored_from) == bool(refusal)
                assert second.job.get_status().updates_lost == (1 if refusal else 0)
                for task in tasks:
                    await task.die()
        await worker.die()


async def test_a_job_that_begins_anew_closes_nothing_on_a_ps_that_had_gone_on_from_a_copy(tmp_path: Path) -> None:
    """What was accepted before all had died comes again, and that ps alone left it out, without a word."""
    asked = asyncio.Event()

    class Silent(FakePs):
        async def DescribeUnits(self, request: Any, context: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

    config: dict[str, Any] = {"num_workers": 1, "ps_replicas": 2, "state_dir": str(tmp_path / "state")}
    config["checkpoint_dir"] = str(tmp_path)
    async with chief(**config) as first:
        async with ps(first.address, FakePs(0)) as one, ps(first.address, FakePs(1)) as other:
            worker = await Task(first.address, "worker:0").ready()
            await until(lambda: first.job.journal.history.checkpoint)
            await worker.open()
            await worker.next()
            applied([one, other], 0, close=True)
            await worker.next([0], wait=False)
            assert first.job.lease_book.positions()
            await first.kill()
        await worker.die()
    async with chief(**config) as second, contextlib.AsyncExitStack() as stack:
        put_back = [FakePs(0), Silent(1)]
        for each in put_back:
            each.initialized, each.refusal = False, "the other one has no complete copy"
            await stack.enter_async_context(ps(second.address, each))
        await until(lambda: all(each.restored_from for each in put_back))
        worker = Task(second.address, "worker:0")
        await asked.wait()  # the books are being opened
        await lose(second, put_back[1])
        copied = FakePs(1)
        copied.initialized = False
        async with ps(second.address, copied):
            await until(lambda: second.job.is_open)
            assert copied.taken_from and second.job.get_status().updates_lost == 0 and not copied.closed
            await worker.die()


async def test_a_ps_that_is_lost_as_it_is_asked_for_a_copy_says_nothing_of_its_next_process(tmp_path: Path) -> None:
    """That one was taken for a survivor, with the memory that nobody had: what was accepted was gone without a word."""

    class Silent(FakePs):
        async def TakeOver(self, request: Any, context: Any) -> Any:
            self.taken_from = (request.holder, request.incarnation)
            await self.restore_gate.wait()
            return await super().TakeOver(request, context)

    config: dict[str, Any] = {"num_workers": 1, "ps_replicas": 2, "state_dir": str(tmp_path / "state")}
    config["checkpoint_dir"] = str(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        async with chief(**config) as first:
            for index in range(2):
                await stack.enter_async_context(ps(first.address, FakePs(index)))
            worker = Task(first.address, "worker:0")
            stack.push_async_callback(worker.die)
            await until(lambda: first.job.journal.history.checkpoint)
            await first.kill()
        async with chief(bind=first.address, **config) as second:
            await stack.enter_async_context(ps(first.address, FakePs(1)))
            lost, there = Silent(0), Silent(0)
            for each in (lost, there):
                each.refusal = "ps:1 has no complete copy of ps:0"
                each.restore_gate.clear()
            async with ps(first.address, lost):
                await until(lambda: lost.taken_from)
                await lost.session.die()
                async with ps(first.address, there):
                    await until(lambda: there.taken_from)
                    assert not second.job.sessions.tasks["ps:0"].resumed
                    for each in (lost, there):
                        each.restore_gate.set()


async def test_copies_are_refused_for_synchronous_steps() -> None:
    async with cluster(ps_replicas=2) as (_, workers, _):
        error = await refused(workers[0].open(staleness=0.0, num_slices=2))
        assert isinstance(error, ConfigurationError) and "need a staleness above 0" in str(error)


@pytest.mark.parametrize("plan", [{}, {"staleness": 0.0}], ids=["asynchronous", "staleness 0"])
async def test_a_ps_whose_chief_died_while_it_was_put_back_is_put_back_again(
    tmp_path: Path, plan: dict[str, Any]
) -> None:
    """The next chief took what it held for all there was: accepted updates were gone without a word."""
    folders = {"state_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "checkpoints")}

    async with contextlib.AsyncExitStack() as stack:
        async with cluster(**folders, num_ps=1, num_workers=1) as (first, [worker], [server]):
            await until(lambda: first.job.journal.history.checkpoint)
            await worker.open(**plan)
            await worker.next(want=1)
            applied([server], 0)
            await worker.next([0], held=[], wait=False)
            await server.session.die()
            await until(lambda: not first.job.sessions.servers)
            reborn = FakePs(0)
            reborn.restore_gate.clear()
            port = first.address
            await stack.enter_async_context(ps(port, reborn))
            await until(lambda: first.job.sessions.servers)
            place = first.job.sessions.tasks["ps:0"].address
            await first.kill()
        reborn.restore_gate.set()
        async with chief(bind=port, **folders, num_ps=1, num_workers=1) as second:
            resumed = Task(port, "worker:0", resume=worker.incarnation)
            again = Task(port, "ps:0", place, resume=reborn.session.incarnation, store_epoch=2)
            await until(lambda: second.job.is_open)
            if plan:
                assert second.job.lease_book.epoch(1, 0).num_accepted == 0
            else:
                assert second.job.get_status().updates_lost == 1 and 0 in reborn.closed[1, 0]
            for each in (resumed, again):
                await each.die()


@pytest.mark.parametrize("num_reborn", [1, 2])
@pytest.mark.parametrize("plan", [{}, {"staleness": 0.0}], ids=["asynchronous", "staleness 0"])
async def test_a_ps_whose_chief_died_after_it_was_put_back_and_before_the_books_were_open_is_counted_by_the_next(
    tmp_path: Path, plan: dict[str, Any], num_reborn: int
) -> None:
    """The next chief took it for one that had survived, and what it lacked was gone without a word. At staleness 0 the
    chief that leaves saves nothing: the other ps is yet to go back with it."""
    config: dict[str, Any] = {"state_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "c")}
    config["num_workers"] = 1

    async with contextlib.AsyncExitStack() as stack:
        async with chief(**config) as first:
            port = first.address
            servers = [await stack.enter_async_context(ps(port, FakePs(index))) for index in range(2)]
            worker = await Task(port, "worker:0").ready()
            await until(lambda: first.job.journal.history.checkpoint)
            await worker.open(**plan)
            await worker.next(want=1)
            applied(servers, 0, close=True)
            await worker.next([0], held=[], wait=False)
            survivors = [each.session for each in servers[num_reborn:]]
            await first.kill()
        async with chief(bind=port, **config) as second:  # the worker is away, so its books stay closed
            there = [Task(port, each.task, each.address, each.incarnation) for each in survivors]
            reborn = [await stack.enter_async_context(ps(port, FakePs(index))) for index in range(num_reborn)]
            await until(lambda: all(each.restored_from for each in reborn) and len(second.job.sessions.live("ps")) == 2)
            assert not second.job.is_open
            if plan:
                second.job.leave(143, "the chief got SIGTERM")
                await second.job.finished
                assert [path.name for path in (tmp_path / "c").glob("step-*")] == ["step-00000000"]
            await second.kill()
        async with chief(bind=port, **config) as third:
            sessions = [each.session for each in reborn]
            again = [Task(port, each.task, each.address, each.incarnation, store_epoch=2) for each in sessions]
            there += [Task(port, each.task, each.address, each.incarnation) for each in survivors]
            there += [*again, Task(port, "worker:0", resume=worker.incarnation)]
            await until(lambda: third.job.is_open)
            if plan:
                assert third.job.lease_book.epoch(1, 0).num_accepted == 0
            else:
                assert third.job.get_status().updates_lost == num_reborn
                assert all(0 in each.closed[1, 0] for each in reborn)
            for task in (*there, worker):
                await task.die()


async def test_a_ps_with_values_whose_welcome_was_lost_is_the_one_it_was(tmp_path: Path) -> None:
    """It was taken for a new process without memory, and put back, or the job was ended for want of a checkpoint."""
    async with cluster(num_ps=1) as (running, _, [server]):
        await until(lambda: running.job.journal.history.initialized)
        known = running.job.sessions.tasks["ps:0"]
        before = known.incarnation
        again = await Task(running.address, "ps:0", known.address, store_epoch=7).welcomed()
        assert again.incarnation == before.number and not server.restored_from
        new = await Task(running.address, "ps:0", known.address).welcomed()
        assert new.incarnation > before.number, "a process without values is another one"
        for each in (again, new):
            await each.die()


async def test_a_ps_that_lost_everything_without_a_checkpoint_stops_the_job() -> None:
    async with cluster(num_ps=1) as (running, workers, servers):
        await until(lambda: running.job.journal.history.initialized)
        await servers[0].session.die()
        reborn = FakePs(0)
        reborn.initialized = False
        async with ps(running.address, reborn):
            stop = await until(lambda: workers[0].ended("stop"))
            assert stop.exit_code == 1 and "restarted without its variables" in stop.reason
            assert "STRATAGEM_CHECKPOINT_DIR" in stop.reason


def serves(worker: Task, task: str) -> bool:
    """Whether the worker has heard so."""
    return any(info.live for info in worker.membership.tasks if info.task == task)


async def test_a_returning_ps_hears_all_fences_before_workers_hear_of_it(tmp_path: Path) -> None:
    async with cluster(num_ps=1) as (running, workers, servers):
        await servers[0].session.die()
        await workers[1].die()
        await until(lambda: running.job.sessions.lead == "worker:0" and running.job.sessions.fenced)
        await until(lambda: not serves(workers[0], "ps:0"))
        reborn = FakePs(0)
        reborn.fence_gate.clear()
        async with ps(running.address, reborn):
            assert not serves(workers[0], "ps:0")
            reborn.fence_gate.set()
            await until(lambda: serves(workers[0], "ps:0"))
            assert reborn.fenced == {"worker:1": workers[1].incarnation}
            assert workers[0].membership.routing_epoch == 0, "their number is as before"


async def test_a_restarted_chief_goes_on_with_the_same_tasks(tmp_path: Path) -> None:
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
            here = [back]
            async with beating(here):
                await back.welcomed()
                waiting = asyncio.create_task(back.next(want=9, held=[1]))
                for server in servers:
                    life = server.session
                    here.append(Task(port, life.task, life.address, life.incarnation))
                    await here[-1].welcomed()
                # worker:1 does not come back: after the session timeout its unit is leased to others; unit 3 was in
                # a reply that got lost.
                assert indices(await waiting) == [2, 3]
                assert all(server.fenced == {"worker:1": workers[1].incarnation} for server in servers)
                assert second.job.lease_book.epoch(1, 0).accepted == UnitBitmap.of([0])
                reply = await back.open()
                assert reply.seed == 3, "the plan of the job stands"
                assert (await back.next([1, 2, 3])).end
            for task in here:
                await task.die()
        for worker in workers:
            await worker.die()


async def test_a_new_job_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
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
