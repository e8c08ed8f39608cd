"""A session outlives its connection for a moment, and a chief that is told to end leaves as if it had been killed."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.chief import job_end
from stratagem.chief.journal.journal import exit_code_of
from stratagem.chief.membership.session import SessionState
from stratagem.rpc.session import SessionClient
from tests.contract.chief.fakes import Task, chief, indices, refused, until


async def test_a_worker_whose_connection_broke_keeps_what_it_holds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as served:
        address = f"127.0.0.1:{served.getsockname()[1]}"
        async with chief(num_workers=1, num_ps=0, session_grace_s=60.0, session_timeout_s=60.0) as running:
            first = await Task(running.address, "worker:0", address).ready()
            await first.open()
            assert indices(await first.next(want=2)) == [0, 1]
            await first.die()
            await until(lambda: not running.job.sessions.tasks["worker:0"].stream)
            assert running.job.sessions.tasks["worker:0"].state is SessionState.LIVE
            second = await Task(running.address, "worker:0", address, first.incarnation).ready()
            assert indices(await second.next([0], held=[1])) == [2], "and it has not to say what it holds"
            assert not running.job.sessions.fenced


async def test_a_single_refusal_is_not_taken_for_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reset the session's connection resets the first look at the port, too."""
    connect, looks = asyncio.open_connection, []

    async def reset_once(host: str, port: int) -> Any:
        looks.append(port)
        if len(looks) == 1:
            raise ConnectionRefusedError(111, "Connection refused")
        return await connect(host, port)

    monkeypatch.setattr(asyncio, "open_connection", reset_once)
    with socket.create_server(("127.0.0.1", 0)) as served:
        address = f"127.0.0.1:{served.getsockname()[1]}"
        async with chief(num_workers=1, num_ps=0, session_grace_s=60.0, session_timeout_s=60.0) as running:
            task = await Task(running.address, "worker:0", address).ready()
            await task.die()
            await until(lambda: len(looks) > 2)
            assert running.job.sessions.tasks["worker:0"].state is SessionState.LIVE


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["127.0.0.1", "127.0.0.2"]], ids=["one address", "two"])
async def test_a_worker_whose_port_is_closed_is_not_waited_for(
    addresses: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        address = f"{'127.0.0.1' if len(addresses) == 1 else 'localhost'}:{port}"
        if len(addresses) > 1:
            found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]
            monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **options: found)
        async with chief(num_workers=1, num_ps=0, session_grace_s=60.0, session_timeout_s=60.0) as running:
            task = await Task(running.address, "worker:0", address).ready()
            await task.die()
            await until(lambda: running.job.sessions.tasks["worker:0"].state is SessionState.LOST)
    assert "broke without a goodbye, and nothing listens at its address" in caplog.text


