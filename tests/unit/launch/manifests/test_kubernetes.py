"""What each task of a job gets: one Job, one name, one place; nothing where there is no cluster."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from stratagem.cluster.sources import gather
from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.task import TaskId
from stratagem.errors import ConfigurationError
from stratagem.launch.machines import MachineConfig
from stratagem.launch.manifests import compose, kubernetes
from stratagem.launch.manifests.workload import Workload

JOB = Workload("job", "image:1", "train.py", ("--lr", "1"), num_workers=2, num_ps=1, evaluator=True, web=8080)


def pods_of(workload: Workload) -> dict[str, dict[str, Any]]:
    jobs = [each for each in kubernetes.render(workload) if each["kind"] == "Job"]
    return {job["metadata"]["name"]: job["spec"]["template"]["spec"] for job in jobs}


def environment_of(workload: Workload, job: str) -> dict[str, str]:
    (config,) = (each["data"] for each in kubernetes.render(workload) if each["kind"] == "ConfigMap")
    variables = pods_of(workload)[job]["containers"][0]["env"]
    return {**config, **{each["name"]: each["value"] for each in variables if "value" in each}}


def test_every_task_is_a_job_with_a_name_of_its_own() -> None:
    pods = pods_of(JOB)
    assert list(pods) == ["job-chief-0", "job-worker-0", "job-worker-1", "job-ps-0", "job-evaluator-0"]
    assert {(pod["hostname"], pod["subdomain"]) for pod in pods.values()} == {
        (name.removeprefix("job-"), "job") for name in pods
    }
    assert pods["job-worker-1"]["containers"][0]["command"] == ["stratagem", "worker", "train.py", "--lr", "1"]
    assert pods["job-ps-0"]["containers"][0]["command"] == ["stratagem", "ps"]


def test_kubernetes_puts_no_variables_into_the_arguments_of_a_script() -> None:
    pods = pods_of(dataclasses.replace(JOB, args=("$(HOME)", "a$$b")))
    assert pods["job-worker-1"]["containers"][0]["command"][-2:] == ["$$(HOME)", "a$$$$b"]


@pytest.mark.parametrize("role", ["chief", "worker", "ps", "evaluator"])
def test_a_pod_s_environment_is_the_configuration_of_its_task(role: str) -> None:
    resolved, placement = gather(role, environment_of(JOB, f"job-{role}-0"))
    assert placement is not None
    assert placement.task == TaskId(role, 0)
    assert placement.cluster == ClusterSpec(
        chief=("chief-0.job:2222",),
        worker=("worker-0.job:2222", "worker-1.job:2222"),
        ps=("ps-0.job:2222",),
        evaluator=("evaluator-0.job:2222",),
    )
    values = resolved.config.model_dump()
    assert values.get("web") == ("127.0.0.1:8080" if role == "chief" else None)  # docs/guides/page.md
    assert (values["bind"], values["insecure"]) == ("0.0.0.0:2222", True)
    assert values.get("advertise", "") == ("" if role == "evaluator" else f"{role}-0.job:2222")
    assert values["chief"] == ("" if role == "chief" else "chief-0.job:2222")
    if role == "worker":
        assert (values["strategy"], values["staleness"]) == ("ps", math.inf)


@pytest.mark.parametrize("name", ["STRATAGEM_MAX_WORKERS", "STRATAGEM_MAX_PS"])
def test_workers_and_ps_may_join_where_the_strategy_allows_it(name: str) -> None:
    assert int(environment_of(JOB, "job-chief-0")[name]) > 2
    for other in ({"staleness": 0.0}, {"num_ps": 0}):
        assert name not in environment_of(dataclasses.replace(JOB, **other), "job-chief-0")


def test_a_ring_s_chief_keeps_no_journal() -> None:
    ring = dataclasses.replace(JOB, num_ps=0)
    assert "STRATAGEM_STATE_DIR" in environment_of(JOB, "job-chief-0")
    assert "STRATAGEM_STATE_DIR" not in environment_of(ring, "job-chief-0")
    assert environment_of(ring, "job-worker-0")["STRATAGEM_STRATEGY"] == "ring"


def test_one_process_has_no_cluster() -> None:
    alone = Workload("job", "image", "train.py", worker=MachineConfig(8, 30, "nvidia-tesla-t4", 4))
    kinds = [each["kind"] for each in kubernetes.render(alone)]
    assert kinds == ["ServiceAccount", "ConfigMap", "PersistentVolumeClaim", "Job"]
    environment = environment_of(alone, "job-worker-0")
    resolved, placement = gather("worker", environment)
    assert placement is None
    assert (resolved.config.task, environment["STRATAGEM_STRATEGY"]) == ("worker:0", "auto")
    pod = pods_of(alone)["job-worker-0"]
    assert pod["nodeSelector"] == {"accelerator": "nvidia-tesla-t4"}
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "30720Mi", "nvidia.com/gpu": "4"}
    assert "livenessProbe" not in pod["containers"][0]  # it serves nobody


def test_a_small_job_fits_on_a_node_of_two_cores() -> None:
    small = dataclasses.replace(JOB, num_ps=2, evaluator=False)
    requests = [pod["containers"][0]["resources"]["requests"] for pod in pods_of(small).values()]
    assert len(requests) == 5
    assert sum(int(each["cpu"].removesuffix("m")) for each in requests) <= 1500  # what the cluster's own pods leave
    assert sum(int(each["memory"].removesuffix("Mi")) for each in requests) <= 6 * 1024


def test_the_user_s_environment_and_labels() -> None:
    job = dataclasses.replace(
        JOB,
        environment={"STRATAGEM_LOG_FORMAT": "text", "OMP_NUM_THREADS": "3"},
        labels={"team": "a", "app.kubernetes.io/name": "mine"},
    )
    told = environment_of(job, "job-ps-0")
    assert [told[name] for name in (*job.environment, "STRATAGEM_NUM_THREADS")] == ["text", "3", "1"]
    for each in kubernetes.render(job):
        assert each["metadata"]["labels"]["team"] == "a"
        assert each["metadata"]["labels"]["app.kubernetes.io/name"] == "stratagem"
    (service,) = (each for each in kubernetes.render(job) if each["kind"] == "Service")
    assert service["spec"]["selector"] == {"app.kubernetes.io/name": "stratagem", "app.kubernetes.io/instance": "job"}


def test_the_page_is_open_to_others_where_it_is_encrypted_alone() -> None:
    for secret, host in (("", "127.0.0.1"), ("certs", "0.0.0.0")):
        job = dataclasses.replace(JOB, tls_secret=secret)
        config = gather("chief", environment_of(job, "job-chief-0"))[0].config.model_dump()
        assert (config["web"], config["insecure"]) == (f"{host}:8080", not secret)
    composed = compose.render(JOB)["services"]
    assert composed["chief-0"]["ports"] == ["127.0.0.1:8080:8080"]  # of the machine; inside, the network is the job's
    assert composed["chief-0"]["environment"]["STRATAGEM_WEB"] == "0.0.0.0:8080"
    assert not any("ports" in service for name, service in composed.items() if name != "chief-0")
    assert "ports" not in compose.render(dataclasses.replace(JOB, web=0))["services"]["chief-0"]


def test_secrets() -> None:
    job = dataclasses.replace(JOB, tls_secret="certs", token_secret="token")
    environment = environment_of(job, "job-worker-1")
    assert "STRATAGEM_INSECURE" not in environment
    assert environment["STRATAGEM_TLS"] == "/etc/stratagem/tls"
    assert environment["STRATAGEM_TOKEN_FILE"] == "/etc/stratagem/token/token"
    volumes = {each["name"]: each.get("secret") for each in pods_of(job)["job-worker-1"]["volumes"]}
    assert volumes["tls"] is not None and volumes["token"] is not None
    assert [item["key"] for item in volumes["tls"]["items"]] == ["ca.crt", "worker-1.crt", "worker-1.key"]
    assert volumes["token"]["secretName"] == "token"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "Job"}, "got 'Job'"),
        ({"name": "job-"}, "got 'job-'"),
        ({"name": "x" * 41}, "at most 40"),
        ({"name": "job\n"}, "host names"),
        ({"num_workers": 0}, "at least one worker.*got 0 workers"),
        ({"num_ps": -1}, "no negative count.*-1 ps"),
        ({"web": 2222}, "other than 2222, got 2222"),
        ({"web": -1}, "got -1"),
        ({"num_ps": 0, "num_workers": 1}, "the chief serves the page"),
        ({"num_ps": 0, "num_workers": 1, "web": 0}, "an evaluator needs a cluster"),
        ({"strategy": "ring"}, "without parameter servers"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        dataclasses.replace(JOB, **changes)
