"""The end of a job: every ps hears of it, also one that died a moment before, or comes when the chief is gone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from stratagem.checkpoint import ended
from stratagem.chief.journal.journal import NAME, Journal
from stratagem.chief.journal.lock import STANDBY_NAME, JournalLock, standing_by
from stratagem.chief.maintenance import Maintenance
from stratagem.chief.membership.session import SessionState
from stratagem.chief.servicer import ChiefServicer
from stratagem.cluster.config import PsConfig
from stratagem.cluster.exit_codes import EXIT_PREEMPTED
from stratagem.cluster.units import Unit
from stratagem.errors import CheckpointError, JournalLostError
from stratagem.ps.__main__ import run as run_ps
from stratagem.rpc import session as rpc_session
from stratagem.rpc.generated import chief_pb2
from stratagem.rpc.session import SessionClient
from tests.contract.chief.fakes import Chief, FakePs, Task, chief, cluster, lose, ps, until
from tests.file_sizes import file_size_limit


async def until_late(running: Chief, condition: Callable[[], Any]) -> None:
    """Polls, while for the end of the job time flies."""
    late = itertools.count(1000, 1000)

    def look() -> Any:
        if found := condition():
            return found
        late_s = next(late)
        running.job._end._clock = lambda: time.monotonic() + late_s
        running.job.changed.notify()

    await until(look)


async def test_the_chief_waits_for_a_ps_that_died_a_moment_before_the_end(tmp_path: Path) -> None:
    async with cluster(checkpoint_dir=str(tmp_path)) as (running, workers, servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await servers[1].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        servers[0].apply(Unit(1, 0, 0))
        for worker in workers:
            worker.goodbye()
        await until(lambda: running.job.sessions.stopping)
        assert not servers[0].session.ended("stop"), "the last checkpoint waits"
        async with ps(running.address, FakePs(1)) as reborn:
            for session in (servers[0].session, reborn.session):
                assert (await session.stopped()).exit_code == 0
            assert await running.exit_code() == 0
            assert "save" in reborn.calls and (tmp_path / "latest").read_text() == "step-00000001\n"
        assert not list(tmp_path.glob("*ended*")), "everybody has heard of the end"


async def test_the_chief_waits_for_an_evaluator_that_died_a_moment_before_the_end() -> None:
    """Nobody evaluated the last checkpoint."""
    async with chief(num_workers=1, num_ps=0) as running:
        worker, evaluator = Task(running.address, "worker:0"), Task(running.address, "evaluator:0")
        await worker.ready()
        await evaluator.welcomed()
        await evaluator.die()
        await until(lambda: running.job.sessions.tasks["evaluator:0"].state is SessionState.LOST)
        worker.goodbye()
        await until(lambda: running.job.journal.history.ending)
        again = Task(running.address, "evaluator:0")
        assert (await until(functools.partial(again.ended, "stop"))).exit_code == 0
        assert not running.job.finished.done(), "it waited"
        again.goodbye()
        assert await running.exit_code() == 0
        await worker.die()
        await again.die()


async def test_the_next_chief_stays_for_who_does_not_know_that_its_goodbye_was_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended at once, and a worker waited a minute for it."""
    monkeypatch.setattr("stratagem.chief.job_end.RETURN_S", 1000.0)
    ring: dict[str, Any] = {"num_workers": 1, "num_ps": 0, "state_dir": str(tmp_path)}
    async with chief(**ring) as running:
        monkeypatch.setattr(running.job._end, "see_off", lambda stop: asyncio.Event().wait())
        worker = await Task(running.address, "worker:0").ready()
        worker.goodbye()
        await until(lambda: running.job.journal.history.done)
        await running.kill()
        await worker.die()
    async with chief(**ring) as again:
        await until(lambda: again.job.journal.history.ending)
        back = Task(again.address, "worker:0", resume=worker.incarnation)
        await until(lambda: back.error)
        assert back.error is not None and back.error.code().name != "UNAVAILABLE", "it hears from a chief"
        assert not again.job.finished.done()
        await back.die()
        await until_late(again, again.job.finished.done)