async def test_a_loopback_address_says_nothing_to_a_chief_that_serves_other_machines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A worker elsewhere that had been given no --bind was taken for dead as soon as its connection broke."""
    async with chief(
        "0.0.0.0:0", insecure=True, num_workers=1, num_ps=0, session_grace_s=60.0, session_timeout_s=60.0
    ) as running:
        session = SessionClient(running.address, "worker:0", "127.0.0.1:1")
        await asyncio.to_thread(session.start)
        assert "worker:0 serves at 127.0.0.1:1, where other machines cannot reach it" in caplog.text
        await asyncio.to_thread(session.close)
        await until(lambda: not running.job.sessions.tasks["worker:0"].stream)
        await until(lambda: not running.job.streams._probes)
        assert running.job.sessions.tasks["worker:0"].state is SessionState.LIVE


async def test_a_chief_that_stood_still_takes_nobody_for_silent() -> None:
    async with chief(num_workers=1, num_ps=0, session_timeout_s=2.0) as running:
        worker = Task(running.address, "worker:0")
        await worker.ready()
        time.sleep(4.0)  # the chief's loop is this one
        ticked = running.job.streams._ticked_at
        await until(lambda: running.job.streams._ticked_at > ticked)
        assert running.job.sessions.tasks["worker:0"].state is SessionState.LIVE
        await until(lambda: running.job.sessions.tasks["worker:0"].state is SessionState.LOST)  # its silence counts


async def test_a_chief_that_leaves_says_no_stop_and_the_next_one_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring: dict[str, Any] = {"num_workers": 2, "num_ps": 0, "state_dir": str(tmp_path)}
    async with chief(**ring) as first:
        workers = [Task(first.address, f"worker:{index}") for index in range(2)]
        for worker in workers:
            await worker.ready()
        first.job.leave(143, "the chief got SIGTERM")
        assert await first.exit_code() == 143
    assert [worker.ended("stop") for worker in workers] == [None, None]
    async with chief(bind=first.address, **ring) as second:
        back = await Task(second.address, "worker:1", resume=workers[1].incarnation).ready()
        # worker:0 has not come back yet, and nothing says that it is lost: the ring would break off.
        assert [(info.task, info.live) for info in back.membership.tasks] == [
            ("worker:0", True),
            ("worker:1", True),
        ]
        other = await Task(second.address, "worker:0", resume=workers[0].incarnation).ready()
        for worker in (back, other):
            worker.goodbye()
        assert await second.exit_code() == 0
    assert "the job continues with the chief that replaces it" in caplog.text


async def test_a_goodbye_that_a_chief_hears_when_it_has_left_is_for_the_one_that_follows(tmp_path: Path) -> None:
    """It was in no journal, and the next chief took the worker for lost."""
    sizes: dict[str, Any] = {"num_workers": 1, "num_ps": 0, "state_dir": str(tmp_path)}
    async with chief(**sizes) as first:
        worker = await Task(first.address, "worker:0").ready()
        first.job.leave(143, "the chief got SIGTERM")
        assert await first.exit_code() == 143
        worker.goodbye()
        error = await until(lambda: worker.error)
        assert "tell the next one" in error.details()
        late = Task(first.address, "worker:0", resume=worker.incarnation)
        assert "tell the next one" in (await until(lambda: late.error)).details()
        await first.kill()
    async with chief(**sizes) as second:
        again = await Task(second.address, "worker:0", resume=worker.incarnation).ready()
        again.goodbye()
        assert await second.exit_code() == 0
        for task in (worker, late, again):
            await task.die()


async def test_a_chief_leaves_also_when_the_checkpoint_fails_as_nobody_thought_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails() -> None:
        raise RuntimeError("what nobody thought of")

    async with chief(num_workers=1, num_ps=0, state_dir=str(tmp_path)) as running:
        monkeypatch.setattr(running.job._maintenance, "save_last", fails)
        running.job.leave(143, "the chief got SIGTERM")
        assert await running.exit_code() == 143


async def test_a_chief_that_leaves_without_a_checkpoint_in_time_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(job_end, "LEAVE_S", 0.05)
    async with chief(num_workers=1, num_ps=0, state_dir=str(tmp_path)) as running:
        monkeypatch.setattr(running.job._maintenance, "save_last", asyncio.Event().wait)
        running.job.leave(143, "the chief got SIGTERM")
        assert await running.exit_code() == 143
    assert "No checkpoint before the chief exits: it was not written within 0.05 s" in caplog.messages


async def test_a_chief_that_is_told_twice_leaves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = asyncio.Event()

    async def takes_long() -> None:
        saving.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(job_end, "LEAVE_S", 1000.0)
    async with chief(num_workers=1, num_ps=0, state_dir=str(tmp_path)) as running:
        monkeypatch.setattr(running.job._maintenance, "save_last", takes_long)
        running.job.leave(143, "the chief got SIGTERM")
        await saving.wait()
        running.job.leave(143, "the chief got SIGTERM")
        assert await running.exit_code() == 143


async def test_a_job_that_is_stopped_while_its_chief_leaves_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chief left, nobody heard of the end, and the next chief went on with the job."""
    saving, saved = asyncio.Event(), asyncio.Event()

    async def takes_long() -> None:
        saving.set()
        await saved.wait()

    async with chief(num_workers=1, num_ps=0, state_dir=str(tmp_path)) as running:
        worker = await Task(running.address, "worker:0").ready()
        monkeypatch.setattr(running.job._maintenance, "save_last", takes_long)
        running.job.leave(143, "the chief got SIGTERM")
        await saving.wait()
        running.job.stop(3, "somebody has stopped it")
        saved.set()
        assert (await until(lambda: worker.ended("stop"))).exit_code == 3
        worker.goodbye(3)
        assert await running.exit_code() == 3
    assert exit_code_of(str(tmp_path)) == 3


