"""The service Chief over real gRPC: sessions, units, clocks, the end of the job."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import torch

import stratagem
from stratagem.chief import wire
from stratagem.chief.events import Heartbeat, Join, Request, Welcome
from stratagem.chief.membership import session_streams
from stratagem.cluster.task import Incarnation
from stratagem.cluster.units import Unit
from stratagem.errors import ConfigurationError, FencedError, JobStoppedError, PeerUnavailableError, ProtocolError
from stratagem.rpc.generated import chief_pb2
from stratagem.rpc.session import SessionClient
from stratagem.rpc.status_view import from_reply
from tests.contract.chief.fakes import Task, chief, cluster, indices, refused, run, until


async def test_another_number_of_workers_is_told_to_all_and_refused_where_it_cannot_be() -> None:
    async with cluster() as (running, workers, _):
        await workers[0].stub.Scale(chief_pb2.ScaleRequest(num_workers=1))
        await until(lambda: workers[1].membership.wanted_workers == 1)
        assert running.job.get_status().wanted_workers == 1
        workers[1].goodbye(0)
        await until(lambda: running.job.get_status().tasks[2].state == "done")
        error = await refused(workers[0].open(staleness=0.0))
        assert "cannot be added at staleness 0, nor another leave" in str(error)
    async with cluster() as (_, workers, _):
        await workers[0].open(num_slices=2, staleness=0.0)
        error = await refused(workers[0].stub.Scale(chief_pb2.ScaleRequest(num_workers=1)))
        assert isinstance(error, ConfigurationError) and "at staleness 0 every batch is cut" in str(error)
    async with cluster(num_ps=0) as (_, workers, _):
        error = await refused(workers[0].stub.Scale(chief_pb2.ScaleRequest(num_workers=3)))
        assert "to scale a ring, start it" in str(error)
    async with chief() as running:
        error = await refused(Task(running.address, "worker:0").stub.Scale(chief_pb2.ScaleRequest(num_workers=3)))
        assert "not complete yet" in str(error)


async def test_everybody_hears_when_the_cluster_is_ready() -> None:
    async with cluster() as (_, workers, servers):
        membership = workers[0].membership
        assert membership.lead == "worker:0"
        live = {info.task: info.live for info in membership.tasks}
        assert live == {"worker:0": True, "worker:1": True, "ps:0": True, "ps:1": True}
        await servers[0].session.ready()
        assert workers[0].events[0].HasField("welcome") and not workers[0].events[0].welcome.job_started


async def test_who_comes_when_somebody_has_made_a_step_hears_that_the_job_has_begun() -> None:
    async with cluster(num_ps=0) as (running, workers, _):
        again = await Task(running.address, "worker:1", "127.0.0.1:9").welcomed()
        assert not again.events[0].welcome.job_started
        workers[0].beat(step=1)
        while not any(
            task.progress.step for task in (await workers[0].stub.GetStatus(chief_pb2.GetStatusRequest())).tasks
        ):
            pass
        again = await Task(running.address, "worker:1", "127.0.0.1:9").welcomed()
        assert again.events[0].welcome.job_started


async def test_two_workers_share_an_epoch_and_see_its_end() -> None:
    async with cluster(seed=11) as (running, workers, _):
        for worker in workers:
            assert (await worker.open()).seed == 11
        assert indices(await workers[0].next(want=2)) == [0, 1]
        assert indices(await workers[1].next(want=9)) == [2, 3]
        assert indices(await workers[1].next([2, 3], wait=False)) == []
        waiting = asyncio.create_task(workers[1].next())
        await until(lambda: running.job.get_status().tasks[2].waiting_on)
        assert running.job.get_status().tasks[2].waiting_on == "worker:0 to finish their units"
        assert (await workers[0].next([0, 1])).end
        assert (await waiting).end
        assert indices(await workers[0].next(epoch=1)) == [0]
        assert (await workers[1].next(epoch=0)).end, "a closed epoch ends at once"


async def test_units_of_a_killed_worker_go_to_another_only_after_every_ps_fenced_it() -> None:
    async with cluster() as (running, workers, servers):
        await workers[0].open()
        await workers[1].open()
        assert indices(await workers[1].next(want=2)) == [0, 1]
        servers[1].fence_gate.clear()
        await workers[1].die()
        await until(lambda: servers[0].fenced)
        assert servers[0].fenced == {"worker:1": workers[1].incarnation}
        assert indices(await workers[0].next(want=9)) == [2, 3]
        assert indices(await workers[0].next([2, 3], want=9, wait=False)) == []
        waiting = asyncio.create_task(workers[0].next(want=9))
        servers[1].fence_gate.set()
        assert indices(await waiting) == [0, 1]
        error = await refused(workers[0].stub.NextUnits(chief_pb2.NextUnitsRequest(sender=workers[1].sender)))
        assert isinstance(error, FencedError)
        again = await Task(running.address, "worker:1").ready()
        assert again.incarnation > workers[1].incarnation
        assert (await workers[0].next([0, 1])).end
        assert (await again.next()).end
        await again.die()


async def test_a_task_that_was_started_again_has_done_nothing_yet() -> None:
    async with cluster() as (running, workers, _):
        workers[1].beat(step=40, waiting_step=3)
        streams = running.job.streams
        await until(lambda: streams.waiting_steps.get("worker:1"))
        await workers[1].die()
        again = await Task(running.address, "worker:1").welcomed()
        worker = from_reply(wire.status_to_proto(running.job.get_status())).workers[1]
        assert (worker.incarnation, worker.step) == (again.incarnation, 0), "it is not the process that made 40 steps"
        assert not streams.waiting_steps.get("worker:1")
        await again.die()


async def test_a_lost_reply_is_lent_again() -> None:
    async with cluster() as (_, workers, _):
        await workers[0].open()
        assert indices(await workers[0].next(want=2)) == [0, 1]
        assert indices(await workers[0].next(want=2, held=[0])) == [1, 2]


async def test_the_end_of_a_part_of_an_epoch_is_on_disk_before_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chief whose machine crashed forgot it: its batches were trained, and counted, in the next part again."""
    async with cluster(num_workers=1) as (running, [worker], _):
        journal = running.job.journal
        written: list[tuple[str, Any]] = []
        write = journal.write

        def spied(kind: str, **record: Any) -> None:
            written.append((kind, record.get("durable", True)))
            write(kind, **record)

        monkeypatch.setattr(journal, "write", spied)
        await worker.open()
        assert indices(await worker.next(want=2, stop=2)) == [0, 1]
        for index in range(2):
            topic = chief_pb2.Topic(group="loss")
            counted = chief_pb2.MetricState(index=index, data=b"1", topic=topic)
            await worker.next([index], want=0, stop=2, states=[counted])
        found = [each for each in written if each[0] in ("accepted", "state")]
        assert found == [("state", False), ("accepted", False), ("state", False), ("accepted", True)]