@pytest.mark.thorough
async def test_the_next_chief_does_not_wait_twice_for_a_ps_that_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It awaited those whose goodbye the last one had not noted, and then waited for them again, as for a lost ps."""
    monkeypatch.setattr("stratagem.chief.job_end.LATE_S", 1000.0)
    options: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "state_dir": str(tmp_path), "session_timeout_s": 0.5}
    async with chief(**options, heartbeat_interval_s=0.1) as running, ps(running.address, FakePs(0)):
        worker = await Task(running.address, "worker:0").ready()
        worker.goodbye()
        await until(lambda: running.job.journal.history.ending)
        await running.kill()
        await worker.die()
    async with chief(**options, heartbeat_interval_s=0.1) as again:
        assert await again.exit_code() == 0


class Full(FakePs):
    """Has no room for another checkpoint."""

    async def SaveShards(self, request: Any, context: Any) -> Any:
        if self.step:
            raise CheckpointError(f"ps:{self.index} cannot write its shards: no space left")
        return await super().SaveShards(request, context)


@pytest.mark.parametrize("stays", [True, False])
async def test_a_job_that_is_told_to_end_and_not_saved_is_not_preempted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stays: bool
) -> None:
    """It ended with 143, which says that a checkpoint is saved."""
    config: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "checkpoint_dir": str(tmp_path)}
    async with chief(**config, checkpoints_stay=stays) as running, ps(running.address, Full(0)) as server:
        worker = await Task(running.address, "worker:0").ready()
        await until(lambda: running.job.journal.history.checkpoint)
        server.apply(Unit(1, 0, 0))
        running.job.stop(143, "the chief got SIGINT")
        worker.goodbye(143)
        await server.session.stopped()
        assert await running.exit_code() == (1 if stays else 143)
    assert ("shut down but not saved: no last checkpoint (ps:0 cannot write" in caplog.text) is stays
    assert (f"the newest is {tmp_path}/step-00000000. A job that is started resumes from" in caplog.text) is stays


async def test_a_job_whose_chief_is_restarted_while_no_checkpoint_can_be_written_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next chief ended it with 2: to it, its first checkpoint was that of the job."""
    config: dict[str, Any] = {"num_workers": 1, "num_ps": 1, "checkpoint_dir": str(tmp_path / "checkpoints")}
    config["state_dir"] = str(tmp_path / "state")
    async with chief(**config) as running, ps(running.address, Full(0)) as server:
        worker = await Task(running.address, "worker:0").ready()
        await worker.open()
        await worker.next()
        server.apply(Unit(1, 0, 0))
        place = running.job.sessions.tasks["ps:0"].address
        await running.kill()
        async with chief(running.address, **config) as following:
            stays = Task(running.address, "ps:0", place, server.session.incarnation, store_epoch=1)
            tasks = [await Task(running.address, "worker:0").welcomed(), await stays.welcomed()]
            await until(lambda: "No checkpoint: ps:0 cannot write its shards: no space left" in caplog.text)
            await tasks[0].open()
            assert (await tasks[0].next()).leases and following.job.sessions.stopping is None
            for task in tasks:
                await task.die()


@pytest.mark.parametrize("stays", [True, False])
async def test_work_that_is_done_and_not_saved_is_not_done_well_unless_nobody_asked_for_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stays: bool
) -> None:
    """The last checkpoint could not be written, and the job ended with exit code 0."""
    folders: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "checkpoints"), "state_dir": str(tmp_path / "state")}
    folders |= {"checkpoints_stay": stays}
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(chief(num_workers=1, num_ps=1, **folders))
        server = await stack.enter_async_context(ps(running.address, Full(0)))
        worker = Task(running.address, "worker:0")
        stack.push_async_callback(worker.die)
        await worker.ready()
        await until(lambda: running.job.journal.history.checkpoint)
        server.apply(Unit(1, 0, 0))
        worker.goodbye()
        assert (await server.session.stopped()).exit_code == 0, "it has done its part"
        assert await running.exit_code() == stays
        assert "ps:0 cannot write its shards: no space left" in caplog.text
        assert ("not saved: no last checkpoint (ps:0 cannot write its shards" in caplog.text) is stays
        assert (f"the newest is {folders['checkpoint_dir']}/step-00000000" in caplog.text) is stays
        await running.kill()
        if not stays:
            return
        async with chief(num_workers=1, num_ps=1, **folders) as again:
            assert await again.exit_code() == 42, "whoever starts it again learns the same, so nobody should"


