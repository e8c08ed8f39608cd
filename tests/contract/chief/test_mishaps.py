"""What the simulator found, each as the smallest story that shows it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import logging
import os
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from stratagem.checkpoint import durable
from stratagem.checkpoint.catalog import is_complete
from stratagem.checkpoint.draft import CheckpointDraft
from stratagem.checkpoint.durable import set_aside
from stratagem.chief.checkpointing import checkpoints
from stratagem.chief.checkpointing.checkpoints import ServersManifest
from stratagem.chief.checkpointing.saving import applied_units
from stratagem.chief.journal import journal as journal_file
from stratagem.chief.servers.servers import Server, ServerDescription
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Unit, UnitBitmap, Update
from stratagem.errors import ForbiddenError, PeerUnavailableError, StaleStoreError
from stratagem.rpc import errors
from stratagem.rpc.generated import chief_pb2
from stratagem.rpc.logs import Throttle
from tests.contract.chief.fakes import SYNC, FakePs, Task, applied, chief, cluster, indices, lose, ps, refused, until


class NotYet(FakePs):
    """Its part of the first checkpoint does not get done."""

    async def SaveShards(self, request: Any, context: Any) -> Any:
        await asyncio.Event().wait()


class HeldBack(FakePs):
    """Writes its part of a checkpoint while its gate is open."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.is_held_back = False
        self.save_gate = asyncio.Event()
        self.save_gate.set()

    async def SaveShards(self, request: Any, context: Any) -> Any:
        self.is_held_back = not self.save_gate.is_set()
        await self.save_gate.wait()
        return await super().SaveShards(request, context)


async def test_a_ps_that_dies_between_the_initial_values_and_the_first_checkpoint_gets_them_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stratagem")
    config: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "checkpoint_dir": str(tmp_path)}
    async with chief(**config) as running:
        async with ps(running.address, NotYet(0)):
            worker = await Task(running.address, "worker:0").ready()
            await until(lambda: running.job.journal.history.initialized)
        await until(lambda: not running.job.sessions.servers)
        reborn = FakePs(0)
        reborn.initialized = False
        async with ps(running.address, reborn):
            await until(lambda: running.job.sessions.live("ps"))
            reborn.initialized = True
            await until(lambda: running.job.journal.history.checkpoint)
            assert worker.ended("stop") is None
        await worker.die()
    assert "ps:0 restarted without its initial values; a worker provides them again" in caplog.text


async def test_no_unit_is_leased_while_a_ps_is_away_whose_initial_values_no_checkpoint_has(tmp_path: Path) -> None:
    """Its part of an update was gone with it: no checkpoint was one cut any more, and nobody got a unit again."""
    config: dict[str, Any] = {"num_workers": 1, "checkpoint_dir": str(tmp_path), "initialized": False}
    async with cluster(**config) as (running, [worker], servers):
        await worker.open()
        await servers[1].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        servers[0].initialized = True

        async def ask() -> str:
            await worker.next()
            return running.job.journal.history.checkpoint

        asked = asyncio.create_task(ask())
        before = servers[0].num_described
        await until(lambda: servers[0].num_described > before + 3 or asked.done())
        async with ps(running.address, FakePs(1)):
            assert await asked, "the first checkpoint came first"


