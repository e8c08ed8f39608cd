"""What the chief refuses over the wire: places elsewhere, plans without end, heartbeats that are too long."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from stratagem.chief import wire
from stratagem.chief.counting import metric_states, metric_store
from stratagem.chief.events import Goodbye
from stratagem.chief.membership import session_streams
from stratagem.chief.membership.session import StopJob
from stratagem.chief.membership.session_streams import SessionStreams
from stratagem.errors import ForbiddenError, LimitError
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.generated import chief_pb2
from tests.contract.chief.fakes import cluster, refused, until


async def test_a_worker_names_no_place_elsewhere(tmp_path: Path) -> None:
    roots = f"{tmp_path / 'a'}:{tmp_path / 'b'}"
    async with cluster(checkpoint_roots=roots) as (_, workers, _):
        for asked in (tmp_path, tmp_path / "a" / ".." / "c", "/etc"):
            request = chief_pb2.SaveCheckpointRequest(sender=workers[0].sender, directory=str(asked))
            error = await refused(workers[0].stub.SaveCheckpoint(request))
            assert isinstance(error, ForbiddenError) and str(tmp_path / "b") in str(error)
        request = chief_pb2.SaveCheckpointRequest(sender=workers[0].sender, directory=str(tmp_path / "b" / "new"))
        saved = await workers[0].stub.SaveCheckpoint(request)
        assert saved.path.startswith(str(tmp_path / "b" / "new" / "step-"))
    assert {path.name for path in tmp_path.iterdir()} == {"b"}


async def test_a_plan_of_too_many_units_is_refused_and_answers_are_bounded() -> None:
    async with cluster(num_ps=0) as (_, workers, _):
        error = await refused(workers[0].open(num_examples=1 << 60, batch_size=1))
        assert isinstance(error, LimitError) and "units in an epoch" in str(error)
        await workers[0].open(num_examples=5000, batch_size=1)
        reply = await workers[0].next(want=(1 << 32) - 1)
        assert len(reply.leases) == wire.MAX_WANT


async def test_a_heartbeat_that_is_too_long_ends_the_session_with_the_reason() -> None:
    async with cluster(num_ps=0) as (_, workers, _):
        workers[0].beat(waiting_on="x" * (session_streams.MAX_PROGRESS_BYTES + 1))
        await until(lambda: workers[0].error)
        assert workers[0].error is not None
        error = error_from_rpc(workers[0].error, "chief:0")
        assert isinstance(error, LimitError) and "about its progress" in str(error)
        assert workers[1].error is None


async def test_a_long_refusal_arrives() -> None:
    """Beyond what gRPC takes as metadata the caller was told of that alone, and to raise max_calls."""
    async with cluster(num_ps=0) as (_, workers, _):
        for word in ("x", "\u6f22", "\0"):
            request = chief_pb2.SaveCheckpointRequest(sender=workers[0].sender, directory="/" + word * 50_000)
            error = await refused(workers[0].stub.SaveCheckpoint(request))
            assert isinstance(error, ForbiddenError) and "below" in str(error)


@pytest.mark.parametrize(
    ("what", "join"),
    [
        ("ClusterSpecError", {"address": "a\0b:1"}),
        ("ClusterSpecError", {"address": "a..b:1"}),
        ("ClusterSpecError", {"address": "nowhere"}),
        ("LimitError", {"address": "a" * 1001}),
        ("LimitError", {"torch_version": "2" * 1001}),
    ],
)
async def test_what_a_task_calls_itself_is_checked_before_others_hear_of_it(what: str, join: Any) -> None:
    """An address that no name can be ended in a traceback of the chief, and one of 20 MB went to every task."""
    async with cluster(num_ps=0) as (running, workers, _):
        request = chief_pb2.SessionRequest(join=chief_pb2.Join(task="evaluator:0", **join))
        call = workers[0].stub.Session(iter([request]))
        with pytest.raises(grpc.RpcError) as refusal:
            await anext(aiter(call))
        assert type(error_from_rpc(refusal.value, "chief:0")).__name__ == what
        assert running.job.get_status().tasks[-1].task == "worker:1"


async def test_what_workers_say_and_count_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker that went on naming topics could fill the memory of the chief, and its journal."""
    monkeypatch.setattr(metric_store, "MAX_AGREED_BYTES", 20_000)
    monkeypatch.setattr(metric_states, "MAX_LOGS_BYTES", 20_000)
    async with cluster(num_ps=0, num_workers=1) as (running, [worker], _):

        async def until_refused(kind: str, **fields: Any) -> int:
            for ordinal in range(100):
                topic = chief_pb2.Topic(group=f"{kind} {ordinal}", ordinal=ordinal)
                try:
                    if kind == "logs":
                        request = chief_pb2.RecordLogsRequest(sender=worker.sender, topic=topic, **fields)
                        await worker.stub.RecordLogs(request)
                    else:
                        await worker.stub.Agree(chief_pb2.AgreeRequest(sender=worker.sender, topic=topic, **fields))
                except grpc.RpcError as error:
                    assert isinstance(found := error_from_rpc(error, "chief"), LimitError) and "MiB" in str(found)
                    return ordinal
            raise AssertionError("it took all")

        assert 10 < await until_refused("logs", logs=[chief_pb2.Log(name="x" * 500, value=1.0)]) < 30
        assert 30 < await until_refused("agree", value=1) < 50
        running.job.metric_store.begin_anew()
        assert 60 < await until_refused("leave", leave=True) < 90


async def test_words_of_tasks_are_bounded() -> None:
    async with cluster(num_ps=0) as (_, workers, _):
        topic = chief_pb2.Topic(group="x" * (wire.MAX_NAME + 1))
        error = await refused(workers[0].stub.Agree(chief_pb2.AgreeRequest(sender=workers[0].sender, topic=topic)))
        assert isinstance(error, LimitError) and "at most 1000 characters" in str(error)
        said = wire.request_from_proto(
            chief_pb2.SessionRequest(goodbye=chief_pb2.Goodbye(exit_code=1, message="x" * 10**6))
        )
        assert isinstance(said, Goodbye) and len(said.message) < 10_000


async def test_events_that_a_task_does_not_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_streams, "MAX_UNREAD_EVENTS", 3)
    async with cluster(num_ps=0) as (running, workers, _):
        told: SessionStreams = running.job.streams
        number, other = told._outboxes
        deaf = told._outboxes[number] = asyncio.Queue()
        for _ in range(10):
            told.broadcast(told.membership())
            await until(told._outboxes[other].empty)
        assert number not in told._outboxes and deaf.qsize() == 1 and deaf.get_nowait() is None
        told.broadcast(StopJob(0, "the test is over"))
        await until(lambda: any(worker.ended("stop") is not None for worker in workers))
