"""``stratagem ps`` as a process, with a chief that is only its session."""

from __future__ import annotations

import contextlib
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stratagem.checkpoint.ended import note_leaving, take_end
from stratagem.cluster.config import ServerConfig
from stratagem.ps.store import Store
from stratagem.rpc.channels import connect
from stratagem.rpc.generated import chief_pb2, common_pb2, ps_pb2, ps_pb2_grpc
from stratagem.rpc.server import RunningServer, serve
from tests import forks
from tests.contract.ps.raw_client import TIMEOUT_S, RawClient
from tests.polling import until
from tests.unit.ps.driver import CALL, CHIEF, DirectWorker, complete, make_spec

SERVICE = "stratagem.ParameterServer"
pytestmark = pytest.mark.usefixtures("preloaded")


class SessionOnly:
    """Welcomes whoever joins; says what the test puts into ``events``."""

    def __init__(self) -> None:
        self.joined: queue.SimpleQueue[chief_pb2.Join] = queue.SimpleQueue()
        self.events: queue.SimpleQueue[chief_pb2.SessionEvent | None] = queue.SimpleQueue()
        self.goodbyes: queue.SimpleQueue[chief_pb2.Goodbye] = queue.SimpleQueue()

    def Session(
        self, request_iterator: Iterator[chief_pb2.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[chief_pb2.SessionEvent]:
        self.joined.put(next(request_iterator).join)
        threading.Thread(target=self._hear, args=(request_iterator,)).start()
        welcome = chief_pb2.Welcome(incarnation=3, heartbeat_interval_s=0.1)
        yield chief_pb2.SessionEvent(welcome=welcome)
        context.add_callback(lambda: self.events.put(None))
        while (event := self.events.get()) is not None:
            yield event

    def _hear(self, requests: Iterator[chief_pb2.SessionRequest]) -> None:
        with contextlib.suppress(grpc.RpcError):  # the stream's end
            for request in requests:
                if request.HasField("goodbye"):
                    self.goodbyes.put(request.goodbye)


@pytest.fixture
def chief() -> Iterator[tuple[SessionOnly, RunningServer]]:
    servicer = SessionOnly()

    def register(server: grpc.Server) -> None:
        session = grpc.stream_stream_rpc_method_handler(
            servicer.Session, chief_pb2.SessionRequest.FromString, chief_pb2.SessionEvent.SerializeToString
        )
        handler = grpc.method_handlers_generic_handler("stratagem.Chief", {"Session": session})
        server.add_generic_rpc_handlers((handler,))

    running = serve(
        ServerConfig(task="ps:0", max_message_bytes=1 << 20),
        register,
        services=["stratagem.Chief"],
    )
    yield servicer, running
    running.stop(0.2)


PS = ("ps", "--task", "ps:0")


def start(*arguments: str) -> subprocess.Popen[str]:
    return forks.Popen([sys.executable, "-m", "stratagem.cli", *PS, *arguments], stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, text = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, text


def test_killed_between_its_goodbye_and_its_exit_it_finds_that_the_job_is_over(
    tmp_path: pathlib.Path, chief: tuple[SessionOnly, RunningServer]
) -> None:
    """The chief had heard its goodbye and ended: started again by the kubelet, it waited five minutes for another."""
    servicer, server = chief
    process = start("--chief", server.address, "--checkpoint-dir", str(tmp_path))
    try:
        servicer.joined.get(timeout=60)
        servicer.events.put(chief_pb2.SessionEvent(stop=chief_pb2.Stop(exit_code=0, reason="all done")))
        assert servicer.goodbyes.get(timeout=60).exit_code == 0
    finally:
        process.kill()  # it waits for the end of the stream
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    told = take_end(str(tmp_path), "ps:0")
    assert told is not None and "all done" in str(told)
    assert not list(tmp_path.iterdir())


def test_taken_for_lost_after_the_end_of_the_job_it_ends(chief: tuple[SessionOnly, RunningServer]) -> None:
    """It had stood still for 20 s, and told a chief that had ended, for a minute, that it has finished."""
    servicer, server = chief
    process = start("--chief", server.address)
    try:
        servicer.joined.get(timeout=60)
        servicer.events.put(chief_pb2.SessionEvent(stop=chief_pb2.Stop(exit_code=0, reason="all done")))
        servicer.events.put(chief_pb2.SessionEvent(fenced=chief_pb2.Fenced(reason="ps:0 is lost")))
        servicer.events.put(None)
    finally:
        code, text = finish(process)
    assert code == 0, text
    assert servicer.joined.empty()


def test_killed_while_python_ends_it_finds_that_the_job_is_over(
    tmp_path: pathlib.Path, chief: tuple[SessionOnly, RunningServer]
) -> None:
    """That takes a second, with torch; what it had noted was gone by then."""
    servicer, server = chief
    words = [*PS, "--chief", server.address, "--checkpoint-dir", str(tmp_path)]
    script = "import atexit, os, stratagem.cli.__main__ as cli; atexit.register(os.kill, os.getpid(), 9); cli.main()"
    process = forks.Popen([sys.executable, "-c", script, *words], stderr=subprocess.PIPE)
    try:
        servicer.joined.get(timeout=60)
        servicer.events.put(chief_pb2.SessionEvent(stop=chief_pb2.Stop(exit_code=0, reason="all done")))
        assert servicer.goodbyes.get(timeout=60).exit_code == 0
        servicer.events.put(None)
    finally:
        code, text = finish(process)
    assert code == -signal.SIGKILL, text
    assert take_end(str(tmp_path), "ps:0") is not None


def test_joins_is_put_back_serves_and_ends_with_the_job(
    tmp_path: pathlib.Path, chief: tuple[SessionOnly, RunningServer]
) -> None:
    store = Store()
    worker = DirectWorker(store, "worker:0", make_spec([(10,)], prefix="w"))
    worker.create(torch.arange(10.0))
    path = tmp_path / "step-00000000"
    path.mkdir()
    (path / "nonce").write_text("n")
    store.checkpoints.hold_commits(CHIEF, 1, 10.0, CALL)
    store.checkpoints.save_shards(1, str(path), "n")
    complete(path)

    servicer, server = chief
    note_leaving(str(tmp_path), "ps:0", "of a process before")
    process = start("--chief", server.address, "--checkpoint-dir", str(tmp_path))
    try:
        join = servicer.joined.get(timeout=60)
        assert join.task == "ps:0" and join.store_epoch == 0
        until(lambda: not list(tmp_path.glob("leaves-*")), lambda: "the process before is needed again")
        channel = connect(join.address)
        stub: Any = ps_pb2_grpc.ParameterServerStub(channel)
        restore = ps_pb2.RestoreShardsRequest(
            sender=common_pb2.Sender(task="chief:0", incarnation=1), directory=str(path)
        )
        stub.RestoreShards(restore, timeout=TIMEOUT_S)
        describe = ps_pb2.DescribeUnitsRequest(sender=restore.sender)
        assert stub.DescribeUnits(describe, timeout=TIMEOUT_S).store_epoch > store.state.store_epoch
        info = common_pb2.TaskInfo(task="ps:0", incarnation=3, live=True)
        servicer.events.put(chief_pb2.SessionEvent(membership=chief_pb2.Membership(tasks=[info])))
        health: Any = health_pb2_grpc.HealthStub(channel)
        for status in health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=TIMEOUT_S):
            if status.status == health_pb2.HealthCheckResponse.SERVING:
                break
        client = RawClient(join.address)
        assert client.hello.server.incarnation == 3
        assert client.pull(4).versions[0].num_frames == 1
        assert torch.equal(client.receive(10, 1), torch.arange(10.0))
        servicer.events.put(chief_pb2.SessionEvent(stop=chief_pb2.Stop(exit_code=0, reason="all done")))
        code, text = finish(process)
        assert code == 0, text
        assert "The job is over: all done" in text and "Traceback" not in text
        assert not list(tmp_path.glob("leaves-*"))
        client.close()
        channel.close()
    finally:
        process.kill()
        finish(process)


def test_sigterm_ends_it(chief: tuple[SessionOnly, RunningServer]) -> None:
    servicer, server = chief
    process = start("--chief", server.address)
    try:
        assert servicer.joined.get(timeout=60).store_epoch == 0
        process.send_signal(signal.SIGTERM)
        code, text = finish(process)
        assert code == 143, text
        assert "Traceback" not in text
    finally:
        process.kill()


def test_a_port_in_use_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = finish(start("--chief", "127.0.0.1:1", "--bind", f"127.0.0.1:{port}"))
    assert code == 2 and f"cannot listen on 127.0.0.1:{port}" in text and "Traceback" not in text


def test_unknown_flags_and_values_are_usage_errors() -> None:
    code, text = finish(start("--num-threads", "0"))
    assert code == 2 and "num_threads" in text