async def test_the_next_chief_knows_that_a_ps_had_initial_values_which_are_gone_with_it(tmp_path: Path) -> None:
    """It took all ps for new ones and leased units: an update on initial values that no checkpoint has is not counted
    where it is lost."""
    folders = {"state_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "checkpoints")}
    sizes: dict[str, Any] = {"num_workers": 1, "num_ps": 2}
    blank = [FakePs(0), FakePs(1), FakePs(0)]
    for server in blank:
        server.initialized = False
    async with contextlib.AsyncExitStack() as stack:
        async with chief(**folders, **sizes) as first:
            for server in blank[:2]:
                await stack.enter_async_context(ps(first.address, server))
            worker = await Task(first.address, "worker:0").ready()
            await worker.open()
            blank[0].initialized = True
            before = blank[0].num_described
            await until(lambda: blank[0].num_described > before + 2)
            assert not first.job.journal.history.initialized
            await first.kill()
        async with chief(bind=first.address, **folders, **sizes) as second, ps(second.address, blank[2]):
            other = blank[1].session
            tasks = [
                Task(second.address, "ps:1", other.address, other.incarnation),
                Task(second.address, "worker:0", resume=worker.incarnation),
            ]
            await until(lambda: second.job.is_open and len(second.job.sessions.live("ps")) == 2)
            assert isinstance(await refused(tasks[1].next(wait=False)), StaleStoreError)
            for task in tasks:
                await task.die()


@pytest.mark.parametrize("plan", [{}, SYNC], ids=["asynchronous", "staleness 0"])
@pytest.mark.parametrize("ps_dies_first", [True, pytest.param(False, marks=pytest.mark.thorough)])
async def test_what_a_ps_loses_when_all_workers_have_finished_and_no_chief_is_there_is_counted(
    tmp_path: Path, plan: dict[str, Any], ps_dies_first: bool
) -> None:
    """The next chief ended the job at once, with what the ps had been put back to, and said nothing."""
    folders = {"state_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "checkpoints")}

    sizes: dict[str, Any] = {"num_workers": 1, "num_ps": 1}
    async with contextlib.AsyncExitStack() as stack:
        async with chief(**folders, **sizes) as first:
            old = HeldBack(0)
            await stack.enter_async_context(ps(first.address, old))
            worker = await Task(first.address, "worker:0").ready()
            await until(lambda: first.job.journal.history.checkpoint)
            await worker.open(**plan)
            await worker.next()
            old.apply(Unit(1, 0, 0))
            await worker.next([0], wait=False)
            old.save_gate.clear()
            if ps_dies_first:
                await old.session.die()
                await until(lambda: not first.job.sessions.servers)
            worker.goodbye()
            await until(lambda: first.job.sessions.stopping)
            await first.kill()
        await old.session.die()
        reborn = FakePs(0)
        reborn.initialized = False
        async with chief(bind=first.address, **folders, **sizes) as second, ps(second.address, reborn):
            await until(functools.partial(reborn.session.ended, "stop"))
            assert reborn.restored_from and 0 in reborn.closed[1, 0]
            assert second.job.get_status().updates_lost == 1
            reborn.session.goodbye()
            assert await second.exit_code() == (1 if plan else 0), "in step nothing is left of the work"


async def test_the_last_checkpoint_is_not_left_out_for_a_ps_that_is_away(tmp_path: Path) -> None:
    """What the others had was the step of the last checkpoint: the updates of the one that was away were gone. One that
    was back, and had yet to be put back to a checkpoint, looked as if it had nothing that is not in it."""
    async with cluster(checkpoint_dir=str(tmp_path)) as (running, _, servers):
        await until(lambda: running.job.journal.history.checkpoint)
        servers[1].apply(Unit(1, 0, 0))
        await servers[1].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        with pytest.raises(PeerUnavailableError, match="needs all 2 ps"):
            await running.job._maintenance.save_last()
        reborn = FakePs(1)
        reborn.initialized = False
        reborn.restore_gate.clear()
        async with ps(running.address, reborn):
            await until(lambda: len(running.job.ps_pool.servers) == 2)
            with pytest.raises(PeerUnavailableError, match="needs all 2 ps"):
                await running.job._maintenance.save_last()
            reborn.restore_gate.set()
            await until(lambda: len(running.job.ps_pool.ready) == 2)


class BrokenOnce(FakePs):
    """The connection breaks once, while its part of a checkpoint is asked for."""

    is_whole = True

    async def SaveShards(self, request: Any, context: Any) -> Any:
        if not self.is_whole:
            self.is_whole = True
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset by peer")
        return await super().SaveShards(request, context)


async def test_a_connection_that_breaks_during_the_last_checkpoint_does_not_cost_it(tmp_path: Path) -> None:
    config: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "checkpoint_dir": str(tmp_path)}
    server = BrokenOnce(0)
    async with chief(**config) as running, ps(running.address, server):
        worker = Task(running.address, "worker:0")
        await until(lambda: running.job.journal.history.checkpoint)
        server.apply(Unit(1, 0, 0), num_servers=1)
        server.is_whole = False
        worker.goodbye()
        await until(lambda: server.session and server.session.ended("stop"))
        assert server.is_whole and (tmp_path / "latest").read_text() == "step-00000001\n"
        await worker.die()


async def test_a_chief_that_stumbles_while_it_ends_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster() as (running, _, _):
        monkeypatch.setattr(running.job, "_end", None)  # an error of its own, say
        running.job.stop(0, "all done")
        assert await running.exit_code() == 1


async def test_a_hold_is_let_go_though_one_ps_is_gone() -> None:
    client = Server(Incarnation("ps:0", 3), "127.0.0.1:1", chief="chief:0", chief_epoch=1)
    await client.close()
    with pytest.raises(PeerUnavailableError, match=r"ps:0 \(incarnation 3\) is gone"):
        await client.release_commits(1)


async def test_a_hold_ends_though_who_needed_it_is_cancelled_as_it_leaves() -> None:
    async with cluster() as (running, _, servers):
        hold, go, inside = running.job.commit_hold, asyncio.Event(), asyncio.Event()

        async def save() -> None:
            async with hold.held("a checkpoint"):
                inside.set()
                await go.wait()

        saving = asyncio.create_task(save())
        await inside.wait()
        async with hold._lock:  # as while a ps is taken in that does not answer yet
            go.set()
            await asyncio.sleep(0)
            saving.cancel()
            await asyncio.wait([saving])
        await until(lambda: servers[0].calls[-1] == servers[1].calls[-1] == "release")


async def test_a_checkpoint_is_committed_though_who_asked_for_it_goes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on, commit = threading.Event(), threading.Event(), CheckpointDraft.commit

    def slow_commit(*arguments: Any, **more: Any) -> None:
        began.set()
        goes_on.wait(30.0)
        commit(*arguments, **more)

    monkeypatch.setattr(CheckpointDraft, "commit", slow_commit)
    async with cluster(checkpoint_roots=str(tmp_path)) as (_, workers, servers):
        for server in servers:
            server.step = 5
        request = chief_pb2.SaveCheckpointRequest(sender=workers[0].sender, directory=str(tmp_path))
        call = workers[0].stub.SaveCheckpoint(request)
        await until(began.is_set)
        call.cancel()
        await until(lambda: servers[0].calls[-1] == "release")
        goes_on.set()
        await until((tmp_path / "latest").exists)
        assert is_complete(tmp_path / "step-00000005")


async def test_the_others_hear_of_a_ps_that_comes_back_before_it_is_put_back(tmp_path: Path) -> None:
    """With copies, one waited for the copy of the process before it; the chief for that one, to take a worker's units
    back; and the new process for that: a minute, and the job had ended."""
    async with cluster(checkpoint_dir=str(tmp_path)) as (running, _, servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await servers[1].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        other = servers[0].session
        async with running.job.recovery.ps_return.lock, ps(running.address, FakePs(1)) as reborn:
            await reborn.session.welcomed()
            new = reborn.session.incarnation
            [told] = await until(lambda: [each for each in other.membership.tasks if each.incarnation == new])
            assert not told.live


async def test_a_call_that_is_under_way_to_a_ps_that_is_gone_fails() -> None:
    """It was cancelled, and with it whoever had made it: a checkpoint was neither taken nor refused."""
    async with chief(num_workers=1, num_ps=1) as running, ps(running.address, FakePs(0)) as server:
        server.fence_gate.clear()
        at = server.session.address
        client = Server(Incarnation("ps:0", 3), at, chief="chief:0", chief_epoch=1)
        calls = [asyncio.create_task(client.fence(Incarnation("worker:0", number))) for number in (1, 2)]
        await until(lambda: server.num_fencing == 2)
        calls[0].cancel()
        await client.close()
        with pytest.raises(PeerUnavailableError, match=r"ps:0 \(incarnation 3\) is gone"):
            await calls[1]
        await asyncio.wait(calls)
        assert calls[0].cancelled(), "whoever made it was to end"


def test_a_synchronous_step_that_only_some_ps_have_is_not_in_a_checkpoint() -> None:
    torn, whole = Update((Unit(1, 0, 0),), 0), Update((Unit(1, 0, 1),), 0)
    held = {
        Incarnation("ps:0", 1): ServerDescription(closed={}, open={torn: 2, whole: 2}),
        Incarnation("ps:1", 2): ServerDescription(closed={}, open={whole: 2}),
    }
    assert applied_units(held, {}) == {(1, 0): UnitBitmap.of([1])}


async def test_a_slice_that_every_ps_has_closed_is_accepted_by_a_chief_whose_journal_is_behind(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with chief(state_dir=str(tmp_path)) as first:
            port = first.address
            servers = [await stack.enter_async_context(ps(port, FakePs(index))) for index in range(2)]
            workers = [Task(port, f"worker:{index}") for index in range(2)]
            for worker in workers:
                await worker.ready()
                await worker.open(**SYNC)
            leases = [list((await worker.next()).leases) for worker in workers]
            for server in servers:
                server.close_unit(Unit(1, 0, 0))
            places = [first.job.sessions.tasks[f"ps:{index}"].address for index in range(2)]
            await first.kill()  # the end of the first slice was not in the journal
        lives = [server.session.incarnation for server in servers]
        async with chief(bind=port, state_dir=str(tmp_path)) as second:
            resumed = [
                Task(port, f"worker:{i}", resume=each.incarnation, held=leases[i] * i) for i, each in enumerate(workers)
            ]
            resumed += [Task(port, f"ps:{i}", places[i], lives[i], store_epoch=1) for i in range(2)]
            await until(lambda: second.job.is_open)
            assert second.job.lease_book.epoch(1, 0).num_accepted == 1
            assert second.job.lease_book.held(Incarnation("worker:1", resumed[1].incarnation))
            assert second.job.sessions.stopping is None and not second.job.lease_book.steps.orphans()
            for task in [*resumed, *workers]:
                await task.die()


async def test_a_hold_of_a_chief_that_died_ends_when_the_next_one_has_the_ps_back(tmp_path: Path) -> None:
    """It lasted 15 s, and all workers stood still."""
    config: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "state_dir": str(tmp_path)}
    server = FakePs(0)
    async with contextlib.AsyncExitStack() as stack:
        async with chief(**config) as first:
            port = first.address
            await stack.enter_async_context(ps(port, server))
            await until(lambda: first.job.sessions.live("ps"))
            await first.job.commit_hold.enter("a checkpoint")
            place = first.job.sessions.tasks["ps:0"].address
            await first.kill()
        assert server.token
        async with chief(bind=port, **config) as second:
            again = Task(port, "ps:0", place, server.session.incarnation, store_epoch=1)
            await until(lambda: second.job.sessions.live("ps"))
            assert not server.token
            await again.die()


async def closed_as_the_chief_dies(
    stack: contextlib.AsyncExitStack, sizes: dict[str, Any], is_reported: bool
) -> tuple[str, str, Task, FakePs, Any]:
    """Where chief and ps listen, the only worker in step, the only ps, which has closed its unit, and its leases."""
    async with chief(**sizes) as first:
        server = await stack.enter_async_context(ps(first.address, FakePs(0)))
        worker = await Task(first.address, "worker:0").ready()
        await worker.open(**SYNC)
        leases = (await worker.next()).leases
        server.close_unit(Unit(1, 0, 0))
        if is_reported:
            await worker.next([0], wait=False)
        place = first.job.sessions.tasks["ps:0"].address
        await first.kill()
    return first.address, place, worker, server, leases


async def test_a_chief_whose_machine_crashed_gives_no_step_a_number_that_a_ps_may_know(tmp_path: Path) -> None:
    """The ps took the new step for the old one, which was over: the workers made it again, for ever."""
    sizes: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "state_dir": str(tmp_path)}
    async with contextlib.AsyncExitStack() as stack:
        port, place, worker, server, [before] = await closed_as_the_chief_dies(stack, sizes, is_reported=True)
        journal = tmp_path / "journal.jsonl"
        lines = journal.read_text().splitlines(keepends=True)
        kept = [line for line in lines if '"kind":"step"' not in line and '"kind":"accepted"' not in line]
        assert len(kept) < len(lines), "they were not on the disk yet"
        journal.write_text("".join(kept))
        async with chief(bind=port, **sizes) as second:
            tasks = [
                Task(port, "worker:0", resume=worker.incarnation),
                Task(port, "ps:0", place, resume=server.session.incarnation, store_epoch=1),
            ]
            await until(lambda: second.job.is_open)
            [after] = (await tasks[0].next()).leases
            assert after.step > before.step and after.unit.index == 1
            for task in [*tasks, worker]:
                await task.die()


@pytest.mark.parametrize("reports", [True, False])
async def test_a_step_whose_unit_all_ps_have_closed_waits_for_the_word_of_its_worker(
    tmp_path: Path, reports: bool
) -> None:
    """The chief had died with its word that the unit is accepted: who had to wait for earlier steps waited for ever.
    And where the worker computed it again, the others waited for ever when it died."""
    sizes: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "state_dir": str(tmp_path)}
    async with contextlib.AsyncExitStack() as stack:
        port, place, worker, server, held = await closed_as_the_chief_dies(stack, sizes, is_reported=False)
        async with chief(bind=port, **sizes) as second:
            tasks = [
                Task(port, "worker:0", resume=worker.incarnation, held=held),
                Task(port, "ps:0", place, resume=server.session.incarnation, store_epoch=1),
            ]
            await until(lambda: second.job.is_open)
            assert second.job.lease_book.epoch(1, 0).accepted and 1 in second.job.lease_book.steps.open
            if reports:
                await tasks[0].next([0], wait=False)
            else:
                await tasks[0].die()
            await until(lambda: 1 not in second.job.lease_book.steps.open)
            await until(lambda: bool(server.closings[1][1]) is not reports)  # a dead one's part counts
            for task in [*tasks, worker]:
                await task.die()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was in the journal when it was last on disk."""
    found = [""]

    class Os:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        @staticmethod
        def fsync(fd: int) -> None:
            os.fsync(fd)
            found[:] = [Path(f"/proc/self/fd/{fd}").read_text()] if Path(f"/proc/self/fd/{fd}").is_file() else found

    monkeypatch.setattr(journal_file, "os", Os())
    return found


async def test_the_units_that_end_an_epoch_are_on_disk_before_anybody_leaves_it(
    tmp_path: Path, synced: list[str]
) -> None:
    """The chief's machine crashed, a ps died: nobody asked for them again, and they were not told to be lost."""
    async with cluster(num_workers=1, num_ps=1, state_dir=str(tmp_path)) as (running, [worker], _):
        await until(lambda: running.job.journal.history.initialized)  # the last that is on disk beside units
        await worker.open(num_examples=4)
        await worker.next(want=2)
        await worker.next([0], wait=False)
        assert '"kind":"accepted"' not in synced[0], "about one a second and worker need not wait for the disk"
        await worker.next([1], wait=False)
        assert synced[0].count('"kind":"accepted"') == 2