async def test_datasets_that_disagree_are_refused_with_each_difference() -> None:
    async with cluster() as (_, workers, _):
        await workers[0].open()
        error = await refused(workers[1].open(num_examples=9, batch_size=4))
        assert isinstance(error, ConfigurationError)
        assert "num_examples is 8 in the job and 9 here; batch_size is 2 in the job and 4 here" in str(error)
        assert isinstance(await refused(workers[1].open(batch_size=0)), ProtocolError)
        assert isinstance(await refused(workers[1].open(dataset=0)), ConfigurationError)


async def test_a_worker_added_at_staleness_0_is_refused_and_the_job_goes_on() -> None:
    async with cluster(max_workers=3) as (running, workers, _):
        for worker in workers:
            await worker.open(num_slices=2, staleness=0.0)
        added = await Task(running.address, "worker:2").welcomed()
        error = await refused(added.open(num_slices=2, staleness=0.0))
        assert isinstance(error, ConfigurationError)
        assert "worker:2 cannot be added at staleness 0" in str(error)
        added.goodbye(2, "ConfigurationError")
        await until(lambda: not running.job.sessions.tasks["worker:2"].open)
        assert running.job.sessions.stopping is None
        await added.die()


async def test_a_ring_that_heals_begins_with_whoever_came_before_it_was_complete() -> None:
    """One beyond those that it starts with ended with 1, as its batches were cut for the others."""
    async with cluster(num_ps=0, min_workers=1, max_workers=3) as (running, workers, _):
        added = await Task(running.address, "worker:2").welcomed()
        for worker in (*workers, added):
            await worker.open(num_slices=3, staleness=0.0)
        await added.die()


