"""The compose file of a job: the same job as Kubernetes gets, on one machine."""

from __future__ import annotations

import json

import yaml

from stratagem.cluster.tf_config import parse_tf_config
from stratagem.launch.machines import COMMON_MACHINE_CONFIGS, MachineConfig
from stratagem.launch.manifests.compose import render
from stratagem.launch.manifests.workload import Workload


def test_each_task_is_a_service_that_knows_its_place() -> None:
    workload = Workload(name="j", image="i", script="t.py", num_workers=2, num_ps=2, evaluator=True, labels={"a": "b"})
    services = render(workload)["services"]
    assert set(services) == {"chief-0", "ps-0", "ps-1", "worker-0", "worker-1", "evaluator-0"}
    environment = services["ps-1"]["environment"]
    placement = parse_tf_config(environment["TF_CONFIG"])
    assert placement is not None and placement.cluster.ps == ("ps-0:2222", "ps-1:2222")
    assert (environment["STRATAGEM_TASK"], environment["STRATAGEM_RUN_ID"]) == ("ps:1", "j")
    assert services["ps-1"]["command"] == ["stratagem", "ps"]
    assert services["worker-0"]["command"] == ["stratagem", "worker", "t.py"]
    assert services["evaluator-0"]["healthcheck"] == {"disable": True} and "healthcheck" not in services["ps-1"]
    assert services["worker-1"]["labels"]["a"] == "b"
    assert services["worker-1"]["restart"] == "on-failure:3"


def test_one_process_is_one_service_without_a_cluster() -> None:
    services = render(Workload(name="j", image="i", script="t.py", args=("--x", "1")))["services"]
    assert list(services) == ["worker-0"]
    assert services["worker-0"]["command"] == ["stratagem", "worker", "t.py", "--x", "1"]
    assert "TF_CONFIG" not in services["worker-0"]["environment"] and services["worker-0"]["restart"] == "no"


def test_a_ring_takes_nobody_back() -> None:
    services = render(Workload(name="j", image="i", script="t.py", num_workers=2))["services"]
    assert {service["restart"] for service in services.values()} == {"no"}


def test_dollars_stay_and_limits_fit_the_machine() -> None:
    worker = MachineConfig(cpu_cores=64, memory_gib=1.5)
    workload = Workload(name="j", image="i", script="t.py", args=("$HOME",), worker=worker, environment={"A": "$B"})
    service = yaml.safe_load(yaml.safe_dump(render(workload, num_cores=2)))["services"]["worker-0"]
    assert service["command"][-1] == "$$HOME" and service["environment"]["A"] == "$$B"
    assert service["deploy"]["resources"] == {"limits": {"cpus": "2", "memory": "1536m"}}


def test_a_part_of_a_core_is_no_limit_below_a_core() -> None:
    limits = {
        name: service["deploy"]["resources"]["limits"]
        for name, service in render(Workload(name="j", image="i", script="t.py", num_workers=2))["services"].items()
    }
    assert limits["chief-0"] == {"cpus": "1", "memory": "512m"}
    assert limits["worker-0"] == {"cpus": "1", "memory": "1024m"}


def test_accelerators_are_reserved() -> None:
    workload = Workload(name="j", image="i", script="t.py", worker=COMMON_MACHINE_CONFIGS["T4_4X"])
    resources = render(workload)["services"]["worker-0"]["deploy"]["resources"]
    assert json.dumps(resources["reservations"]) == (
        '{"devices": [{"driver": "nvidia", "count": 4, "capabilities": ["gpu"]}]}'
    )