async def test_accepted_units_that_are_counted_as_lost_are_on_disk(tmp_path: Path, synced: list[str]) -> None:
    """The chief's machine crashed, the ps died: they came again, and were told to be lost all the same."""
    folders = {"checkpoint_dir": str(tmp_path / "saved"), "state_dir": str(tmp_path / "state")}
    async with cluster(num_workers=1, num_ps=1, **folders) as (running, [worker], servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await worker.open()
        await worker.next(want=4)
        await lose(running, servers[0])
        async with ps(running.address, FakePs(0)):
            await until(lambda: running.job.sessions.live("ps"))
            await worker.next([0], held=[1, 2, 3], wait=False)
            assert running.job.get_status().updates_lost == 1
            assert '"kind":"accepted"' in synced[0]


async def test_what_a_chief_learns_of_the_ps_when_it_comes_is_in_its_journal(tmp_path: Path) -> None:
    """Workers left an epoch that ended with that. The next chief, whose ps had died too, did not know these units."""
    config: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "state_dir": str(tmp_path)}
    server = FakePs(0)
    async with contextlib.AsyncExitStack() as stack:
        async with chief(**config) as first:
            port = first.address
            await stack.enter_async_context(ps(port, server))
            worker = await Task(port, "worker:0").ready()
            await worker.open(num_examples=4)
            await worker.next(want=2)
            for index in range(2):
                server.close_unit(Unit(1, 0, index))
            place = first.job.sessions.tasks["ps:0"].address
            await first.kill()
        async with chief(bind=port, **config) as second:
            resumed = Task(port, "worker:0", resume=worker.incarnation)
            again = Task(port, "ps:0", place, server.session.incarnation, store_epoch=1)
            assert (await resumed.next()).end
            assert journal_file.replay(tmp_path / "journal.jsonl").accepted == {(1, 0): UnitBitmap.of([0, 1])}
            await second.kill()
            for task in (resumed, again, worker):
                await task.die()


