"""What a worker makes of its cluster."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from stratagem.checkpoint.ended import note_leaving
from stratagem.cluster.config import ChiefConfig, WorkerConfig
from stratagem.cluster.membership import Member, Membership
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import ConfigurationError, JobStoppedError
from stratagem.rpc.session import SessionClient
from stratagem.worker import runtime
from stratagem.worker.runtime import WorkerRuntime, told_otherwise

MEMBERS = tuple(Member(task, "127.0.0.1:1", 1, live=True) for task in ("ps:0", "worker:0", "worker:1"))


@pytest.mark.parametrize(
    ("num_told", "membership", "is_told_otherwise"),
    [
        (2, Membership(members=MEMBERS), False),
        (1, Membership(members=MEMBERS), True),
        (3, Membership(members=MEMBERS), True),
        (1, Membership(members=MEMBERS, wanted_workers=2), False),
        (1, Membership(members=MEMBERS, min_workers=1), False),
    ],
)
def test_another_number_of_workers_than_the_chief_has_is_said(
    num_told: int, membership: Membership, is_told_otherwise: bool
) -> None:
    cluster = ClusterSpec(worker=tuple(f"127.0.0.1:{port}" for port in range(1, num_told + 1)))
    said = told_otherwise(cluster, membership)
    assert bool(said) is is_told_otherwise
    assert not said or f"number of workers ({num_told}) than its chief (2)" in said


def test_a_dismissed_worker_that_was_killed_as_it_left_has_ended_well(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started again, it ended with exit code 2, and then waited for the end of the job."""

    def refuse(*_: object) -> None:
        raise ConfigurationError("worker:1 is not wanted")

    monkeypatch.setattr(SessionClient, "start", refuse)
    config = WorkerConfig(task="worker:1", chief="127.0.0.1:1", checkpoint_dir=str(tmp_path))
    cluster = ClusterSpec(chief=("127.0.0.1:1",), worker=("127.0.0.1:2", "127.0.0.1:3"))
    note_leaving(str(tmp_path), "worker:1", "its script is done")
    with pytest.raises(JobStoppedError, match="its script is done"):
        WorkerRuntime(config, cluster)
    with pytest.raises(ConfigurationError, match="not wanted"):
        WorkerRuntime(config, cluster)


def test_a_worker_that_knows_parameter_servers_its_chief_does_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in a ZeroDivisionError, or waited for a ring with workers that form none."""
    membership = Membership(members=MEMBERS[1:])
    monkeypatch.setattr(SessionClient, "start", lambda self, *_: setattr(self, "membership", membership))
    monkeypatch.setattr(SessionClient, "wait_ready", lambda *_: None)
    cluster = ClusterSpec(("127.0.0.1:1",), ("127.0.0.1:2", "127.0.0.1:3"), ("127.0.0.1:4",))
    with pytest.raises(ConfigurationError, match="was told of 1 parameter servers, but its chief of 0"):
        WorkerRuntime(WorkerConfig(task="worker:0", chief="127.0.0.1:1"), cluster)


def test_a_chief_that_worker_0_starts_is_told_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def see(config: ChiefConfig) -> None:
        assert (config.task, config.bind, config.num_workers) == ("chief:0", "127.0.0.1:2", 1)
        raise ConfigurationError(f"{config.worker_timeout_s} {config.checkpoint_dir} {config.insecure}")

    monkeypatch.setattr(runtime, "ChiefProcess", see)
    monkeypatch.setenv("STRATAGEM_WORKER_TIMEOUT_S", "7")
    monkeypatch.setenv("STRATAGEM_BIND", "127.0.0.1:9")
    config = WorkerConfig(task="worker:0", chief="127.0.0.1:2", checkpoint_dir="kept", insecure=True)
    with pytest.raises(ConfigurationError, match=r"^7\.0 .*kept True$"):
        WorkerRuntime(config, ClusterSpec(worker=("127.0.0.1:2",)))


def test_a_program_that_a_worker_starts_does_not_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker was lost to it, and the job a minute later."""
    command = [
        *(sys.executable, "-c"),
        "from stratagem.cluster.config import WorkerConfig\n"
        "from stratagem.cluster.spec import ClusterSpec\n"
        "from stratagem.worker.runtime import WorkerRuntime\n"
        "config = WorkerConfig(task='worker:0', chief='127.0.0.1:1', start_timeout_s=0.1)\n"
        "WorkerRuntime(config, ClusterSpec(('127.0.0.1:1',), ('127.0.0.1:2',)))\n",
    ]
    said = []

    def start(*_: object) -> None:
        said.append(subprocess.run(command, capture_output=True, text=True, timeout=120).stderr)
        raise ConfigurationError("that was all")

    monkeypatch.setattr(SessionClient, "start", start)
    with pytest.raises(ConfigurationError, match="that was all"):
        WorkerRuntime(
            WorkerConfig(task="worker:0", chief="127.0.0.1:1"), ClusterSpec(("127.0.0.1:1",), ("127.0.0.1:2",))
        )
    assert f"worker:0 (process {os.getpid()}) has started this one" in said[0]
