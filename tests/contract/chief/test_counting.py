"""Evaluations, metric_states and agreements of the service Chief over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.chief.monitoring import standstill
from stratagem.cluster.units import MAX_STATE_BYTES, Unit
from stratagem.errors import ConfigurationError, LimitError, PeerUnavailableError, ProtocolError
from stratagem.rpc.generated import chief_pb2
from tests.contract.chief.fakes import DEADLINE_S, FakePs, Task, chief, cluster, indices, ps, refused, until

FIT = chief_pb2.Topic(group="fit 1", ordinal=0)
EVALUATION = chief_pb2.Topic(group="evaluation 1", ordinal=0)


def state(index: int, data: bytes, topic: chief_pb2.Topic | None = None) -> chief_pb2.MetricState:
    return chief_pb2.MetricState(index=index, data=data, topic=topic)


async def evaluate(
    task: Task, states: Any = (), *, attempt: int = 1, held: Any = (), want: int = 1, wait: bool = True, **more: Any
) -> Any:
    """Asks for units of an evaluation of 8 examples, 2 in a unit."""
    sizes = {name: more.pop(name, default) for name, default in (("num_examples", 8), ("batch_size", 2))}
    evaluation = chief_pb2.EvaluationPass(name=EVALUATION, attempt=attempt, **sizes)
    request = chief_pb2.NextUnitsRequest(
        sender=task.sender, evaluation=evaluation, states=states, held=held, want=want, wait=wait, **more
    )
    reply = await task.stub.NextUnits(request, timeout=DEADLINE_S)
    return SimpleNamespace(units=indices(reply), end=reply.end, attempt=reply.attempt)


async def counted(task: Task, topic: chief_pb2.Topic = EVALUATION, **more: Any) -> Any:
    return await task.stub.GetMetricStates(chief_pb2.GetMetricStatesRequest(sender=task.sender, topic=topic, **more))


async def record(task: Task, loss: float, topic: chief_pb2.Topic = EVALUATION) -> dict[str, float]:
    logs = [chief_pb2.Log(name="loss", value=loss)]
    reply = await task.stub.RecordLogs(chief_pb2.RecordLogsRequest(sender=task.sender, topic=topic, logs=logs))
    return {log.name: log.value for log in reply.logs}


async def agree(task: Task, ordinal: int, value: int) -> int:
    topic = chief_pb2.Topic(group="fit 1, ends", ordinal=ordinal)
    request = chief_pb2.AgreeRequest(sender=task.sender, topic=topic, value=value)
    return int((await task.stub.Agree(request, timeout=DEADLINE_S)).value)


async def test_commits_are_held_while_two_workers_evaluate() -> None:
    async with cluster() as (running, workers, servers):
        first = await evaluate(workers[0], attempt=0, want=2)
        assert list(first.units) == [0, 1] and first.attempt == 1 and not first.end
        assert [fake.token for fake in servers] == [1 << 32 | 1] * 2
        assert list((await evaluate(workers[1], attempt=0, want=2)).units) == [2, 3]
        waiting = asyncio.create_task(evaluate(workers[1], [state(3, b"three"), state(2, b"two")]))
        await until(lambda: running.job.get_status().tasks[2].waiting_on)
        assert running.job.get_status().tasks[2].waiting_on == "worker:0 to finish their part of evaluation 1/0"
        assert all(fake.token for fake in servers)
        assert (await evaluate(workers[0], [state(0, b"zero"), state(1, b"one")])).end
        assert (await waiting).end
        assert [fake.token for fake in servers] == [0, 0] and servers[0].calls == ["hold", "release"]
        reply = await counted(workers[1])
        assert list(reply.states) == [b"zero", b"one", b"two", b"three"] and not reply.closed
        assert await record(workers[0], 1.5) == await record(workers[1], 2.5) == {"loss": 1.5}
        reply = await counted(workers[1], only_logs=True)
        assert reply.closed and not reply.states and reply.logs[0].value == 1.5
        assert (await evaluate(workers[1], attempt=0)).end, "one that comes late has nothing to do"
        assert [fake.token for fake in servers] == [0, 0]


async def test_units_of_a_dead_worker_are_counted_once_and_what_it_reported_stays() -> None:
    async with cluster() as (_, workers, servers):
        assert list((await evaluate(workers[1], attempt=0, want=3)).units) == [0, 1, 2]
        assert list((await evaluate(workers[1], [state(0, b"first")], held=[1, 2], want=1)).units) == [3]
        await workers[1].die()
        units: list[int] = []
        while not (reply := await evaluate(workers[0], [state(i, b"second") for i in units])).end:
            units = list(reply.units)
        assert list((await counted(workers[0])).states) == [b"first", *[b"second"] * 3]
        assert [fake.token for fake in servers] == [0, 0]


async def test_training_goes_on_when_nobody_evaluates_any_more() -> None:
    async with cluster() as (_, workers, servers):
        await evaluate(workers[0], attempt=0)
        await evaluate(workers[1], attempt=0)
        assert list((await evaluate(workers[0], want=0, leave=True)).units) == []
        assert all(fake.token for fake in servers)
        await workers[1].die()
        await until(lambda: not any(fake.token for fake in servers))
        reply = await evaluate(workers[0], attempt=0, want=9)
        assert list(reply.units) == [0, 1, 2, 3] and reply.attempt == 1, "the weights are the same"


async def test_other_weights_begin_anew() -> None:
    async with cluster() as (_, workers, servers):
        assert list((await evaluate(workers[0], attempt=0, want=4)).units) == [0, 1, 2, 3]
        servers[0].apply(Unit(1, 0, 0), num_servers=1)
        reply = await evaluate(workers[0], [state(index, b"old") for index in range(4)], want=4)
        assert list(reply.units) == [0, 1, 2, 3] and reply.attempt == 2
        late = await evaluate(workers[0], [state(0, b"old")], held=[0, 1, 2, 3], want=1, wait=False)
        assert late.attempt == 2 and list(late.units) == [0], "what was counted on the old ones does not count"
        assert (await evaluate(workers[0], [state(index, b"new") for index in range(4)], attempt=2)).end
        assert list((await counted(workers[0])).states) == [b"new"] * 4


async def test_a_ps_that_comes_back_is_held_before_anybody_uses_it() -> None:
    async with cluster(initialized=False) as (running, workers, servers):
        assert list((await evaluate(workers[0], attempt=0)).units) == [0]
        await servers[1].session.die()
        await until(lambda: len(running.job.sessions.servers) == 1)
        last = [state(index, b"x") for index in range(4)]
        assert isinstance(await refused(evaluate(workers[0], last)), PeerUnavailableError)
        async with ps(running.address, FakePs(1)) as again:
            await until(lambda: again.token)
            assert (await evaluate(workers[0])).end
            await until(lambda: not again.token)


async def test_a_ps_that_dies_while_another_comes_back_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async def describe() -> dict[Any, Any]:
        return {}  # as when the last answer has just been given up

    async with cluster() as (running, workers, _):
        await evaluate(workers[0], attempt=0)
        with monkeypatch.context() as away:
            away.setattr(running.job.ps_pool, "describe", describe)
            await running.job.evaluation.pin_again()
        await running.job.evaluation.pin_again()
        assert (await evaluate(workers[0], [state(0, b"zero")], want=1)).attempt == 1


async def test_what_cannot_be_is_refused() -> None:
    async with cluster() as (_, workers, _):
        await evaluate(workers[0], attempt=0)
        error = await refused(evaluate(workers[1], num_examples=9))
        assert isinstance(error, ConfigurationError) and "Every worker must evaluate the same data" in str(error)
        assert isinstance(await refused(evaluate(workers[0], batch_size=0)), ProtocolError)
        assert isinstance(await refused(evaluate(workers[0], [state(4, b"")])), ProtocolError)
        large = [state(0, bytes(MAX_STATE_BYTES + 1))]
        assert isinstance(await refused(evaluate(workers[0], large)), LimitError)


async def take(task: Task, states: Any, accepted: Any = (), **more: Any) -> Any:
    request = chief_pb2.NextUnitsRequest(
        sender=task.sender, dataset=1, epoch=0, accepted=accepted, states=states, wait=True, **{"want": 4, **more}
    )
    return await task.stub.NextUnits(request, timeout=DEADLINE_S)


async def test_what_was_counted_in_training_comes_with_the_acceptance() -> None:
    async with cluster() as (_, workers, _):
        await workers[0].open()
        await workers[1].open()
        assert indices(await take(workers[0], [], want=2)) == [0, 1]
        assert indices(await take(workers[1], [], want=2)) == [2, 3]
        report = await take(workers[0], [state(1, b"one", FIT), state(3, b"not mine", FIT)], [1], want=0)
        assert indices(report) == [] and not report.end
        await take(workers[0], [state(1, b"again", FIT)], [1], want=0)
        await take(workers[1], [state(i, b"two", FIT) for i in (2, 3)], [2, 3], want=0)
        assert list((await counted(workers[1], FIT)).states) == [b"one", b"two", b"two"]
        assert list((await counted(workers[1], FIT, first=2)).states) == [b"two"]
        await record(workers[1], 0.5, FIT)
        assert (await take(workers[0], [state(0, b"late", FIT)], [0])).end
        following = chief_pb2.Topic(group="fit 1", ordinal=1)
        assert list((await counted(workers[0], following)).states) == [b"late"]


async def test_workers_agree_on_the_largest_number() -> None:
    async with cluster() as (running, workers, _):
        waiting = asyncio.create_task(agree(workers[0], 0, 0))
        await until(lambda: running.job.get_status().tasks[1].waiting_on)
        assert running.job.get_status().tasks[1].waiting_on == "worker:1 to come to fit 1, ends/0"
        assert await agree(workers[1], 0, 1) == await waiting == 1
        assert await agree(workers[0], 0, 7) == 1, "what is decided stays"
        alone = asyncio.create_task(agree(workers[0], 1, 0))
        await until(lambda: running.job.get_status().tasks[1].waiting_on)
        group = chief_pb2.Topic(group="fit 1, ends")
        await workers[1].stub.Agree(chief_pb2.AgreeRequest(sender=workers[1].sender, topic=group, leave=True))
        assert await alone == 0
        alone = asyncio.create_task(agree(workers[1], 2, 0))
        await until(lambda: running.job.get_status().tasks[2].waiting_on)
        await workers[0].die()
        assert await alone == 0


async def test_workers_that_wait_for_each_other_end_the_job_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """One script alone calls barrier() in the middle of an epoch: they waited without end."""
    monkeypatch.setattr(standstill, "STANDSTILL_S", 0.5)
    async with cluster() as (running, workers, _):
        for worker in workers:
            await worker.open(num_examples=8)
            assert await worker.next(want=2)
        meets = asyncio.create_task(agree(workers[0], 0, 0))
        ends = asyncio.create_task(workers[1].next([2, 3], held=[]))
        await until(lambda: running.job.sessions.stopping)
        stop = running.job.sessions.stopping
        assert stop is not None and stop.exit_code == 2
        assert "worker:0 waits for worker:1 to come to fit 1, ends/0; worker:1 waits for worker:0 to f" in stop.reason
        for call in (meets, ends):
            assert "at the same point of its script" in str(await refused(call))


async def test_a_restarted_chief_knows_what_was_counted_and_decided(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with chief(state_dir=str(tmp_path)) as first:
            port = first.address
            servers = [await stack.enter_async_context(ps(port, FakePs(index))) for index in range(2)]
            workers = [Task(port, f"worker:{index}") for index in range(2)]
            for worker in workers:
                await worker.ready()
            await workers[0].open()
            assert indices(await take(workers[0], [], want=1)) == [0]
            await take(workers[0], [state(0, b"zero", FIT)], [0], want=0)
            assert list((await evaluate(workers[0], attempt=0, want=2)).units) == [0, 1]
            await evaluate(workers[0], [state(1, b"one")], held=[0], want=0)
            await asyncio.gather(agree(workers[0], 0, 0), agree(workers[1], 0, 1))
            await first.kill()
        async with chief(bind=port, state_dir=str(tmp_path)) as second:
            tasks = [Task(port, worker.task, resume=worker.incarnation) for worker in workers]
            for fake in servers:
                life = fake.session
                tasks.append(Task(port, life.task, life.address, life.incarnation))
            for task in tasks:
                await task.welcomed()
            assert second.job.journal.history.chief_epoch == 2
            assert list((await counted(tasks[0], FIT)).states) == [b"zero"]
            assert await agree(tasks[0], 0, 0) == 1
            reply = await evaluate(tasks[0], [state(0, b"zero")], want=9)
            assert list(reply.units) == [2, 3] and reply.attempt == 1
            assert [fake.token for fake in servers] == [2 << 32 | 1] * 2, "the dead chief's hold was taken over"
            assert (await evaluate(tasks[0], [state(index, b"rest") for index in (2, 3)])).end
            assert list((await counted(tasks[0])).states) == [b"zero", b"one", b"rest", b"rest"]
            for task in tasks:
                await task.die()
        for worker in workers:
            await worker.die()