async def test_a_checkpoint_calls_nothing_accepted_that_a_ps_may_lack(tmp_path: Path) -> None:
    """A unit reported while shards were written may have been lost on a ps that went back to a checkpoint before."""
    folders = {"state_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "checkpoints")}
    async with chief(**folders, num_workers=1, num_ps=1) as running:
        server = HeldBack(0)
        async with ps(running.address, server):
            worker = await Task(running.address, "worker:0").ready()
            await until(lambda: running.job.journal.history.checkpoint)
            await worker.open()
            await worker.next()
            server.apply(Unit(1, 0, 0))
            server.save_gate.clear()
            num_saves = server.calls.count("save")
            saving = asyncio.create_task(running.job.saving.save(folders["checkpoint_dir"], automatic=False))
            await until(lambda: server.is_held_back)
            await worker.next([0], wait=False)
            server.save_gate.set()
            manifest = ServersManifest.read(Path((await saving).path))
            assert manifest is not None and not manifest.accepted and 0 in manifest.applied[1, 0]
            assert server.calls.count("save") == num_saves + 1
            await worker.die()


async def test_a_chief_that_is_started_again_leases_units_while_updates_of_the_dead_are_on_some_ps_alone(
    tmp_path: Path,
) -> None:
    """Its first checkpoint waited for them, and the worker that would have sent them for the checkpoint, for ever."""
    folders = {"state_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "checkpoints")}

    async with contextlib.AsyncExitStack() as stack:
        async with chief(**folders, num_workers=1) as first:
            servers = [await stack.enter_async_context(ps(first.address, FakePs(index))) for index in range(2)]
            worker = await Task(first.address, "worker:0").ready()
            await until(lambda: first.job.journal.history.checkpoint)
            await worker.open()
            await worker.next()
            servers[1].apply(Unit(1, 0, 0))
            places = [first.job.sessions.tasks[f"ps:{index}"].address for index in range(2)]
            await first.kill()
        lives = [server.session.incarnation for server in servers]
        async with chief(bind=first.address, **folders, num_workers=1) as second:
            tasks = [Task(first.address, f"ps:{i}", places[i], lives[i], store_epoch=1) for i in range(2)]
            tasks.append(Task(first.address, "worker:0"))
            await tasks[-1].ready()
            await until(lambda: second.job.sessions.tasks["ps:0"].resumed)
            await tasks[-1].open()
            assert indices(await tasks[-1].next()) == [0]
            for task in [*tasks, worker]:
                await task.die()


async def test_a_ps_that_holds_no_variables_is_not_waited_for_and_one_without_values_yet_is(tmp_path: Path) -> None:
    """Units were leased before the first checkpoint, and what a ps lost then was not counted."""

    config: dict[str, Any] = {"num_workers": 1, "checkpoint_dir": str(tmp_path), "initialized": False}
    async with cluster(**config) as (running, [worker], servers):
        await worker.open()
        servers[0].initialized = True
        error = await refused(worker.next())
        assert isinstance(error, StaleStoreError) and "ps:1 restarted without values" in str(error)
        assert not [*tmp_path.glob("step-*")]
        servers[1].complete = True
        assert indices(await worker.next()) == [0]
        assert running.job.journal.history.checkpoint
        assert running.job.journal.history.initialized == ["ps:0"]
        servers[0].apply(Unit(1, 0, 0), num_servers=1)
        servers[0].close_unit(Unit(1, 0, 0))
        await worker.next([0], wait=False)
        await servers[0].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        async with ps(running.address, FakePs(0)):
            await until(lambda: len(running.job.sessions.live("ps")) == 2)
            assert running.job.get_status().updates_lost == 1


async def test_a_checkpoint_that_fails_again_and_again_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log said the same at every attempt, of the chief's clock and of a worker that asks ten times a second."""
    monkeypatch.setattr(errors, "_REPEATED", Throttle(1, errors.AGAIN_S))  # without what other tests were refused
    caplog.set_level(logging.INFO, "stratagem")
    config: dict[str, Any] = {"num_workers": 1, "checkpoint_dir": str(tmp_path), "checkpoint_every_s": 0.001}
    async with cluster(**config) as (running, [worker], servers):
        await worker.open()
        await worker.next()
        await servers[0].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        save, ends = running.job._maintenance._save, asyncio.Semaphore(0)

        async def counted() -> None:
            await save()
            ends.release()

        running.job._maintenance._save = counted  # type: ignore[method-assign]
        for _ in range(4):
            await asyncio.wait_for(ends.acquire(), 30)
        for _ in range(4):
            await refused(worker.stub.SaveCheckpoint(chief_pb2.SaveCheckpointRequest(sender=worker.sender)))
        assert sum(message.startswith("No checkpoint: ") for message in caplog.messages) == 1
        assert sum(message.startswith("SaveCheckpoint refused: ") for message in caplog.messages) == 1
        async with ps(running.address, FakePs(0)):
            await until(lambda: len(running.job.sessions.live("ps")) == 2)
            await until(lambda: not running.job._maintenance._delay[0])


async def test_a_ps_without_values_is_told_of_though_the_first_checkpoint_waits_for_updates(tmp_path: Path) -> None:
    """It waited for those that the ps lacked, and whoever asked waited for it until the call was over, for ever."""

    config: dict[str, Any] = {"num_workers": 1, "checkpoint_dir": str(tmp_path), "initialized": False}
    async with cluster(**config) as (running, [worker], servers):
        await worker.open()
        servers[0].save_gate.clear()
        for server in servers:
            server.initialized = True
        await until(lambda: "save" in servers[0].calls)
        servers[1].complete = False
        error = await refused(worker.next())
        assert isinstance(error, StaleStoreError) and "ps:1 restarted without values" in str(error)
        servers[1].complete = True
        servers[0].save_gate.set()
        await until(lambda: running.job.journal.history.checkpoint)


async def test_no_unit_is_leased_where_values_were_and_are_gone(tmp_path: Path) -> None:
    """All ps were without any, and it looked as if the job had yet to begin: what was lost then was not counted."""

    config: dict[str, Any] = {"num_workers": 1, "checkpoint_dir": str(tmp_path), "initialized": False}
    async with cluster(**config) as (_, [worker], servers):
        await worker.open()
        servers[0].initialized = True
        assert isinstance(await refused(worker.next()), StaleStoreError)
        servers[0].initialized = False
        error = await refused(worker.next())
        assert isinstance(error, StaleStoreError) and "ps:0, ps:1 restarted without values" in str(error)


class WithoutValues(FakePs):
    """Has lost its values by the time that commits are held."""

    async def HoldCommits(self, request: Any, context: Any) -> Any:
        self.complete = "hold" in self.calls
        return await super().HoldCommits(request, context)


async def test_the_first_checkpoint_has_the_values_of_every_ps(tmp_path: Path) -> None:
    """A ps had come back without any since the chief had last looked, and was saved so."""

    config: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "checkpoint_dir": str(tmp_path)}
    async with chief(**config) as running, ps(running.address, WithoutValues(0)) as server:
        worker = await Task(running.address, "worker:0").ready()
        await until(lambda: running.job.journal.history.checkpoint)
        assert [call for call in server.calls if call != "release"] == ["hold", "hold", "save"]
        await worker.die()


class Elsewhere(FakePs):
    """It was started without the chief's checkpoint_dir."""

    async def SaveShards(self, request: Any, context: Any) -> Any:
        raise ForbiddenError(f"checkpoints may lie below no folder at all, but {request.directory!r} was asked for")


async def test_a_ps_that_was_not_started_for_the_folder_of_checkpoints_ends_the_job(tmp_path: Path) -> None:
    """The chief asked it again and again, with a line of the log each time, and the workers waited for ever."""
    config: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "checkpoint_dir": str(tmp_path)}
    async with chief(**config) as running, ps(running.address, Elsewhere(0)) as server:
        worker = await Task(running.address, "worker:0").ready()
        assert "below no folder at all" in (await until(lambda: worker.ended("stop"))).reason
        worker.goodbye(1)
        server.session.goodbye(1)
        assert await running.exit_code() == 2


