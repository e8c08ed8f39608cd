"""Containers of docker-compose find their index, and workers their cluster by the chief."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stratagem.checkpoint.ended import note_leaving
from stratagem.cluster.config import EvaluatorConfig, WorkerConfig
from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import emit_tf_config, placement_from_environment
from stratagem.errors import ClusterSpecError, ClusterTimeoutError, JobStoppedError, PeerUnavailableError
from stratagem.launch import replica
from stratagem.launch import status as asking
from stratagem.rpc.status_view import StatusView, TaskState


@pytest.mark.parametrize(
    ("name", "index"), [("project-worker-1", 0), ("my_project-ps-12", 11), ("old_worker_2", 1), ("p-worker-100", 99)]
)
def test_compose_counts_from_1(name: str, index: int) -> None:
    assert replica.index_of(name) == index


@pytest.mark.parametrize("name", ["project-worker-run-0f3a", "worker", "project-worker-0", "worker-1-x", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ClusterSpecError, match="expected a container name of docker-compose"):
        replica.index_of(name)


def test_the_environment_says_task_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "container_name", lambda: "p-worker-3")
    found = replica.own_environment({"STRATAGEM_TASK": "worker:compose", "X": "y"})
    assert found == {"STRATAGEM_TASK": "worker:2", "STRATAGEM_ADVERTISE": "p-worker-3:0", "X": "y"}
    named = {"STRATAGEM_TASK": "ps:compose", "STRATAGEM_ADVERTISE": "host:4"}
    assert replica.own_environment(named)["STRATAGEM_ADVERTISE"] == "host:4"
    for other in ({}, {"STRATAGEM_TASK": "worker:1"}, {"STRATAGEM_TASK": "worker"}):
        assert replica.own_environment(other) is other


@pytest.mark.parametrize(
    ("answer", "name"),
    [("172.18.0.3      p-worker-2.p_default\n", "p-worker-2"), ("172.18.0.3  alone\n", "alone")],
)
def test_the_name_server_knows_the_container(answer: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == ["getent", "-s", "dns", "hosts"]
        return subprocess.CompletedProcess(command, 0, answer, "")

    monkeypatch.setattr("stratagem.launch.replica.subprocess.run", ask)
    monkeypatch.setattr("stratagem.launch.replica.socket.gethostbyname", lambda host: "172.18.0.3")
    assert replica.container_name() == name


@pytest.mark.parametrize("program", ["exit 2", "exec sleep 60"])
def test_outside_of_a_container_the_reason_is_said(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "getent").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "getent").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(replica, "_TIMEOUT_S", 1.0)
    with pytest.raises(ClusterSpecError, match="elsewhere give the index"):
        replica.container_name()


def config(task: str, start_timeout_s: float = 5.0) -> WorkerConfig:
    return WorkerConfig(task=task, chief="chief:2222", start_timeout_s=start_timeout_s)


def test_the_chief_says_the_cluster() -> None:
    status = StatusView(
        num_ps=1, tasks=tuple(TaskState(name, "live") for name in ("chief:0", "worker:0", "worker:1", "ps:0"))
    )
    cluster, task = asking.placement_of(config("worker:1"), status)
    assert (cluster.num_workers, cluster.num_ps, cluster.chief_address, str(task)) == (2, 1, "chief:2222", "worker:1")
    cluster, _ = asking.placement_of(config("worker:4"), status)
    assert cluster.num_workers == 5, "it joins a job that began with fewer"


def test_an_evaluator_learns_the_cluster_too() -> None:
    status = StatusView(
        num_ps=1, tasks=tuple(TaskState(name, "live") for name in ("chief:0", "worker:0", "ps:0", "evaluator:0"))
    )
    cluster, task = asking.placement_of(EvaluatorConfig(chief="chief:2222", checkpoint_dir="/c"), status)
    assert (cluster.num_workers, cluster.num_ps, str(task)) == (1, 1, "evaluator:0")
    assert is_evaluator_by(emit_tf_config(cluster, TaskId("evaluator", 0)))


def is_evaluator_by(tf_config: str) -> bool:
    placement = placement_from_environment({"TF_CONFIG": tf_config})
    return placement is not None and placement.task == TaskId("evaluator", 0)


def test_a_chief_that_is_still_starting_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [PeerUnavailableError("not yet"), StatusView(tasks=(TaskState("worker:0", "waiting"),))]

    def fetch(*arguments: Any) -> StatusView:
        answer = answers.pop(0)
        if not isinstance(answer, StatusView):
            raise answer
        return answer

    monkeypatch.setattr(asking, "AGAIN_S", 0.0)
    monkeypatch.setattr(asking, "fetch_status", fetch)
    assert asking.ask_for_cluster(config("worker:0")).cluster.num_workers == 1
    answers += [PeerUnavailableError("gone")] * 2
    told = r"worker:0 got no cluster from its chief within 0 s: gone\. Start the chief first"
    with pytest.raises(ClusterTimeoutError, match=told):
        asking.ask_for_cluster(config("worker:0", start_timeout_s=1e-9))


def test_a_worker_that_died_at_the_end_does_not_wait_for_a_chief(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It knows its chief alone, as in docker-compose, and waited five minutes before it looked."""
    note_leaving(str(tmp_path), "worker:0", "its script is done")
    late = config("worker:0", 0.2).model_copy(update={"chief": "127.0.0.1:1", "checkpoint_dir": str(tmp_path)})
    with pytest.raises(ClusterTimeoutError):
        asking.ask_for_cluster(late)  # the chief of a next job may be about to start
    monkeypatch.setattr(asking, "LOOK_S", 0.0)
    with pytest.raises(JobStoppedError, match="its script is done") as told:
        asking.ask_for_cluster(late)
    assert told.value.exit_code == 0