async def test_a_chief_without_a_journal_ends_the_job() -> None:
    async with chief(num_workers=1, num_ps=0) as running:
        worker = await Task(running.address, "worker:0").ready()
        running.job.leave(143, "the chief got SIGTERM")
        assert (await until(lambda: worker.ended("stop"))).exit_code == 143
        worker.goodbye(143)
        assert await running.exit_code() == 143


async def test_a_worker_that_stays_away_longer_is_fenced() -> None:
    async with chief(num_workers=1, num_ps=0, session_grace_s=0.2) as running:
        first = await Task(running.address, "worker:0").ready()
        await first.die()
        await until(lambda: running.job.sessions.tasks["worker:0"].state is SessionState.LOST)
        error = await refused(_resume(running.address, first.incarnation))
        assert "is not a live member of the cluster" in str(error)


async def test_a_worker_that_was_fenced_when_it_finished_has_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The chief waited for it, and ended the job as failed: who ends with 0 is started by nobody again."""
    config: dict[str, Any] = {"num_workers": 1, "num_ps": 0, "session_grace_s": 60.0, "state_dir": str(tmp_path)}
    async with chief(**config) as running:
        session = SessionClient(running.address, "worker:0", "127.0.0.1:1")
        await asyncio.to_thread(session.start)
        await until(lambda: session.membership.ready)
        running.job.streams.perform(running.job.sessions.tick(time.monotonic() + 1000))
        await until(lambda: session.stopped)
        with caplog.at_level("INFO"):
            await asyncio.to_thread(session.goodbye, 0)
        assert "which took worker:0 for lost" in caplog.text, "it may take peer_timeout_s"
        assert await running.exit_code() == 0
        assert running.job.journal.history.done


async def _resume(address: str, incarnation: int) -> None:
    await Task(address, "worker:0", resume=incarnation).welcomed()


async def test_a_worker_that_finishes_while_the_chief_is_away_waits_to_be_heard(tmp_path: Path) -> None:
    config: dict[str, Any] = {"num_workers": 1, "num_ps": 0, "state_dir": str(tmp_path)}
    async with chief(**config) as first:
        session = SessionClient(first.address, "worker:0", "127.0.0.1:1")
        await asyncio.to_thread(session.start)
        await until(lambda: session.membership.ready)
        await first.kill()
    leaving = asyncio.create_task(asyncio.to_thread(session.goodbye, 0, timeout_s=0.1))
    await asyncio.sleep(0.5)
    assert not leaving.done()
    async with chief(bind=first.address, **config) as second:
        assert await second.exit_code() == 0
        await leaving


async def test_a_chief_that_is_lost_after_an_hour_of_peace_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as away since the cluster had changed last: every task of a job older than that gave up at once."""
    config: dict[str, Any] = {"num_workers": 1, "num_ps": 0, "state_dir": str(tmp_path)}
    async with chief(**config) as first:
        session = SessionClient(first.address, "worker:0", "127.0.0.1:1")
        await asyncio.to_thread(session.start)
        await until(lambda: session.membership.ready)
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600.0, sleep=time.sleep)
        monkeypatch.setattr("stratagem.rpc.session.time", later)
        await first.kill()
    async with chief(bind=first.address, **config) as second:
        await until(lambda: session.stopped or second.job.sessions.tasks["worker:0"].stream)
        assert session.stopped is None
        await asyncio.to_thread(session.goodbye, 0)
        assert await second.exit_code() == 0


async def test_a_worker_that_failed_does_not_wait_for_a_chief_that_is_away(tmp_path: Path) -> None:
    async with chief(num_workers=1, num_ps=0, state_dir=str(tmp_path)) as running:
        session = SessionClient(running.address, "worker:0", "127.0.0.1:1")
        await asyncio.to_thread(session.start)
        await running.kill()
    await asyncio.wait_for(asyncio.to_thread(session.goodbye, 1, timeout_s=0.1), 15)