async def test_a_script_that_saves_in_the_middle_of_a_unit_does_not_wait_for_what_a_ps_has_lost(tmp_path: Path) -> None:
    """The checkpoint waited for the rest of its update, which the worker would report after the checkpoint."""
    async with cluster(checkpoint_dir=str(tmp_path), num_workers=1) as (running, [worker], servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await worker.open()
        await worker.next()
        for server in servers:
            server.apply(Unit(1, 0, 0))
        await servers[0].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        async with ps(running.address, FakePs(0)) as reborn:
            await until(lambda: len(running.job.sessions.live("ps")) == 2)
            assert reborn.restored_from and not reborn.closed
            saved = await worker.stub.SaveCheckpoint(chief_pb2.SaveCheckpointRequest(sender=worker.sender))
            assert saved.path and 0 in reborn.closed[1, 0]
            await worker.next([0], wait=False)
            assert running.job.get_status().updates_lost == 1


async def test_what_is_loaded_before_the_chief_has_looked_is_what_a_ps_goes_back_to(tmp_path: Path) -> None:
    """There was a checkpoint, and the ps that was lost was not put back to it: it had to be given initial values."""
    config: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "checkpoint_dir": str(tmp_path)}
    async with chief(**config) as running:
        async with ps(running.address, FakePs(0)) as server:
            worker = await Task(running.address, "worker:0").ready()
            server.complete = False
            request = chief_pb2.SaveCheckpointRequest(sender=worker.sender, loaded=True)
            error = await refused(worker.stub.SaveCheckpoint(request))
            assert isinstance(error, StaleStoreError) and "the values of" in str(error)
            server.complete = True
            reply = await worker.stub.SaveCheckpoint(request)
            assert reply.path.endswith("step-00000000") and len(reply.store_epochs) == 1
            assert running.job.journal.history.initialized == ["ps:0"]
        await until(lambda: not running.job.sessions.servers)
        async with ps(running.address, FakePs(0)) as reborn:
            await until(lambda: reborn.restored_from)
            await worker.die()


