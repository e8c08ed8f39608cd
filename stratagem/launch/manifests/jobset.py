"""A job as one JobSet (jobset.x-k8s.io/v1alpha2): an Indexed Job for each role, restarted together; or as a TrainJob of
Kubeflow Trainer (trainer.kubeflow.org/v1alpha1), and the runtime that it refers to. Pure, no I/O.

Fields by the APIs of the projects: api/jobset/v1alpha2/jobset_types.go in github.com/kubernetes-sigs/jobset,
pkg/apis/trainer/v1alpha1 in github.com/kubeflow/trainer.
"""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.task import TASK_TYPES
from stratagem.launch.manifests.kubernetes import RESTARTS, cluster_of, object_of, shared_objects
from stratagem.launch.manifests.pod import Object, command_of, labels_of, pod_failure_policy, pod_template
from stratagem.launch.manifests.workload import Workload

JOB_RESTARTS = 3
"""Restarts of all tasks together, after one of them has used up its own."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_TRAINER = "trainer.kubeflow.org/v1alpha1"
_NODE = "node"
"""What the Trainer calls the workers' job and container."""
_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_ROLES = {role: role for role in TASK_TYPES}
_NAMES = {**_ROLES, "worker": _NODE}
"""Of the jobs, by role: in a JobSet, and where the Trainer makes it."""


def render(workload: Workload) -> list[Object]:
    """The JobSet, and what its pods need; the JobSet makes its own Service."""
    jobset = object_of(workload, "jobset.x-k8s.io/v1alpha2", "JobSet", spec=jobset_spec(workload))
    return [*shared_objects(workload, jobset_cluster(workload)), jobset]


def jobset_cluster(workload: Workload, names: Mapping[str, str] = _ROLES) -> ClusterSpec | None:
    """Where the tasks serve, in jobs of these ``names``; None: the job is one process."""
    name = workload.name
    return cluster_of(workload, lambda task: f"{name}-{names[task.type]}-0-{task.index}.{name}")


def jobset_spec(workload: Workload, names: Mapping[str, str] = _ROLES) -> Object:
    """The ``spec``; arguments as of :func:`jobset_cluster`. The JobSet is done when every Job is: the chief ends the
    ps, and everybody leaves with the job's exit code."""
    cluster = jobset_cluster(workload, names)
    counts = (
        {"worker": 1} if cluster is None else {role: len(addresses) for role, addresses in cluster.as_dict().items()}
    )
    return {
        "network": {"enableDNSHostnames": True, "subdomain": workload.name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": JOB_RESTARTS,
            "rules": [
                {"name": "noRetry", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
            ],
        },
        "replicatedJobs": [_replicated_job(workload, role, names[role], count) for role, count in counts.items()],
    }


def _replicated_job(workload: Workload, role: str, name: str, count: int) -> Object:
    variables: list[Object] = [
        {"name": "TASK_INDEX", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": "STRATAGEM_TASK", "value": f"{role}:$(TASK_INDEX)"},
    ]
    template = pod_template(workload, role, variables)
    template["spec"]["restartPolicy"] = "Never"  # what podFailurePolicy asks for
    return {
        "name": name,
        "replicas": 1,
        "template": {
            "metadata": {"labels": labels_of(workload, role)},
            "spec": {
                "completionMode": "Indexed",
                "completions": count,
                "parallelism": count,
                "backoffLimit": RESTARTS,
                "podFailurePolicy": pod_failure_policy(),
                "template": template,
            },
        },
    }


def render_trainjob(workload: Workload) -> list[Object]:
    """The TrainJob, its runtime, and what its pods need. The Trainer makes a JobSet of the two: the job of the step
    "trainer" has the workers, in a container "node", and the TrainJob says how many there are."""
    jobset = jobset_spec(workload, _NAMES)
    for job in jobset["replicatedJobs"]:
        if job["name"] == _NODE:
            job["template"]["metadata"]["labels"][_STEP] = "trainer"
            job["template"]["spec"]["template"]["spec"]["containers"][0]["name"] = _NODE
    spec = {"mlPolicy": {"numNodes": workload.num_workers}, "template": {"spec": jobset}}
    runtime = object_of(workload, _TRAINER, "TrainingRuntime", spec=spec)
    runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] = "torch"
    trainer = {"numNodes": workload.num_workers, "image": workload.image, "command": command_of(workload, "worker")}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": workload.name}
    trainjob = object_of(workload, _TRAINER, "TrainJob", spec={"runtimeRef": reference, "trainer": trainer})
    return [*shared_objects(workload, jobset_cluster(workload, _NAMES)), runtime, trainjob]