async def test_unknown_and_wrong_callers_are_refused() -> None:
    async with cluster(num_ps=0) as (running, workers, _):
        stranger = Task(running.address, "worker:9")
        error = await refused(stranger.welcomed())
        assert isinstance(error, ConfigurationError) and "'worker:9' is not a task" in str(error)
        await stranger.die()
        late = Task(running.address, "worker:0", resume=77)
        assert isinstance(await refused(late.welcomed()), FencedError)
        await late.die()
        assert isinstance(await refused(workers[0].next()), ProtocolError)
        call = workers[0].stub.Session(iter([chief_pb2.SessionRequest(heartbeat=chief_pb2.Heartbeat())]))
        with pytest.raises(grpc.aio.AioRpcError, match="expected Join as the first message"):
            async for _ in call:
                pass


async def test_versions_are_compared_where_a_task_joins(caplog: pytest.LogCaptureFixture) -> None:
    def join(stratagem_version: str, torch_version: str = "") -> list[chief_pb2.SessionRequest]:
        said = chief_pb2.Join(
            task="worker:1",
            address="127.0.0.1:1",
            stratagem_version=stratagem_version,
            torch_version=torch_version,
        )
        return [chief_pb2.SessionRequest(join=said)]

    async with cluster(num_workers=2, num_ps=0) as (running, workers, _):
        session = SessionClient(running.address, "worker:0", "127.0.0.1:1")
        await asyncio.to_thread(session.start)
        call = workers[1].stub.Session(
            iter(join(stratagem_version=f"{stratagem.__version__}.9", torch_version="1.13.1"))
        )
        assert (await anext(aiter(call))).HasField("welcome"), "another patch, and another torch"
        assert f"worker:1 has torch 1.13.1 and worker:0 torch {torch.__version__}" in caplog.text
        call = workers[1].stub.Session(iter(join(stratagem_version="0.99.0")))
        ours = re.escape(
            f"worker:1 runs stratagem 0.99.0 and its chief {stratagem.__version__}: install the same version"
        )
        with pytest.raises(grpc.aio.AioRpcError, match=ours):
            await anext(aiter(call))
        await asyncio.to_thread(session.close)


def test_what_every_ps_has_closed_of_a_dead_worker_is_accepted_unless_it_has_to_be_counted() -> None:
    async def scenario(counts: bool, expected: list[int]) -> None:
        async with cluster() as (running, workers, servers):
            for worker in workers:
                await worker.open()
            request = chief_pb2.NextUnitsRequest(sender=workers[1].sender, dataset=1, want=3, counts=counts)
            assert indices(await workers[1].stub.NextUnits(request)) == [0, 1, 2]
            for fake in servers:
                fake.close_unit(Unit(1, 0, 0))
                fake.apply(Unit(1, 0, 1))
            servers[0].close_unit(Unit(1, 0, 1))
            await workers[1].die()
            await until(lambda: not running.job.lease_book.held(Incarnation("worker:1", workers[1].incarnation)))
            assert indices(await workers[0].next(want=4)) == expected
            assert (0 in running.job.lease_book.epoch(1, 0).accepted) is (0 not in expected)

    run(lambda: scenario(False, [1, 2, 3]))
    run(lambda: scenario(True, [0, 1, 2, 3]))


async def test_of_many_tasks_each_sends_fewer_heartbeats() -> None:
    async def interval_s(**config: Any) -> float:
        async with chief(heartbeat_interval_s=0.5, **config) as running:
            task = await Task(running.address, "worker:0").welcomed()
            welcome = next(event.welcome for event in task.events if event.HasField("welcome"))
            assert running.job.config.session_timeout_s >= 4 * welcome.heartbeat_interval_s
            await task.die()
            return float(welcome.heartbeat_interval_s)

    assert await interval_s(num_workers=100) == 0.5
    assert await interval_s(num_workers=500, num_ps=100, session_timeout_s=6.0) == pytest.approx(0.9)
    assert await interval_s(num_workers=4000, session_timeout_s=6.0) == 1.5