async def test_a_chief_that_leaves_saves_no_initial_values_of_some_ps_only(tmp_path: Path) -> None:
    """A ps had come back without any: its checkpoint of step 0 had the other's variables alone."""
    config: dict[str, Any] = {"num_workers": 1, "num_ps": 2, "checkpoint_dir": str(tmp_path)}
    config["state_dir"] = str(tmp_path / "state")
    async with chief(**config) as running, ps(running.address, NotYet(0)) as first, ps(running.address, NotYet(1)):
        worker = await Task(running.address, "worker:0").ready()
        await until(lambda: running.job.journal.history.initialized)
        first.initialized = False
        with pytest.raises(PeerUnavailableError, match="needs the values of ps:0, which no worker has given"):
            await running.job._maintenance.save_last()
        await worker.die()


async def test_a_chief_that_leaves_takes_the_first_checkpoint_and_nobody_takes_another(tmp_path: Path) -> None:
    """Values were loaded between the two: the second one was refused, "it holds other weights", and ended the job."""
    sizes: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "checkpoint_dir": str(tmp_path)}
    async with cluster(initialized=False, **sizes) as (running, _, [server]):
        maintenance = running.job._maintenance
        running.job.journal.write("begun")
        running.job.journal.write("initialized", tasks=["ps:0"])
        server.save_gate.clear()
        server.initialized = True
        taken = asyncio.gather(maintenance.save_last(), maintenance._save_first())
        await until(lambda: "save" in server.calls)
        server.save_gate.set()
        await taken
        assert server.calls.count("save") == 1


async def test_a_checkpoint_that_was_set_aside_since_is_taken_again(tmp_path: Path) -> None:
    """A ps found it damaged, and had made up for what it lost: the job ended well, and its last checkpoint was none."""
    config: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "checkpoint_dir": str(tmp_path)}
    async with cluster(**config) as (running, _, servers):
        await until(lambda: running.job._maintenance.newest)
        applied(servers, 0, close=True)
        saved = await running.job._maintenance.save()
        set_aside(Path(saved.path))
        await running.job._maintenance.save_last()
        newest = checkpoints.newest(str(tmp_path))
        assert newest is not None and newest[0].name == "step-00000001"


@pytest.mark.parametrize("num_reads", [0, 1])
async def test_a_first_checkpoint_that_cannot_be_read_for_a_moment_is_no_reason_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_reads: int
) -> None:
    """A chief that was started again took another one of its step, which did not go: the job ended with 2."""
    sizes: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "checkpoint_dir": str(tmp_path)}
    async with cluster(initialized=False, **sizes) as (running, _, [server]):
        running.job.journal.write("begun")
        running.job.journal.write("initialized", tasks=["ps:0"])
        server.initialized = True
        maintenance = running.job._maintenance
        await until(lambda: maintenance.newest)
        monkeypatch.setattr(maintenance, "newest", None)
        real, num = durable.open_file, itertools.count()

        def open_file(path: Path) -> Any:
            if path.name == "manifest.json" and num_reads <= next(num) < num_reads + 3:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path)

        monkeypatch.setattr(durable, "open_file", open_file)
        server.groups = [*range(num_reads)]  # of a model that was prepared since: one with it takes its place
        await maintenance._save_first()
        assert maintenance.newest and running.job.sessions.stopping is None
    assert [path.name for path, _ in checkpoints.scan(str(tmp_path))] == ["step-00000000"]


