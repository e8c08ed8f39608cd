"""The chief as a process: address, health, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc
from stratagem.rpc.session import SessionClient

DEADLINE_S = 30.0


@contextlib.contextmanager
def chief_process(**config: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "stratagem.chief", "--print-address", "--config-json", json.dumps(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_it_prints_its_address_serves_and_ends_when_its_worker_does() -> None:
    with chief_process(num_workers=1) as process:
        address = address_of(process)
        with grpc.insecure_channel(address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            for service in ("", "stratagem.Chief"):
                request = health_pb2.HealthCheckRequest(service=service)
                reply = health.Check(request, wait_for_ready=True, timeout=DEADLINE_S)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
        worker = SessionClient(address, "worker:0", "")
        worker.start(DEADLINE_S)
        assert worker.wait_ready(DEADLINE_S).lead == "worker:0"
        worker.goodbye(0)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        assert f"chief:0 listening on {address}" in errors
        assert "Waiting for the cluster: worker:0" in errors and "Cluster is ready" in errors


def test_a_state_dir_that_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "chief.address.partial").mkdir()  # where the file that says where it serves is to be made
    for state_dir, why in ((tmp_path / "file" / "below", "Not a directory"), (tmp_path, "Is a directory")):
        with chief_process(num_workers=1, state_dir=str(state_dir)) as process:
            _, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 1 and "Traceback" not in errors
            assert f"chief: cannot keep the journal in {state_dir}: {why}" in errors


def test_a_file_that_names_no_machine_is_warned_of(tmp_path: Path) -> None:
    """Tasks on other machines read there that their chief was on their own."""
    with chief_process(num_workers=1, bind="0.0.0.0:0", insecure=True, state_dir=str(tmp_path)) as process:
        address = address_of(process)
        process.terminate()
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert f"chief.address in {tmp_path} says {address}, which other machines cannot use" in errors


def test_the_file_says_the_port_that_was_bound(tmp_path: Path) -> None:
    with chief_process(num_workers=1, advertise="node7:0", state_dir=str(tmp_path)) as process:
        port = address_of(process).rpartition(":")[2]
        assert (tmp_path / "chief.address").read_text() == f"node7:{port}\n"


def test_sigterm_tells_everybody_and_ends_with_143() -> None:
    with chief_process(num_workers=1, heartbeat_interval_s=0.05) as process:
        worker = SessionClient(address_of(process), "worker:0", "")
        worker.start(DEADLINE_S)
        process.send_signal(signal.SIGTERM)
        stopped = worker.wait_stopped(DEADLINE_S)
        assert getattr(stopped, "exit_code", None) == 143
        worker.goodbye(143)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 143, errors


def test_killed_between_its_last_word_and_its_exit_it_finds_that_the_job_is_over(tmp_path: Path) -> None:
    """Started again by the kubelet, it began another job, and waited five minutes for workers that had finished."""
    config: dict[str, Any] = dict(
        num_workers=1, state_dir=str(tmp_path / "state"), checkpoint_dir=str(tmp_path / "kept")
    )
    with chief_process(**config) as process:  # `stratagem chief` would take its file away at its exit
        worker = SessionClient(address_of(process), "worker:0", "")
        worker.start(DEADLINE_S)
        worker.goodbye(0)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
    with chief_process(**config) as process:
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0 and "The job is over: every worker has finished" in errors, errors
    with chief_process(**config) as process:
        assert address_of(process), "another job begins"


def test_a_configuration_that_cannot_work_ends_with_2() -> None:
    with chief_process(num_workers=0) as process:
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 2 and "num_workers" in errors and "Traceback" not in errors
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with chief_process(num_workers=1, bind=f"127.0.0.1:{taken.getsockname()[1]}") as process:
            _, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 2 and "the port is in use" in errors and "Traceback" not in errors


def test_status_names_who_is_missing() -> None:
    with chief_process(num_workers=2, num_ps=1) as process:
        with grpc.insecure_channel(address_of(process)) as channel:
            stub = chief_pb2_grpc.ChiefStub(channel)
            status = stub.GetStatus(chief_pb2.GetStatusRequest(), wait_for_ready=True, timeout=DEADLINE_S)
        assert not status.ready
        assert list(status.waiting_for) == ["worker:0", "worker:1", "ps:0"]
        assert [task.state for task in status.tasks] == ["live"] + ["waiting"] * 3