async def test_a_job_that_finds_nothing_left_to_do_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With another number of ps it tried to replace what it had begun from, which it is said to leave alone."""

    async def not_yet(self: Maintenance) -> None:
        """The workers are done before the chief has come to its first checkpoint."""

    sizes: dict[str, Any] = {"num_workers": 1, "checkpoint_dir": str(tmp_path)}
    async with cluster(num_ps=1, **sizes) as (before, _, _):
        await until(lambda: before.job.journal.history.checkpoint)
    monkeypatch.setattr(Maintenance, "_save_first", not_yet)
    async with cluster(num_ps=2, **sizes) as (running, [worker], servers):
        await until(lambda: running.job.journal.history.initialized)
        worker.goodbye()
        for server in servers:
            await server.session.stopped()
        assert await running.exit_code() == 0
    assert "No last checkpoint" not in caplog.text


class Damaged(FakePs):
    """Finds its part of every checkpoint damaged."""

    async def RestoreShards(self, request: Any, context: Any) -> Any:
        await self.restore_gate.wait()
        raise CheckpointError(f"ps-{self.index}.json was altered")


async def test_a_ps_to_which_nothing_could_be_given_back_is_in_no_last_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The job was over: that it cannot go on was said to nobody, and what was saved last had half of the model."""
    async with cluster(checkpoint_dir=str(tmp_path), num_workers=1) as (running, [worker], servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await worker.open()
        await worker.next()
        await servers[1].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        servers[0].apply(Unit(1, 0, 0))
        reborn = Damaged(1)
        reborn.initialized = False
        reborn.restore_gate.clear()
        async with ps(running.address, reborn):
            worker.goodbye()
            await until(lambda: running.job.sessions.stopping)
            reborn.restore_gate.set()
            await until(lambda: "ps-1.json was altered" in caplog.text)
            await until_late(running, lambda: running.job.journal.history.ending)
            for session in (servers[0].session, reborn.session):
                await session.stopped()
            assert await running.exit_code() == 1
            assert "save" not in reborn.calls
    assert "No last checkpoint" in caplog.text


@pytest.mark.thorough
async def test_a_chief_that_follows_saves_no_ps_either_to_which_nothing_could_be_given_back(tmp_path: Path) -> None:
    """It took it for one that had been put back, and what was saved last had half of the model."""
    sizes: dict[str, Any] = {"num_workers": 1, "checkpoint_dir": str(tmp_path), "state_dir": str(tmp_path / "s")}
    reborn = Damaged(1)
    reborn.initialized = False
    async with contextlib.AsyncExitStack() as stack:
        async with chief(**sizes) as first:
            fakes = [await stack.enter_async_context(ps(first.address, FakePs(index))) for index in range(2)]
            worker = Task(first.address, "worker:0")
            stack.push_async_callback(worker.die)
            await worker.ready()
            await until(lambda: first.job.journal.history.checkpoint)
            await worker.open()
            await worker.next()
            await fakes[1].session.die()
            await until(lambda: len(first.job.sessions.servers) == 1)
            fakes[0].apply(Unit(1, 0, 0))
            worker.goodbye()
            await until(lambda: first.job.sessions.stopping)
            await stack.enter_async_context(ps(first.address, reborn))
            await until(lambda: len(first.job.sessions.live("ps")) == 2)
            places = [first.job.sessions.tasks[f"ps:{index}"].address for index in range(2)]
            await first.kill()
        async with chief(bind=first.address, worker_timeout_s=0.5, **sizes) as second:
            lives = [each.session.incarnation for each in (fakes[0], reborn)]
            tasks = [Task(first.address, f"ps:{i}", places[i], lives[i], store_epoch=1) for i in range(2)]
            for task in tasks:
                assert (await task.stopped()).reason
            await second.exit_code()
            assert "save" not in reborn.calls
            for task in tasks:
                await task.die()


async def test_a_ps_that_is_not_put_back_yet_is_in_no_checkpoint(tmp_path: Path) -> None:
    async with cluster(checkpoint_dir=str(tmp_path)) as (running, _, servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await servers[1].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        reborn = FakePs(1)
        reborn.restore_gate.clear()
        async with ps(running.address, reborn):
            await until(lambda: len(running.job.sessions.servers) == 2)
            with pytest.raises(Exception, match="a checkpoint needs all 2 ps; 1 are here now"):
                await running.job.saving.save(str(tmp_path), automatic=False)
            reborn.restore_gate.set()
            await until(lambda: len(running.job.sessions.live("ps")) == 2)
            await running.job.saving.save(str(tmp_path), automatic=False)


async def test_the_end_is_written_for_a_ps_that_stays_away(tmp_path: Path) -> None:
    async with cluster(checkpoint_dir=str(tmp_path)) as (running, workers, servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await servers[1].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        for worker in workers:
            worker.goodbye()
        await until_late(running, lambda: running.job.journal.history.ending)
        await servers[0].session.stopped()
        await until(lambda: not running.job.sessions.servers)
        await until_late(running, running.job.finished.done)
        assert await running.exit_code() == 1, "what it held is in no checkpoint"
    assert [path.name for path in tmp_path.glob("*ended*")] == ["ended-ps-1"], "ps:0 has said goodbye"
    told = ended.take_end(str(tmp_path), "ps:1")
    assert told is not None and "every worker has finished" in str(told) and told.exit_code == 0
    assert ended.take_end(str(tmp_path), "ps:1") is None, "the ps of another job, before its chief"
    ended.write_end(str(tmp_path), "every worker has finished", ["ps:1"])
    async with chief(checkpoint_dir=str(tmp_path)):
        assert ended.take_end(str(tmp_path), "ps:1") is None, "another job has begun"


async def test_the_end_is_written_for_a_ps_that_waited_to_be_taken_in(tmp_path: Path) -> None:
    """One that had said nothing was forgotten; started again, it waited for a chief."""
    async with cluster(checkpoint_dir=str(tmp_path)) as (running, workers, servers):
        await until(lambda: running.job.journal.history.checkpoint)
        newcomer = await Task(running.address, "ps:2", "127.0.0.1:1").welcomed()
        for worker in workers:
            worker.goodbye()
        await until(functools.partial(newcomer.ended, "stop"))
        await newcomer.die()
        await until(lambda: running.job.sessions.tasks["ps:2"].state is SessionState.LOST)
        for server in servers:
            await server.session.stopped()
        await until_late(running, running.job.finished.done)
        assert await running.exit_code() == 0
    assert [path.name for path in tmp_path.glob("*ended*")] == ["ended-ps-2"]


def test_an_old_end_says_nothing_and_a_new_one_all_where_clocks_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = time.time() + 86_400
    monkeypatch.setattr(time, "time", lambda: ahead)
    ended.write_end(str(tmp_path), "every worker has finished", ["ps:1"])
    assert ended.take_end(str(tmp_path), "ps:1") is not None
    ended.write_end(str(tmp_path), "every worker has finished", ["ps:1"])
    two_hours_ago = (tmp_path / "ended-ps-1").stat().st_mtime - 7200
    os.utime(tmp_path / "ended-ps-1", (two_hours_ago, two_hours_ago))
    assert ended.take_end(str(tmp_path), "ps:1") is None


async def test_a_chief_that_dies_while_it_tells_the_end_goes_on_with_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = {"state_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "checkpoints")}

    async with contextlib.AsyncExitStack() as stack:
        async with chief(**folders) as first:
            servers = [await stack.enter_async_context(ps(first.address, FakePs(index))) for index in range(2)]
            workers = [Task(first.address, f"worker:{index}") for index in range(2)]
            for worker in workers:
                await worker.ready()
            await until(lambda: first.job.journal.history.checkpoint)
            servers[0].apply(Unit(1, 0, 0))
            for worker in workers:
                worker.goodbye()
            await until(lambda: first.job.journal.history.ending)
            lives = [server.session for server in servers]
            place = lives[1].address
            lives[0].goodbye()
            await until(lambda: len(first.job.sessions.servers) == 1)
            await first.kill()
        caplog.clear()
        num_calls = len(servers[1].calls)
        async with chief(bind=first.address, session_timeout_s=5.0, **folders) as second:
            late = await Task(second.address, "ps:1", place, lives[1].incarnation).welcomed()
            assert (await late.stopped()).exit_code == 0
            assert await second.exit_code() == 0
            assert "save" not in servers[1].calls[num_calls:], "the last checkpoint is there"
        assert "No last checkpoint" not in caplog.text
        journal = Journal(folders["state_dir"])
        journal.close()
        assert not journal.history.done, "the next chief begins another job"


async def test_a_chief_that_is_killed_when_all_have_gone_is_followed_by_one_that_ends_too(tmp_path: Path) -> None:
    """It began another job, and waited five minutes for workers that had finished."""
    state_dir = str(tmp_path / "state")
    async with cluster(state_dir=state_dir) as (running, workers, servers):
        for worker in workers:
            worker.goodbye()
        for server in servers:
            await server.session.stopped()
        assert await running.exit_code() == 0
        killed_here = Journal(state_dir)
        killed_here.close()
        assert killed_here.history.ending and killed_here.history.stopped is None
        async with chief(state_dir=state_dir) as second:
            assert await second.exit_code() == 0


async def test_the_end_is_written_for_a_worker_that_the_others_did_without(tmp_path: Path) -> None:
    async with cluster(checkpoint_dir=str(tmp_path), worker_timeout_s=0.2) as (running, workers, servers):
        await until(lambda: running.job.journal.history.checkpoint)
        workers[1].goodbye()
        await until(lambda: running.job.sessions.tasks["worker:1"].state is SessionState.DONE)
        workers[0].goodbye(143)
        for server in servers:
            await server.session.stopped()
        assert await running.exit_code() == 0
    assert [path.name for path in tmp_path.glob("*ended*")] == ["ended-worker-0"]


def test_a_ps_that_finds_the_end_ends_well_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rpc_session, "LOOK_S", 0.1)
    ended.write_end(str(tmp_path), "every worker has finished", ["ps:1"])
    codes: list[int] = []

    def start(task: str, nobody: str) -> int:
        config = PsConfig(task=task, chief=nobody, checkpoint_dir=str(tmp_path), start_timeout_s=2.0)
        thread = threading.Thread(target=lambda: codes.append(run_ps(config)))
        with caplog.at_level(logging.INFO):
            thread.start()
            thread.join(100)
        return codes.pop()

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        assert start("ps:1", nobody) == 0
        assert f"The job is over: every worker has finished (written in {tmp_path})" in caplog.text
        assert start("ps:0", nobody) == 1
        assert "ps:0 found no chief" in caplog.text and "refused" in caplog.text.rpartition("found no chief")[2]


async def test_a_goodbye_after_the_stop_is_heard_however_late_it_comes() -> None:
    """A ps whose heartbeat fell between the two was reported as lost at the end of a good run."""
    async with chief(num_workers=1, num_ps=1, heartbeat_interval_s=0.01) as running:
        session = SessionClient(running.address, "ps:0", "127.0.0.1:1")
        await asyncio.to_thread(session.start)
        joined_at = running.job.sessions.tasks["ps:0"].heard_at
        await until(lambda: running.job.sessions.tasks["ps:0"].heard_at > joined_at)
        running.job.stop(1, "it is over")
        assert await asyncio.to_thread(session.wait_stopped, 30.0) is not None
        await asyncio.sleep(0.2)  # some heartbeats
        await asyncio.to_thread(session.goodbye, 0)
        await until(lambda: not running.job.sessions.tasks["ps:0"].open)
        assert running.job.sessions.tasks["ps:0"].state is SessionState.DONE


@pytest.mark.thorough
async def test_a_worker_that_was_started_again_after_its_goodbye_does_not_begin_a_job_that_is_over_anew(
    tmp_path: Path,
) -> None:
    """It gave a ps without memory first values, and these became the newest checkpoint."""
    folders = {"state_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "checkpoints")}

    async with chief(**folders, num_workers=1, num_ps=1) as first, ps(first.address, FakePs(0)):
        worker = await Task(first.address, "worker:0").ready()
        await until(lambda: first.job.journal.history.checkpoint)
        worker.goodbye()
        await until(lambda: first.job.journal.history.ending)
        again = await Task(first.address, "worker:0").welcomed()
        await first.kill()
    async with chief(bind=first.address, **folders, num_workers=1, num_ps=1) as second:
        late = Task(second.address, "worker:0", resume=again.incarnation)
        assert (await late.stopped()).exit_code == 0
        assert await second.exit_code() == 0


async def in_step(stack: contextlib.AsyncExitStack, running: Chief) -> tuple[Task, list[FakePs]]:
    """A worker at staleness 0 whose first unit two ps, which ``stack`` ends, have and the chief has accepted."""
    servers = [await stack.enter_async_context(ps(running.address, FakePs(index))) for index in range(2)]
    worker = await Task(running.address, "worker:0").ready()
    await until(lambda: running.job.journal.history.checkpoint)
    await worker.open(batch_size=4, num_slices=2, staleness=0.0)
    await worker.next()
    for server in servers:
        server.apply(Unit(1, 0, 0))
    await worker.next([0], wait=False)
    return worker, servers


@pytest.mark.parametrize("is_saved", [False, True])
async def test_work_in_step_that_is_lost_when_it_is_done_is_not_done_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_saved: bool
) -> None:
    """A ps died when all workers had finished: all ps went back, nobody makes it again, and the exit code was 0."""
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(chief(checkpoint_dir=str(tmp_path), num_workers=1))
        worker, servers = await in_step(stack, running)
        if is_saved:
            await running.job._maintenance.save_last()
        await servers[0].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        worker.goodbye()
        await until(lambda: running.job.sessions.stopping)
        reborn = FakePs(0)
        reborn.initialized = False
        await stack.enter_async_context(ps(running.address, reborn))
        for session in (servers[1].session, reborn.session):
            assert (await session.stopped()).exit_code == 0
        assert await running.exit_code() == (0 if is_saved else 1)
        assert reborn.restored_from and servers[1].restored_from
    words = "The work is done but not saved: no last checkpoint (ps:0 lost its memory when every worker had finished"
    assert (words in caplog.text) is not is_saved


async def test_a_chief_that_comes_when_the_end_was_told_puts_no_ps_back(tmp_path: Path) -> None:
    """At staleness 0 a ps that was started again took the memory of the others with it, after the last checkpoint."""
    folders = {"state_dir": str(tmp_path / "state"), "checkpoint_dir": str(tmp_path / "checkpoints")}

    async with contextlib.AsyncExitStack() as stack:
        async with chief(**folders, num_workers=1) as first:
            worker, servers = await in_step(stack, first)
            worker.goodbye()
            await until(lambda: first.job.journal.history.ending)
            place = first.job.sessions.tasks["ps:1"].address
            servers[0].session.goodbye()
            await until(lambda: len(first.job.sessions.servers) == 1)
            await first.kill()
        reborn = FakePs(0)
        reborn.initialized = False
        async with chief(bind=first.address, **folders, num_workers=1) as second:
            late = Task(second.address, "ps:1", place, servers[1].session.incarnation)
            async with ps(second.address, reborn):
                for session in (late, reborn.session):
                    await session.stopped()
                assert await second.exit_code() == 0
                assert not servers[1].restored_from and second.job.get_status().updates_lost == 0


def lose_journal(state_dir: Path) -> None:
    """Another chief has written it."""
    with (state_dir / NAME).open("a") as file:
        file.write("\n")


async def test_a_chief_that_loses_its_journal_while_it_puts_a_ps_back_does_not_end_the_job(tmp_path: Path) -> None:
    """It took that for checkpoints that nobody can read, and exited with 2: no chief followed."""
    state_dir = tmp_path / "state"
    folders = {"state_dir": str(state_dir), "checkpoint_dir": str(tmp_path / "checkpoints")}

    class Losing(FakePs):
        async def RestoreShards(self, request: Any, context: Any) -> Any:
            lose_journal(state_dir)
            return await super().RestoreShards(request, context)

    # Its clock looks at the journal, too: seldom enough for the ps to be first.
    async with cluster(**folders, num_workers=1, heartbeat_interval_s=1.0) as (running, [worker], servers):
        await until(lambda: running.job.journal.history.checkpoint)
        await worker.open()
        await lose(running, servers[1])
        async with contextlib.AsyncExitStack() as stack:  # the ps stays, however soon it has joined
            joining = asyncio.create_task(stack.enter_async_context(ps(running.address, Losing(1))))
            assert await running.exit_code() == EXIT_PREEMPTED
            assert running.job.sessions.stopping is None
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)


async def test_a_chief_that_loses_its_journal_as_the_job_ends_leaves_the_end_to_the_next_one(tmp_path: Path) -> None:
    """It exited with the code of the job, or with 1 where all was well: no chief followed."""
    async with cluster(state_dir=str(tmp_path), heartbeat_interval_s=1.0) as (running, _, _):
        lose_journal(tmp_path)
        running.job.stop(2, "a worker failed")
        assert await running.exit_code() == EXIT_PREEMPTED


async def test_a_chief_that_follows_one_whose_disk_was_full_waits_for_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It exited with 1 at once, and so ended the job which the one before had left to it."""

    def on_full_disk(dir: Path) -> Any:
        return Path("/dev/full").open("wb")

    monkeypatch.setattr(tempfile, "TemporaryFile", on_full_disk)
    new = JournalLock(str(tmp_path))
    assert not await new.wait(standby=False), "who begins a job is told at once"
    new.release()
    (tmp_path / NAME).touch()
    lock = JournalLock(str(tmp_path))
    waiting = asyncio.create_task(lock.wait(standby=False))
    await until(lambda: "No space left on device" in caplog.text)
    assert not waiting.done()
    monkeypatch.undo()
    assert not await waiting, "nobody else had it"
    lock.release()


async def test_the_chief_that_stands_by_goes_before_one_that_is_started_anew(tmp_path: Path) -> None:
    """It was overtaken now and then, by the one that the launcher restarted: then that was no takeover."""
    serving = JournalLock(str(tmp_path))
    assert serving.acquire()
    first, second = (JournalLock(str(tmp_path)) for _ in range(2))
    standing = asyncio.create_task(first.wait(standby=True))
    await until(lambda: standing_by(str(tmp_path)))
    serving.release()
    restarted = asyncio.create_task(second.wait(standby=True))
    assert await asyncio.wait_for(standing, 30) and not restarted.done()
    first.release()
    assert await asyncio.wait_for(restarted, 30), "another chief had it: its job may be over"
    second.release()


async def test_a_chief_that_stands_by_and_stands_still_keeps_no_other_from_the_journal(tmp_path: Path) -> None:
    still = JournalLock(str(tmp_path), STANDBY_NAME)
    assert still.acquire()
    lock = JournalLock(str(tmp_path))
    assert await asyncio.wait_for(lock.wait(standby=True), 30)
    lock.release()
    still.release()


async def test_a_chief_that_looks_for_room_takes_none(tmp_path: Path) -> None:
    """What it had tried to write stayed there, in the last of the room that its journal needed."""
    (tmp_path / NAME).write_bytes(bytes(8))
    lock = JournalLock(str(tmp_path))
    with file_size_limit((tmp_path / NAME).stat().st_size):
        await lock.wait(standby=False)
    lock.release()
    assert {file.name for file in tmp_path.iterdir()} == {NAME, "journal.lock"}


async def test_a_chief_that_could_not_write_acknowledges_nothing_that_is_asked_again(tmp_path: Path) -> None:
    """What the first call changed looked done to the second, and the next chief did not know of it."""
    async with cluster(state_dir=str(tmp_path), heartbeat_interval_s=1.0) as (running, [worker, _], _):
        await until(lambda: running.job.is_open)
        asked = chief_pb2.OpenDatasetRequest(
            sender=worker.sender, dataset=1, num_examples=8, batch_size=2, num_slices=1
        )
        with file_size_limit((tmp_path / NAME).stat().st_size):
            for _ in range(3):  # a moment later it answers nobody
                with pytest.raises((JournalLostError, TimeoutError)):
                    await asyncio.wait_for(ChiefServicer(running.job).OpenDataset(asked, None), 1)
        assert await running.exit_code() == EXIT_PREEMPTED


async def test_a_goodbye_that_a_chief_could_not_write_is_not_heard(tmp_path: Path) -> None:
    """Said again, it was refused as of one that is done: the worker ended, and the next chief waited for it in vain."""
    async with cluster(state_dir=str(tmp_path), heartbeat_interval_s=1.0) as (running, [worker, _], _):
        await until(lambda: running.job.is_open)
        with file_size_limit((tmp_path / NAME).stat().st_size):
            worker.goodbye()
            await until(lambda: worker.error)
            again = Task(running.address, worker.task, resume=worker.incarnation)
            await until(lambda: again.error)
            await again.die()
        for each in (worker, again):
            assert each.error is not None and each.error.code() is grpc.StatusCode.UNAVAILABLE, each.error


def test_an_end_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with file_size_limit(0), pytest.raises(OSError, match="File too large"):
        ended.write_end(str(tmp_path), "every worker has finished", ["ps:0"])
    assert not list(tmp_path.iterdir())