async def test_the_first_checkpoint_is_taken_again_where_a_script_prepares_one_model_after_the_other(
    tmp_path: Path,
) -> None:
    """It lacked the second one: a ps that died before the next checkpoint went on with what a worker had made of it."""
    async with cluster(checkpoint_dir=str(tmp_path)) as (running, workers, servers):
        await until(lambda: running.job.journal.history.checkpoint)
        [(first, manifest)] = checkpoints.scan(str(tmp_path))
        for server in servers:
            server.groups = [0, 16]
        for worker in workers:
            await worker.open()
            assert (await worker.next()).leases
        [(path, again)] = checkpoints.scan(str(tmp_path))
        assert path == first and manifest.files != again.files, "of the same step"
        assert again.num_groups == 4 and [server.calls.count("save") for server in servers] == [2, 2]


@pytest.mark.parametrize("automatic", [True, False])
async def test_a_model_that_is_trained_after_another_one_is_in_the_last_checkpoint(
    tmp_path: Path, automatic: bool
) -> None:
    """The step, the first one's updates, stayed: nothing was new to the chief until the second one had more."""
    async with cluster(checkpoint_dir=str(tmp_path), num_workers=1) as (running, [worker], servers):
        await worker.open()
        await worker.next()
        applied(servers, 0, close=True)
        await worker.next([0], wait=False)
        job = running.job
        before = await (job._maintenance.save() if automatic else job.saving.save(str(tmp_path), automatic=False))
        for server in servers:
            server.close_unit(Unit(1, 0, 1))
            server.num_of_second = 1
        worker.goodbye()
        for server in servers:
            await server.session.stopped()
        assert await running.exit_code() == 0
    found = checkpoints.newest(str(tmp_path))
    assert found is not None and (found[1].step, found[1].num_updates) == (1, 4)
    assert (found[0] == Path(before.path)) is automatic, "one that was asked for stays"
    async with cluster(checkpoint_dir=str(tmp_path), num_workers=1, num_ps=1) as (running, [worker], [server]):
        server.step, server.num_of_second = 1, 3
        await worker.open()
        await worker.next()
        server.close_unit(Unit(1, 0, 2))
        server.num_of_second = 4
        worker.goodbye()
        await server.session.stopped()
        assert await running.exit_code() == 0
    again = checkpoints.newest(str(tmp_path))
    assert again is not None and (again[1].step, again[1].num_updates, again[1].num_ps) == (1, 5, 1)