async def test_changes_at_once_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_streams, "ANNOUNCE_S", 0.05)  # joining takes as long as the machine likes
    async with chief(num_workers=40, num_ps=0) as running:
        tasks = [Task(running.address, f"worker:{index}") for index in range(40)]
        for task in tasks:
            await task.ready()
        told = [sum(event.HasField("membership") for event in task.events) for task in tasks]
        assert max(told) <= 20, f"40 joins made {max(told)} announcements"
        assert all(sum(info.live for info in task.membership.tasks) == 40 for task in tasks)
        for task in tasks:
            await task.die()


async def test_synchronous_steps_go_on_without_a_dead_worker() -> None:
    async with cluster() as (_, workers, servers):
        plan = {"num_examples": 8, "batch_size": 4, "num_slices": 2, "staleness": 0.0}
        for worker in workers:
            await worker.open(**plan)
        [mine] = (await workers[0].next()).leases
        [theirs] = (await workers[1].next()).leases
        assert (mine.step, list(mine.step_units), theirs.unit.index) == (1, [0, 1], 1)
        # worker:1 committed on ps:1 only, and died.
        servers[1].committed_slices = [(1, Unit(1, 0, 1))]
        await workers[1].die()
        await until(lambda: all(1 in server.closings for server in servers))
        included, committed = servers[0].closings[1]
        assert included == [Unit(1, 0, 0), Unit(1, 0, 1)]
        assert [update.units for update in committed] == [(Unit(1, 0, 1),)]
        for server in servers:
            server.committed_slices = []
        [alone] = (await workers[0].next([0])).leases
        assert (alone.unit.index, list(alone.step_units), alone.refresh) == (2, [2], False)


async def test_slices_of_a_worker_that_leaves_are_closed_out() -> None:
    async with cluster() as (_, workers, servers):
        plan = {"num_examples": 8, "batch_size": 4, "num_slices": 2, "staleness": 0.0}
        for worker in workers:
            await worker.open(**plan)
            await worker.next()
        leave = chief_pb2.NextUnitsRequest(sender=workers[1].sender, dataset=1, epoch=0, leave=True)
        await workers[1].stub.NextUnits(leave)
        assert servers[0].closings == {1: ([Unit(1, 0, 0)], [])}


async def test_a_fast_worker_waits_for_the_staleness_bound() -> None:
    async with cluster() as (running, workers, _):
        for worker in workers:
            await worker.open(staleness=1.0)
            await worker.next()

        async def start(worker: Task, clock: int) -> int:
            request = chief_pb2.StartStepRequest(sender=worker.sender, dataset=1, epoch=0, clock=clock)
            reply: chief_pb2.StartStepReply = await worker.stub.StartStep(request)
            return reply.clock

        assert await start(workers[0], 0) == 0
        assert await start(workers[1], 0) == 0
        assert await start(workers[0], 1) == 1
        waiting = asyncio.create_task(start(workers[0], 2))
        await until(lambda: running.job.get_status().tasks[1].waiting_on)
        assert running.job.get_status().tasks[1].waiting_on.startswith("worker:1 to finish steps before step 2")
        assert not waiting.done()
        assert await start(workers[1], 1) == 1
        assert await waiting == 2
        waiting = asyncio.create_task(start(workers[0], 3))
        await workers[1].die()
        assert await waiting == 3


async def test_status_shows_what_every_task_does() -> None:
    async with cluster() as (running, workers, _):
        await workers[0].open()
        await workers[0].next(want=3)
        await workers[0].next([0], held=[1, 2], want=1)
        workers[0].beat(step=4, loss=0.5, has_loss=True)
        await until(lambda: running.job.get_status().said[1][0])
        status: chief_pb2.GetStatusReply = await workers[1].stub.GetStatus(chief_pb2.GetStatusRequest())
        assert (status.tasks[1].progress.step, status.tasks[1].progress.loss) == (4, 0.5)
        assert (status.tasks[1].state, status.tasks[1].units_held, status.tasks[1].pid) == ("live", 3, 7)
        assert (status.units_accepted, status.units_planned, status.examples) == (1, 4, 2)
        assert (status.ready, status.lead, list(status.waiting_for)) == (True, "worker:0", [])


