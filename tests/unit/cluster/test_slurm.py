"""Slurm's variables: node lists, counts, places, and when a process is part of a step at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.cluster.resolvers import SlurmClusterResolver, TFConfigClusterResolver
from stratagem.cluster.slurm import expand_nodes, node_of_each_task, tasks_per_node
from stratagem.cluster.sources import gather
from stratagem.cluster.spec import ClusterSpec, split_address
from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import placement_from_environment
from stratagem.errors import ClusterSpecError, ConfigurationError

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("one", ["one"]),
        ("a,b", ["a", "b"]),
        ("n[01-03,07],gpu-a[9-10]b", ["n01", "n02", "n03", "n07", "gpu-a9b", "gpu-a10b"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("n[099-101].example", ["n099.example", "n100.example", "n101.example"]),
    ],
)
def test_node_lists(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


_names = st.from_regex(r"[a-z][a-z-]{0,6}", fullmatch=True)
_range = st.tuples(st.integers(0, 300), st.integers(0, 12), st.integers(1, 5))


@given(st.lists(st.tuples(_names, st.lists(_range, max_size=3)), min_size=1, max_size=4))
def test_what_was_compressed_comes_back(groups: list[tuple[str, list[tuple[int, int, int]]]]) -> None:
    texts, names = [], []
    for name, ranges in groups:
        parts = [
            (str(first).zfill(width), str(first + more).zfill(width), first, more) for first, more, width in ranges
        ]
        inside = ",".join(low if not more else f"{low}-{high}" for low, high, _, more in parts)
        texts.append(f"{name}[{inside}]" if parts else name)
        numbers = [str(first + step).zfill(len(low)) for low, _, first, more in parts for step in range(more + 1)]
        names += [name + number for number in numbers] if parts else [name]
    assert expand_nodes(",".join(texts)) == names


@given(st.text(alphabet="n[]0123,- a", max_size=20))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    try:
        names = expand_nodes(text)
    except ClusterSpecError as error:
        assert "expected a list of nodes like" in str(error)
    else:
        assert names and all(name and not set(name) & set("[],") for name in names)


@pytest.mark.parametrize(
    "text", ["", "n[1", "n1]", "n[]", "n[3-1]", "n[a-b]", "a,,b", "n[[1]]", "n[1-999999]", "n[1-300]m[1-300]"]
)
def test_malformed_lists_are_refused(text: str) -> None:
    with pytest.raises(ClusterSpecError, match="expected a list of nodes like"):
        expand_nodes(text)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=5))
def test_tasks_per_node(groups: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in groups)
    assert tasks_per_node(text) == [count for count, times in groups for _ in range(times)]


@pytest.mark.parametrize("text", ["", "x", "2(x0)", "2(x", "-1", "2(x99999999)"])
def test_wrong_counts_are_refused(text: str) -> None:
    with pytest.raises(ClusterSpecError, match="SLURM_TASKS_PER_NODE"):
        tasks_per_node(text)


def test_places_by_distribution() -> None:
    assert node_of_each_task(["a", "b"], [3, 1]) == ["a", "a", "a", "b"]
    assert node_of_each_task(["a", "b"], [3, 1], "cyclic:block") == ["a", "b", "a", "a"]
    with pytest.raises(ClusterSpecError, match="got 'plane=2'"):
        node_of_each_task(["a"], [1], "plane=2")
    with pytest.raises(ClusterSpecError, match="2 nodes and the tasks of 1"):
        node_of_each_task(["a", "b"], [2])


def test_a_step_is_a_cluster_of_workers() -> None:
    placement = placement_from_environment(STEP)
    assert placement is not None
    chief, *others = placement.cluster.worker
    assert placement.task == TaskId("worker", 2)
    assert (split_address(chief)[0], others) == ("n01", ["n01:0", "n02:0", "n02:0"])
    assert 12000 <= split_address(chief)[1] < 32000
    every = [placement_from_environment(STEP | {"SLURM_PROCID": str(rank)}) for rank in range(4)]
    assert [found.cluster == placement.cluster for found in every if found] == [True] * 4
    assert [str(found.task) for found in every if found] == ["worker:0", "worker:1", "worker:2", "worker:3"]


def test_steps_of_one_job_have_ports_of_their_own() -> None:
    ports = {
        split_address(SlurmClusterResolver(environ=STEP | {"SLURM_STEP_ID": str(step)}).cluster_spec().worker[0])[1]  # type: ignore[union-attr]
        for step in range(20)
    }
    assert len(ports) == 20


def test_the_last_tasks_may_be_parameter_servers() -> None:
    resolver = TFConfigClusterResolver(environ=STEP | {"STRATAGEM_NUM_PS": "1", "SLURM_PROCID": "3"})
    cluster = resolver.cluster_spec()
    assert cluster is not None
    assert (cluster.num_workers, cluster.ps, resolver.task) == (3, ("n02:0",), TaskId("ps", 0))


def test_an_empty_number_of_ps_is_none() -> None:
    cluster = TFConfigClusterResolver(environ=STEP | {"STRATAGEM_NUM_PS": ""}).cluster_spec()
    assert cluster is not None and cluster.num_ps == 0


def test_jobs_and_port_of_the_resolver() -> None:
    resolver = SlurmClusterResolver({"chief": 1, "ps": 1, "worker": 2}, port_base=8888, environ=STEP)
    cluster = ClusterSpec(chief=("n01:8888",), ps=("n01:0",), worker=("n02:0", "n02:0"))
    assert (resolver.cluster_spec(), resolver.task_type, resolver.task_id) == (cluster, "worker", 0)


def test_the_variables_of_the_job_do_for_the_resolver() -> None:
    environ = {
        "SLURM_JOB_ID": "5",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_PROCID": "1",
    }
    assert SlurmClusterResolver(environ=environ).task == TaskId("worker", 1)
    # A batch script that runs `python train.py` without srun trains alone, however many tasks it may start.
    assert placement_from_environment(environ) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": ""},
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    ],
)
def test_a_step_does_not_take_over(changes: dict[str, str]) -> None:
    placement = placement_from_environment(STEP | changes)
    assert placement is None or placement.cluster.worker == ("a:1",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID below the 4 tasks"),
        ({"SLURM_PROCID": "x"}, "whole number in SLURM_PROCID, got 'x'"),
        ({"SLURM_PROCID": ""}, "expected SLURM_PROCID in the environment, got none"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST or SLURM_JOB_NODELIST.*srun"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1"}, "places of 4 tasks from Slurm, got 3"),
        ({"STRATAGEM_NUM_PS": "4"}, "STRATAGEM_NUM_PS below the 4 tasks"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ClusterSpecError, match=words):
        placement_from_environment(STEP | changes)


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        ({"worker": 3}, "jobs for the 4 tasks of the step, got 3"),
        ({"master": 4}, "unknown role 'master'"),
        ({"worker": 4, "ps": -1}, "ps of at least 0.*got -1"),
    ],
)
def test_jobs_that_do_not_fit_are_refused(jobs: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        SlurmClusterResolver(jobs, environ=STEP)


def test_where_a_value_comes_from() -> None:
    resolved, _ = gather("worker", STEP)
    assert resolved.config.chief.startswith("n01:")
    assert resolved.origins["chief"] == "environment SLURM_STEP_NODELIST"
