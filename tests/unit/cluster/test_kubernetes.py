"""How a pod knows its place: one TF_CONFIG for all, and STRATAGEM_TASK, an index or a name of its own."""

from __future__ import annotations

import json

import pytest

from stratagem.cluster.config import PsConfig
from stratagem.cluster.resolvers import KubernetesClusterResolver
from stratagem.cluster.sources import gather
from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import TaskPlacement, emit_tf_config, placement_from_environment
from stratagem.errors import ClusterSpecError, ConfigurationError

CLUSTER = ClusterSpec(
    chief=("chief-0.job:2222",), worker=("worker-0.job:2222", "worker-1.job:2222"), ps=("ps-0.job:2222",)
)
SHARED = {"TF_CONFIG": json.dumps({"cluster": CLUSTER.as_dict()})}


def test_the_task_beside_a_tf_config_for_all() -> None:
    assert placement_from_environment(SHARED) == TaskPlacement(CLUSTER, None)
    environ = SHARED | {"STRATAGEM_TASK": "worker:1"}
    assert placement_from_environment(environ) == TaskPlacement(CLUSTER, TaskId("worker", 1))


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (SHARED | {"STRATAGEM_TASK": "worker-1"}, "expected a task like 'worker:0'"),
        (SHARED | {"STRATAGEM_TASK": "worker:2"}, "worker:2 is not in the cluster, which has 2"),
        (
            {"TF_CONFIG": emit_tf_config(CLUSTER, TaskId("worker", 0)), "STRATAGEM_TASK": "ps:0"},
            "TF_CONFIG says this process is worker:0, but STRATAGEM_TASK=ps:0 is set",
        ),
        (SHARED | {"STRATAGEM_TASK": "worker:1", "RANK": "0"}, "RANK is 1, but RANK=0 is set"),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ClusterSpecError, match=words):
        placement_from_environment(environ)


def test_a_flag_is_stronger() -> None:
    resolved, placement = gather("worker", SHARED | {"STRATAGEM_TASK": "worker:1"}, {"task": "worker:0"})
    assert resolved.config.task == "worker:0"
    assert placement == TaskPlacement(CLUSTER, TaskId("worker", 0))


def test_a_pod_listens_everywhere_and_is_called_by_its_name() -> None:
    environ = SHARED | {"STRATAGEM_TASK": "ps:0", "STRATAGEM_BIND": "0.0.0.0:2222"}
    resolved, _ = gather("ps", environ)
    assert isinstance(resolved.config, PsConfig)
    assert (resolved.config.bind, resolved.config.advertise) == ("0.0.0.0:2222", "ps-0.job:2222")
    assert (resolved.config.chief, resolved.origins["advertise"]) == ("chief-0.job:2222", "environment TF_CONFIG")
    other, _ = gather("ps", environ, {"advertise": "10.0.0.7:9"})
    assert isinstance(other.config, PsConfig)
    assert other.config.advertise == "10.0.0.7:9"


@pytest.mark.parametrize(
    ("environ", "task"),
    [
        ({"STRATAGEM_TASK": "ps:0"}, TaskId("ps", 0)),
        ({"STRATAGEM_TASK": "worker:1", "JOB_COMPLETION_INDEX": "1"}, TaskId("worker", 1)),
        ({"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-0-x7"}, TaskId("worker", 1)),
        ({"HOSTNAME": "job-worker-1"}, TaskId("worker", 1)),
    ],
)
def test_resolver(environ: dict[str, str], task: TaskId) -> None:
    resolver = KubernetesClusterResolver(environ=SHARED | environ)
    assert (resolver.cluster_spec(), resolver.task) == (CLUSTER, task)
    assert (resolver.task_type, resolver.task_id) == (task.type, task.index)


def test_resolver_of_another_role() -> None:
    assert KubernetesClusterResolver("ps", SHARED | {"HOSTNAME": "job-ps-0"}).task == TaskId("ps", 0)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "expected the cluster in TF_CONFIG, got none"),
        ({"TF_CONFIG": "{}"}, "expected a cluster in TF_CONFIG, got '{}'"),
        (SHARED | {"HOSTNAME": "job-worker"}, "JOB_COMPLETION_INDEX.*HOSTNAME='job-worker'"),
        (SHARED | {"HOSTNAME": "job-worker-2"}, "worker:2 is not in the cluster"),
        (
            SHARED | {"STRATAGEM_TASK": "worker:1", "JOB_COMPLETION_INDEX": "0"},
            "is worker:1, but JOB_COMPLETION_INDEX=0",
        ),
    ],
)
def test_resolver_refuses(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        KubernetesClusterResolver(environ=environ)
