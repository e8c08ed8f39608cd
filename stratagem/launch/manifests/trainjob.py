"""A job as a TrainJob of Kubeflow Trainer, and the runtime that it refers to (trainer.kubeflow.org/v1alpha1). Pure.

Fields by the API of the Trainer project, pkg/apis/trainer/v1alpha1 in github.com/kubeflow/trainer. The Trainer makes a
JobSet of the two: the job that carries the label of the step "trainer" has the workers, in a container "node", and
the TrainJob says how many there are.
"""

from __future__ import annotations

from stratagem.launch.manifests.jobset import jobset_cluster, jobset_spec
from stratagem.launch.manifests.kubernetes import object_of, shared_objects
from stratagem.launch.manifests.pod import Object, command_of
from stratagem.launch.manifests.workload import Workload

_API = "trainer.kubeflow.org/v1alpha1"
_NODE = "node"
"""What the Trainer calls the workers' job and container."""
_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_NAMES = {"worker": _NODE}


def render(workload: Workload) -> list[Object]:
    jobset = jobset_spec(workload, _NAMES)
    for job in jobset["replicatedJobs"]:
        if job["name"] == _NODE:
            job["template"]["metadata"]["labels"][_STEP] = "trainer"
            job["template"]["spec"]["template"]["spec"]["containers"][0]["name"] = _NODE
    spec = {"mlPolicy": {"numNodes": workload.num_workers}, "template": {"spec": jobset}}
    runtime = object_of(workload, _API, "TrainingRuntime", spec=spec)
    runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] = "torch"
    trainer = {"numNodes": workload.num_workers, "image": workload.image, "command": command_of(workload, "worker")}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": workload.name}
    trainjob = object_of(workload, _API, "TrainJob", spec={"runtimeRef": reference, "trainer": trainer})
    return [*shared_objects(workload, jobset_cluster(workload, _NAMES)), runtime, trainjob]