async def test_what_a_process_says_whose_place_another_has_is_not_shown() -> None:
    async with chief() as running:
        streams, has_successor, is_said = running.job.streams, asyncio.Event(), asyncio.Event()

        async def first() -> AsyncIterator[Request]:
            yield Join("worker:0", "127.0.0.1:1")
            await has_successor.wait()
            is_said.set()
            yield Heartbeat(progress=b"first")

        async def second() -> AsyncIterator[Request]:
            yield Join("worker:0", "127.0.0.1:2")
            yield Heartbeat(progress=b"second")
            await asyncio.Event().wait()

        one, other = streams.attend(first()), streams.attend(second())
        assert isinstance(await anext(one), Welcome)
        assert isinstance(await anext(other), Welcome)
        await until(lambda: streams.progress)
        has_successor.set()
        await is_said.wait()
        assert streams.progress == {"worker:0": b"second"}
        for stream in (one, other):
            await stream.aclose()  # type: ignore[attr-defined]


async def test_at_staleness_0_status_names_who_keeps_the_others_waiting() -> None:
    async with cluster(num_workers=3) as (running, workers, _):
        plan = {"num_examples": 12, "batch_size": 6, "num_slices": 3, "staleness": 0.0}
        for worker in workers:
            await worker.open(**plan)
            await worker.next()

        def waits() -> list[tuple[str, float]]:
            tasks = wire.status_to_proto(running.job.get_status()).tasks
            named = {task.info.task: task.progress for task in tasks}
            return [(named[task].waiting_on, named[task].waiting_s) for task in ("worker:0", "worker:1")]

        workers[0].beat(waiting_on="ps:0 to apply step 1", waiting_s=3.0, waiting_step=1)
        missing = "worker:1, worker:2 to deliver their part of step 1"
        await until(lambda: waits() == [(missing, 3.0), ("", 0.0)])
        workers[1].beat(waiting_on="ps:0, ps:1 to apply step 1", waiting_s=2.0, waiting_step=1)
        await until(lambda: [text for text, _ in waits()] == ["worker:2 to deliver their part of step 1"] * 2)
        workers[2].beat(waiting_on="ps:1 to apply step 1", waiting_s=2.0, waiting_step=1)
        await until(lambda: [text for text, _ in waits()] == ["ps:0 to apply step 1", "ps:0, ps:1 to apply step 1"])


async def test_the_job_ends_well_when_all_workers_are_done() -> None:
    async with cluster() as (running, workers, servers):
        workers[0].goodbye()
        workers[1].goodbye()
        sessions = [server.session for server in servers]
        for session in sessions:
            stop = await until(functools.partial(session.ended, "stop"))
            assert (stop.exit_code, stop.reason) == (0, "every worker has finished")
        error = await refused(workers[0].next())
        assert isinstance(error, JobStoppedError | FencedError)
        for session in sessions:
            session.goodbye()
        assert await running.exit_code() == 0


async def test_a_ps_that_starts_after_the_end_hears_of_it() -> None:
    async with chief(num_workers=1, num_ps=1) as running:
        worker = await Task(running.address, "worker:0").welcomed()
        worker.goodbye(0)
        await until(lambda: running.job.sessions.stopping is not None)
        assert not running.job.finished.done(), "it waits for ps:0"
        late = Task(running.address, "ps:0")
        await until(lambda: late.ended("stop"))
        assert late.ended("stop").exit_code == 0
        late.goodbye(0)
        await until(running.job.finished.done)
        assert running.job.finished.result() == 0
        await worker.die()
        await late.die()


async def test_a_worker_that_stays_away_fails_the_job() -> None:
    async with cluster(worker_timeout_s=0.3) as (running, workers, servers):
        workers[1].goodbye(1, "ValueError: no such file")
        stop = await until(lambda: workers[0].ended("stop"))
        assert stop.exit_code == 1
        assert "worker:1 was lost" in stop.reason and "ValueError: no such file" in stop.reason
        for task in (workers[0], *(server.session for server in servers if server.session)):
            task.goodbye(1)
        assert await running.exit_code() == 1


async def test_a_checkpoint_without_a_directory_is_refused() -> None:
    async with cluster() as (_, workers, _):
        request = chief_pb2.SaveCheckpointRequest(sender=workers[0].sender)
        error = await refused(workers[0].stub.SaveCheckpoint(request))
        assert isinstance(error, ConfigurationError) and "--checkpoint-dir" in str(error)
        assert not isinstance(error, PeerUnavailableError)