async def test_no_unit_is_leased_while_a_ps_is_back_from_before_a_model_was_prepared(tmp_path: Path) -> None:
    """It had all that the checkpoint has, and was taken for complete: a model was trained that was in no checkpoint."""
    async with cluster(checkpoint_dir=str(tmp_path), num_workers=1) as (running, [worker], servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await worker.open()
        servers[0].groups = [0, 16]
        servers[1].groups = [0]
        assert isinstance(await refused(worker.next(num_groups=4)), StaleStoreError)
        servers[1].groups = [0, 16]
        assert (await worker.next(num_groups=4)).leases
        [(_, manifest)] = checkpoints.scan(str(tmp_path))
        assert manifest.num_groups == 4


async def test_units_go_on_up_to_where_a_model_is_prepared_that_a_dead_worker_gave_to_some_ps(tmp_path: Path) -> None:
    """A chief that was started then told the worker that followed to give values that it did not have yet, for ever."""
    async with cluster(num_workers=1) as (running, _, servers):
        for server in servers:
            server.groups = [0]
        await running.job.saving.save(str(tmp_path), automatic=True)
    async with cluster(checkpoint_dir=str(tmp_path), num_workers=1) as (running, [worker], servers):
        for server in servers:
            server.groups = [0]
            server.apply(Unit(1, 0, 0))
        servers[0].groups, servers[1].complete = [0, 16], False
        await worker.open()
        assert (await worker.next(num_groups=2)).leases
        assert isinstance(await refused(worker.next([0], num_groups=4)), StaleStoreError), "it may give what lacks"


@pytest.mark.parametrize("fails", [False, True])
async def test_no_unit_of_a_model_that_is_prepared_later_is_leased_before_a_checkpoint_has_it(
    tmp_path: Path, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """At staleness 0 the ps that went back to one without it kept what it had learned, and its examples came again."""
    async with cluster(checkpoint_dir=str(tmp_path / "there"), num_workers=1) as (_, [worker], servers):
        for server in servers:
            server.groups = [0]
        await worker.open()
        await worker.next(num_groups=2)
        applied(servers, 0, close=True)
        for server in servers:
            server.groups = [0, 16]
        if fails:
            (tmp_path / "there").rename(tmp_path / "away")
            (tmp_path / "there").write_text("no folder")
        assert (await worker.next([0], num_groups=4)).leases
        found = checkpoints.newest(str(tmp_path / ("away" if fails else "there")))
        assert found is not None and found[1].num_groups == (2 if fails else 4)
        assert ("No checkpoint: " in caplog.text) is fails


async def test_the_checkpoint_of_a_model_that_is_prepared_later_waits_for_no_update_of_a_dead_worker(
    tmp_path: Path,
) -> None:
    """Nobody completed it before a unit was leased, and that waited for the checkpoint."""
    async with cluster(checkpoint_dir=str(tmp_path), num_workers=2) as (running, [worker, other], servers):
        for server in servers:
            server.groups = [0]
        for each in (worker, other):
            await each.open()
            await each.next(num_groups=2)
        applied(servers, 0, close=True)
        servers[0].apply(Unit(1, 0, 1))
        other.goodbye(exit_code=1)
        await until(lambda: running.job.sessions.fenced.get("worker:1"))
        for server in servers:
            server.groups = [0, 16]
        assert [lease.unit.index for lease in (await worker.next([0], num_groups=4)).leases] == [1]
        found = checkpoints.newest(str(tmp_path))
        assert found is not None and found[1].num_groups == 4


async def test_a_checkpoint_in_the_middle_of_a_batch_is_replaced_by_one_of_the_rest(tmp_path: Path) -> None:
    """Two optimizers, with variables on two ps: by the second one's update neither has a step more than the other."""
    async with cluster(checkpoint_dir=str(tmp_path), num_workers=1) as (running, [worker], servers):
        await worker.open()
        await worker.next(steps_per_unit=2)
        servers[0].apply(Unit(1, 0, 0), 0, num_servers=1)
        half = await running.job.saving.save(str(tmp_path), automatic=True)
        assert half.manifest.unfinished == {(1, 0): UnitBitmap.of([0])}
        assert half.manifest.applied == half.manifest.unfinished and not half.manifest.done
        servers[1].apply(Unit(1, 0, 0), 1, num_servers=1)
        whole = await running.job.saving.save(str(tmp_path), automatic=True)
        assert half.path == whole.path and half.manifest.files != whole.manifest.files
        assert not whole.manifest.unfinished and whole.manifest.done == {(1, 0): UnitBitmap.of([0])}


async def test_a_checkpoint_that_a_script_asked_for_is_not_replaced_where_it_prepares_another_model(
    tmp_path: Path,
) -> None:
    async with cluster(num_workers=1) as (running, _, servers):
        for server in servers:
            server.groups = [0]
        await running.job.saving.save(str(tmp_path), automatic=False)
    [before] = checkpoints.scan(str(tmp_path))
    async with cluster(checkpoint_dir=str(tmp_path), num_workers=1) as (_, [worker], servers):
        for server in servers:
            server.groups = [0, 16]
        await worker.open()
        assert (await worker.next()).leases
        assert [before] == checkpoints.scan(str(tmp_path))


async def test_a_ps_whose_rows_nobody_trains_has_lost_no_update(tmp_path: Path) -> None:
    async with cluster(checkpoint_dir=str(tmp_path), num_workers=1) as (running, [worker], servers):
        await worker.open()
        await worker.next()
        servers[0].apply(Unit(1, 0, 0), num_servers=1)
        for server in servers:
            server.close_unit(Unit(1, 0, 0))
        await worker.next([0], wait=False)
        await servers[1].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        reborn = FakePs(1)
        reborn.untrained = True
        async with ps(running.address, reborn):
            await until(lambda: len(running.job.sessions.live("ps")) == 2)
            assert reborn.restored_from and running.job.get_status().updates_lost == 0


@pytest.mark.parametrize("leases", [True, False])
async def test_a_ps_that_held_nothing_before_a_second_model_was_prepared_is_put_back_too(
    tmp_path: Path, leases: bool
) -> None:
    """It came back without anything, its tables began anew, and no update counted as lost."""
    config: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "num_workers": 1, "initialized": False}
    async with cluster(**config) as (running, [worker], servers):
        servers[1].complete = True
        servers[0].initialized, servers[0].groups = True, [0]
        await worker.open()
        await worker.next(num_groups=1)
        assert running.job.journal.history.initialized == ["ps:0"]
        servers[1].initialized, servers[1].groups = True, [16]
        if leases:
            await worker.next(num_groups=2)
        else:  # a script with a pipeline of its own
            servers[1].session.beat(bytes_held=4)
            await until(lambda: running.job.journal.history.initialized == ["ps:0", "ps:1"])
        await servers[1].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        async with ps(running.address, FakePs(1)) as reborn:
            await until(lambda: len(running.job.sessions.live("ps")) == 2)
            assert reborn.restored_from


async def test_units_are_leased_again_whose_updates_keep_the_first_checkpoint_from_being_one_cut(
    tmp_path: Path,
) -> None:
    """It waited for them, and the worker that would have sent them for the checkpoint, for ever."""
    config: dict[str, Any] = {"num_workers": 1, "checkpoint_dir": str(tmp_path), "initialized": False}
    async with cluster(**config) as (running, [worker], servers):
        await worker.open()
        assert indices(await worker.next()) == [0], "initial values may come with the first step"
        servers[1].apply(Unit(1, 0, 0))
        await worker.die()
        for server in servers:
            server.initialized = True
        again = await Task(running.address, "worker:0").welcomed()
        assert indices(await again.next()) == [0]
        assert not running.job.journal.history.checkpoint
        servers[0].apply(Unit(1, 0, 0))
        await until(lambda: running.job.journal.history.checkpoint)
        await again.die()


async def test_no_unit_of_a_model_is_leased_where_a_ps_lost_its_first_values_before_anybody_had_looked(
    tmp_path: Path,
) -> None:
    """It was taken for a script without variables, and what it trained before the first checkpoint died with a ps."""
    async with cluster(initialized=False, checkpoint_dir=str(tmp_path), num_workers=1) as (_, [worker], servers):
        await worker.open()
        for server in servers:
            server.groups = []
        assert isinstance(await refused(worker.next(num_groups=1)), StaleStoreError)
        assert (await worker.next()).leases, "of a script without variables"


async def test_the_first_checkpoint_goes_on_when_who_waits_for_it_asks_again(tmp_path: Path) -> None:
    """One that took longer than a call of a worker began anew with each call, for ever."""
    sizes: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "checkpoint_dir": str(tmp_path)}
    async with cluster(initialized=False, **sizes) as (_, [worker], [server]):
        await worker.open()
        server.save_gate.clear()
        server.initialized = True
        first = asyncio.create_task(worker.next(wait=False))
        await until(lambda: "save" in server.calls)
        first.cancel()
        again = asyncio.create_task(worker.next(wait=False))
        await until(lambda: server.num_described and not again.done())
        await asyncio.sleep(0.1)
        server.save_gate.set()
        assert indices(await again) == [0] and server.calls.count("save") == 1
