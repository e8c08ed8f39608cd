"""JobSet and TrainJob: the same tasks, with the names that those controllers give their pods."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from stratagem.cluster.sources import gather
from stratagem.cluster.task import TaskId
from stratagem.launch.manifests import jobset
from stratagem.launch.manifests.pod import Object, pod_failure_policy
from stratagem.launch.manifests.workload import Workload

JOB = Workload("job", "image:1", "train.py", ("--lr", "1"), num_workers=2, num_ps=2, evaluator=True)


def only(objects: list[Object], kind: str) -> Any:
    (found,) = (each for each in objects if each["kind"] == kind)
    return found


def environment_in(spec: Object, config: Object, replicated: str, index: int) -> dict[str, str]:
    """The environment of a pod: its ConfigMap, its template, and the index that the controller writes on it."""
    (job,) = (each for each in spec["replicatedJobs"] if each["name"] == replicated)
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    environment = dict(config["data"])
    for each in container["env"]:
        if "valueFrom" in each:
            fields = {
                "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
                "metadata.labels['controller-uid']": "the uid of the job",
            }
            environment[each["name"]] = fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            environment[each["name"]] = each["value"].replace("$(TASK_INDEX)", environment.get("TASK_INDEX", ""))
    return environment


@pytest.mark.parametrize(("role", "index"), [("chief", 0), ("worker", 1), ("ps", 1), ("evaluator", 0)])
@pytest.mark.parametrize("renderer", ["jobset", "trainjob"])
def test_a_pod_knows_its_place(renderer: str, role: str, index: int) -> None:
    objects = {"jobset": jobset.render, "trainjob": jobset.render_trainjob}[renderer](JOB)
    name = "node" if renderer == "trainjob" and role == "worker" else role
    whole = only(objects, "JobSet" if renderer == "jobset" else "TrainingRuntime")["spec"]
    spec = whole if renderer == "jobset" else whole["template"]["spec"]
    environment = environment_in(spec, only(objects, "ConfigMap"), name, index)
    _, placement = gather(role, environment)
    assert placement is not None
    assert placement.task == TaskId(role, index)
    # <JobSet>-<replicated job>-<index of the Job>-<index of the pod>.<subdomain>
    assert placement.cluster.address(placement.task) == f"job-{name}-0-{index}.job:2222"
    assert spec["network"]["subdomain"] == "job"


def test_one_replicated_job_a_role() -> None:
    spec = only(jobset.render(JOB), "JobSet")["spec"]
    counts = {each["name"]: each["template"]["spec"]["completions"] for each in spec["replicatedJobs"]}
    assert counts == {"chief": 1, "worker": 2, "ps": 2, "evaluator": 1}
    for rule in spec["failurePolicy"]["rules"]:
        assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])  # what JobSet's webhook asks for
    for each in spec["replicatedJobs"]:
        job = each["template"]["spec"]
        assert (job["completionMode"], job["parallelism"]) == ("Indexed", job["completions"])
        assert job["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy is refused with another one
        assert "hostname" not in job["template"]["spec"]


def test_what_exit_codes_mean() -> None:
    evicted, preempted, hopeless = pod_failure_policy()["rules"]
    assert (evicted["action"], preempted["action"], hopeless["action"]) == ("Ignore", "Ignore", "FailJob")
    assert (preempted["onExitCodes"]["values"], hopeless["onExitCodes"]["values"]) == ([143], [2, 42])


def test_one_process() -> None:
    alone = Workload("job", "image", "train.py")
    objects = jobset.render(alone)
    (worker,) = only(objects, "JobSet")["spec"]["replicatedJobs"]
    assert worker["template"]["spec"]["completions"] == 1
    assert "TF_CONFIG" not in only(objects, "ConfigMap")["data"]


def test_trainjob_refers_to_its_runtime() -> None:
    objects = jobset.render_trainjob(dataclasses.replace(JOB, evaluator=False))
    runtime, train = only(objects, "TrainingRuntime"), only(objects, "TrainJob")["spec"]
    assert train["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    assert train["trainer"] == {
        "numNodes": 2,
        "image": "image:1",
        "command": ["stratagem", "worker", "train.py", "--lr", "1"],
    }
    # What the Trainer's webhook asks for: one replica, and the container "node" in the job of the step "trainer".
    steps = {
        each["name"]: each["template"]["metadata"]["labels"].get("trainer.kubeflow.org/trainjob-ancestor-step")
        for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]
    }
    assert steps == {"chief": None, "node": "trainer", "ps": None}
    node = runtime["spec"]["template"]["spec"]["replicatedJobs"][1]
    assert node["replicas"] == 1
    assert [each["name"] for each in node["template"]["spec"]["template"]["spec"]["containers"]] == ["node"]
    assert (
        json.loads(only(objects, "ConfigMap")["data"]["TF_CONFIG"])["cluster"]["worker"][0] == "job-node-0-0.job:2222"
    )
