"""TF_CONFIG and torchrun's variables: reading, writing, agreement; and the resolvers on top."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.cluster.resolvers import SimpleClusterResolver, TFConfigClusterResolver
from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import (
    TaskPlacement,
    emit_tf_config,
    parse_tf_config,
    placement_from_environment,
    torchrun_environment,
)
from stratagem.errors import ClusterSpecError

CLUSTER = ClusterSpec(chief=("h:1",), worker=("h:2", "h:3", "g:2"), ps=("h:4",))


@given(st.integers(0, 1), st.integers(1, 4), st.integers(0, 3), st.data())
def test_round_trip(num_chiefs: int, num_workers: int, num_ps: int, data: st.DataObject) -> None:
    cluster = ClusterSpec(
        chief=tuple(f"c:{i + 1}" for i in range(num_chiefs)),
        worker=tuple(f"w:{i + 1}" for i in range(num_workers)),
        ps=tuple(f"p:{i + 1}" for i in range(num_ps)),
    )
    task = data.draw(st.sampled_from(cluster.tasks))
    environ = {"TF_CONFIG": emit_tf_config(cluster, task), **torchrun_environment(cluster, task)}
    assert placement_from_environment(environ) == TaskPlacement(cluster, task)


def test_torchrun_names_count_workers() -> None:
    assert torchrun_environment(CLUSTER, TaskId("worker", 1)) == {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "2",
    }
    assert torchrun_environment(CLUSTER, TaskId("worker", 2))["LOCAL_RANK"] == "0"
    assert torchrun_environment(CLUSTER, TaskId("ps", 0)) == {}


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "{}"}, {"TF_CONFIG": '{"cluster": {}}'}])
def test_absent_means_local(environ: dict[str, str]) -> None:
    assert placement_from_environment(environ) is None


def test_cloud_extras_are_accepted() -> None:
    text = json.dumps(
        {
            "cluster": {"worker": ["a:1"]},
            "task": {"type": "worker", "index": "0", "trial": "x"},
            "environment": "cloud",
            "rpc_layer": "grpc",
        }
    )
    assert parse_tf_config(text) == TaskPlacement(ClusterSpec(worker=("a:1",)), TaskId("worker", 0))


def _config(**changes: Any) -> str:
    return json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}} | changes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{'cluster'", ["not JSON", "line 1 column 2", "got \"{'cluster'\""]),
        ("[1]", ["JSON object", "[1]"]),
        (_config(clutser={}), ["unknown key 'clutser'", "did you mean 'cluster'"]),
        (_config(cluster=3), ["expected a cluster like", "got 3"]),
        (_config(task={"type": "boss", "index": 0}), ["unknown task type 'boss'", "known: chief, evaluator"]),
        (_config(task={"type": "master", "index": 0}), ["unknown task type 'master'", "is worker 0 here"]),
        (_config(task={"type": "worker", "idx": 0}), ["unknown key 'idx'", "did you mean 'index'"]),
        (_config(task={"index": 0}), ['"type": "worker"']),
        (_config(task="worker"), ["got 'worker'"]),
        (_config(cluster={"worker": ["a:1", "b:1"]}, task={"type": "worker"}), ['the "index" of this worker, 0 to 1']),
        (_config(task={"type": "worker", "index": -1}), ["expected a task index", "got -1"]),
        (_config(task={"type": "worker", "index": True}), ["got True"]),
        (_config(task={"type": "worker", "index": 1}), ["worker:1 is not in the cluster, which has 1"]),
        (_config(rpc_layer="mpi"), ["rpc_layer 'grpc'", "'mpi'"]),
    ],
)
def test_refusals(text: str, words: list[str]) -> None:
    with pytest.raises(ClusterSpecError) as refusal:
        parse_tf_config(text)
    for word in words:
        assert word in str(refusal.value)


def test_torchrun_as_input() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "29500"}
    assert placement_from_environment(environ) == TaskPlacement(
        ClusterSpec(worker=("m:29500", "127.0.0.1:0")), TaskId("worker", 1)
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"MASTER_PORT": None}, "not MASTER_PORT"),
        ({"RANK": "2"}, "RANK=2 and WORLD_SIZE=2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE, got 'two'"),
    ],
)
def test_torchrun_refused(changes: dict[str, str | None], words: str) -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "29500"} | changes
    with pytest.raises(ClusterSpecError, match=words):
        placement_from_environment({name: value for name, value in environ.items() if value is not None})


@pytest.mark.parametrize(
    ("task", "variables", "words"),
    [
        ("worker:1", {"RANK": "0"}, ["TF_CONFIG", "RANK is 1", "RANK=0", "unset one"]),
        ("worker:1", {"WORLD_SIZE": "4"}, ["WORLD_SIZE is 3", "WORLD_SIZE=4"]),
        ("worker:1", {"MASTER_ADDR": "x"}, ["MASTER_ADDR is h", "MASTER_ADDR=x"]),
        ("worker:1", {"MASTER_PORT": "9"}, ["MASTER_PORT is 2", "MASTER_PORT=9"]),
        ("ps:0", {"RANK": "0"}, ["ps:0, which has no rank", "RANK=0"]),
    ],
)
def test_conflicts_name_both(task: str, variables: dict[str, str], words: list[str]) -> None:
    environ = {"TF_CONFIG": emit_tf_config(CLUSTER, TaskId.parse(task)), **variables}
    with pytest.raises(ClusterSpecError) as refusal:
        placement_from_environment(environ)
    for word in words:
        assert word in str(refusal.value)


def test_a_launcher_says_where_the_first_worker_of_a_local_job_opens_a_store() -> None:
    """Not where the chief listens: torch.distributed could not bind there."""
    cluster = ClusterSpec(chief=("127.0.0.1:7",), worker=("127.0.0.1:0", "127.0.0.1:0"))
    environ = {"TF_CONFIG": emit_tf_config(cluster, TaskId("worker", 1)), "MASTER_PORT": "4711"}
    assert placement_from_environment(environ) is not None
    assert torchrun_environment(cluster, TaskId("worker", 1))["MASTER_PORT"] == "7"


def test_localhost_is_no_conflict() -> None:
    cluster = ClusterSpec(worker=("127.0.0.1:5",))
    environ = {"TF_CONFIG": emit_tf_config(cluster, TaskId("worker", 0)), "MASTER_ADDR": "localhost"}
    assert placement_from_environment(environ) is not None


def test_tf_config_resolver() -> None:
    resolver = TFConfigClusterResolver(environ={"TF_CONFIG": emit_tf_config(CLUSTER, TaskId("ps", 0))})
    assert (resolver.cluster_spec(), resolver.task_type, resolver.task_id) == (CLUSTER, "ps", 0)
    other = TFConfigClusterResolver("worker", 2, {"TF_CONFIG": emit_tf_config(CLUSTER, TaskId("ps", 0))})
    assert other.task == TaskId("worker", 2)
    with pytest.raises(ClusterSpecError, match="worker:9"):
        TFConfigClusterResolver("worker", 9, {"TF_CONFIG": emit_tf_config(CLUSTER, TaskId("ps", 0))})
    local = TFConfigClusterResolver(environ={})
    assert (local.cluster_spec(), local.task, local.task_type, local.task_id) == (None, None, None, None)


def test_simple_resolver() -> None:
    resolver = SimpleClusterResolver({"worker": ["a:1"]}, "worker", 0)
    assert resolver.cluster_spec() == ClusterSpec(worker=("a:1",))
    assert resolver.task == TaskId("worker", 0)
    assert SimpleClusterResolver(CLUSTER).task is None
    with pytest.raises(ClusterSpecError, match="ps:0"):
        SimpleClusterResolver({"worker": ["a:1"]}, "ps", 0)
    with pytest.raises(ClusterSpecError, match="task_type with task_id=3"):
        SimpleClusterResolver({"worker": ["a:1"]}, task_id=3)
