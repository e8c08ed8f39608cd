"""ClusterSpec: what is accepted, and the reason of each refusal."""

from __future__ import annotations

import pytest

from stratagem.cluster.choice import choose_strategy
from stratagem.cluster.resolvers import SimpleClusterResolver
from stratagem.cluster.spec import ClusterSpec, split_address
from stratagem.cluster.task import TaskId
from stratagem.errors import ClusterSpecError, ConfigurationError

FULL = {
    "chief": ["c:1"],
    "worker": ["w0:1", "w1:1"],
    "ps": ["p0:1"],
    "evaluator": ["e:1"],
}


def test_full_cluster_round_trips() -> None:
    cluster = ClusterSpec.from_mapping(FULL)
    assert cluster.as_dict() == FULL
    assert (cluster.num_workers, cluster.num_ps, cluster.chief_address) == (2, 1, "c:1")
    assert [str(task) for task in cluster.tasks] == ["chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0"]
    assert ClusterSpec.from_mapping(cluster.as_dict()) == cluster


def test_what_scripts_of_tensorflow_ask_a_cluster() -> None:
    resolver = SimpleClusterResolver({"worker": ["a:1", "b:1"], "ps": ["c:1"]})
    cluster = resolver.cluster_spec()
    assert cluster is not None and resolver.rpc_layer == "grpc"
    assert cluster.jobs == ["worker", "ps"]
    assert (cluster.num_tasks("worker"), cluster.job_tasks("ps")) == (2, ["c:1"])
    with pytest.raises(ValueError, match=r"expected a role of the cluster \(worker, ps\), got 'chief'"):
        cluster.num_tasks("chief")


def test_roles_may_be_given_as_tensorflow_s_class_takes_them() -> None:
    roles = {"worker": ["a:1", "b:2"], "ps": ["c:3"]}
    spec = ClusterSpec(roles)  # type: ignore[arg-type]
    assert spec == ClusterSpec.from_mapping(roles) and spec.as_dict() == roles
    assert ClusterSpec(spec) == spec  # type: ignore[arg-type]
    with pytest.raises(ClusterSpecError, match="did you mean 'worker'"):
        ClusterSpec({"workers": ["a:1"]})  # type: ignore[arg-type]


def test_without_a_chief_it_owns_the_address_of_worker_0() -> None:
    cluster = ClusterSpec(worker=("a:7", "b:7"), ps=("p:7",))
    assert cluster.chief_address == "a:7"
    assert cluster.bind_address(TaskId("chief", 0)) == "a:7"
    assert cluster.bind_address(TaskId("worker", 0)) == "a:0"
    assert cluster.bind_address(TaskId("worker", 1)) == "b:7"
    assert cluster.bind_address(TaskId("ps", 0)) == "p:7"
    assert cluster.bind_address(TaskId("evaluator", 0)) == "127.0.0.1:0"


def test_free_ports_may_repeat() -> None:
    cluster = ClusterSpec(chief=("h:1",), worker=("h:0", "h:0"), ps=("h:0",))
    assert cluster.bind_address(TaskId("worker", 0)) == "h:0"


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"wroker": ["a:1"]}, ["unknown role 'wroker'", "did you mean 'worker'"]),
        ({"master": ["a:1"]}, ["unknown role 'master'", "a master, which trains, is worker 0 here"]),
        ({"chief": ["a:1", "b:1"], "worker": ["c:1"]}, ["at most one chief", "got 2", "a:1, b:1"]),
        ({"evaluator": ["a:1", "b:1"], "worker": ["c:1"]}, ["at most one evaluator"]),
        ({"chief": ["a:1"]}, ["at least one worker", "a cluster of chief", "not a replica", "unset TF_CONFIG"]),
        ({"ps": ["a:1"]}, ["at least one worker"]),
        ({}, ["at least one worker", "cluster of nothing"]),
        ({"worker": ["a:1", "a:1"]}, ["worker:0 and worker:1 have the same address 'a:1'"]),
        ({"worker": ["a:1"], "ps": ["a:1"]}, ["worker:0 and ps:0 have the same address"]),
        ({"worker": ["a"]}, ["'host:2222'", "got 'a'"]),
        ({"worker": ["a:"]}, ["got 'a:'"]),
        ({"worker": [":1"]}, ["got ':1'"]),
        ({"worker": ["a:70000"]}, ["got 'a:70000'"]),
        ({"worker": ["a\0:1"]}, ["'host:2222'"]),
        ({"worker": ["a..b:1"]}, ["'host:2222'"]),
        ({"worker": ["a" * 70 + ":1"]}, ["'host:2222'"]),
        ({"worker": ["a.b" * 1000 + ":1"]}, ["'host:2222'"]),
        ({"worker": ["::1:80"]}, ["IPv6", "'::1:80'"]),
        ({"worker": "a:1"}, ["list of addresses for 'worker'"]),
        ({"worker": [1]}, ["'host:port' strings", "got 1"]),
        ({"worker": ["a:0"]}, ["worker:0 (where the chief will serve)", "other than 0"]),
        ({"worker": ["a:0"], "chief": ["b:0"]}, ["address of chief:0", "other than 0"]),
        (["a:1"], ["expected a cluster like", "['a:1']"]),
    ],
)
def test_refusals_name_the_reason(cluster: object, words: list[str]) -> None:
    with pytest.raises(ClusterSpecError) as refusal:
        ClusterSpec.from_mapping(cluster)
    for word in words:
        assert word in str(refusal.value)


def test_index_out_of_range() -> None:
    cluster = ClusterSpec.from_mapping(FULL)
    with pytest.raises(ClusterSpecError, match=r"worker:2 is not in the cluster, which has 2 .* \(indices 0 to 1\)"):
        cluster.check_task(TaskId("worker", 2))
    with pytest.raises(ClusterSpecError, match=r"ps:0 is not in the cluster, which has 0 of type 'ps'$"):
        ClusterSpec(worker=("a:1",)).check_task(TaskId("ps", 0))
    ClusterSpec(worker=("a:1",)).check_task(TaskId("evaluator", 0))


@pytest.mark.parametrize(
    ("address", "parts"), [("a:1", ("a", 1)), ("[::1]:80", ("::1", 80)), ("10.0.0.1:65535", ("10.0.0.1", 65535))]
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("text", ["worker", "worker:x", "worker:-1", "worker:01", "boss:0", "ps:" + "9" * 5000, ":0"])
def test_task_ids_refused(text: str) -> None:
    with pytest.raises(ClusterSpecError, match="expected a task like 'worker:0'"):
        TaskId.parse(text)


@pytest.mark.parametrize(
    ("name", "num_workers", "num_ps", "chosen"),
    [("auto", 1, 0, "one"), ("auto", 2, 1, "ps"), ("one", 1, 0, "one"), ("ps", 1, 1, "ps")],
)
def test_strategy_chosen(name: str, num_workers: int, num_ps: int, chosen: str) -> None:
    assert choose_strategy(name, num_workers, num_ps) == chosen


@pytest.mark.parametrize(
    ("name", "num_workers", "num_ps", "words"),
    [
        ("pss", 1, 1, "did you mean 'ps'"),
        ("ps", 2, 0, "at least one ps and one worker, got 0 ps and 2 workers"),
        ("one", 1, 1, "the cluster has 1 ps"),
        ("one", 2, 0, "the cluster has 2 workers"),
        ("ring", 2, 1, "without parameter servers, but the cluster has 1 ps"),
    ],
)
def test_strategy_refused(name: str, num_workers: int, num_ps: int, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        choose_strategy(name, num_workers, num_ps)
