"""A job as plain Kubernetes objects, version 1.20 and newer: one Job for each task. Pure, no I/O.

Why Jobs, and how a pod knows its place: docs/design/kubernetes.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from stratagem.cluster.choice import ONE_PROCESS
from stratagem.cluster.identity import file_stem
from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.task import TaskId
from stratagem.errors import ConfigurationError
from stratagem.launch.manifests.pod import (
    Object,
    labels_of,
    pod_failure_policy,
    pod_template,
    selector_of,
    settings_of,
    shows_page,
)
from stratagem.launch.manifests.workload import Workload

_MAX_VARIABLE = (128 << 10) - len("TF_CONFIG=\0")
"""Of Linux, MAX_ARG_STRLEN."""
RESTARTS = 20
"""Restarts of one task before its Job has failed: spot nodes go often."""


def render(workload: Workload, exit_codes: bool = False) -> list[Object]:
    """The objects of a job, in the order in which they are to be applied; none has a namespace. ``exit_codes``: the
    cluster (1.26 and newer) knows what they mean."""
    cluster = cluster_of(workload, lambda task: f"{file_stem(str(task))}.{workload.name}")
    service = [_service(workload)] if cluster is not None else []
    return [
        *shared_objects(workload, cluster),
        *service,
        *(_job(workload, task, exit_codes) for task in tasks_of(cluster)),
    ]


def shared_objects(workload: Workload, cluster: ClusterSpec | None) -> list[Object]:
    """What the pods of a job need, whoever makes them: an account without rights, the environment of every task, the
    volume, and a wall around the job. ``cluster``: where its tasks serve; None: it is one process."""
    wall = [_network_policy(workload)] if cluster is not None else []
    account = object_of(workload, "v1", "ServiceAccount", automountServiceAccountToken=False)  # no pod gets a token
    return [account, _config_map(workload, cluster), _volume(workload), *wall]


def cluster_of(workload: Workload, host_of: Callable[[TaskId], str]) -> ClusterSpec | None:
    """The cluster, by the names that ``host_of`` gives its tasks; None: the job is one process. A name without a
    namespace ("worker-1.digits") is known to the DNS of Kubernetes in every namespace."""
    if workload.chosen_strategy in ONE_PROCESS:
        return None
    counts = {"chief": 1, "worker": workload.num_workers, "ps": workload.num_ps, "evaluator": int(workload.evaluator)}
    return ClusterSpec.from_mapping(
        {
            role: [f"{host_of(TaskId(role, index))}:{workload.port}" for index in range(count)]
            for role, count in counts.items()
        }
    )


def tasks_of(cluster: ClusterSpec | None) -> tuple[TaskId, ...]:
    """The tasks of a job; one process is worker 0."""
    return (TaskId("worker", 0),) if cluster is None else cluster.tasks


def cluster_variable(cluster: ClusterSpec) -> str:
    """TF_CONFIG without a task, as the Helm chart writes it: sorted, without spaces. ConfigurationError: no process
    could be started with it."""
    text = json.dumps({"cluster": cluster.as_dict()}, sort_keys=True, separators=(",", ":"))
    if len(text) > _MAX_VARIABLE:
        raise ConfigurationError(
            f"the addresses of all tasks are {len(text):,} characters, and an environment variable (TF_CONFIG) holds "
            f"{_MAX_VARIABLE:,}: use fewer tasks, or a shorter name"
        )
    return text


def object_of(workload: Workload, api: str, kind: str, name: str = "", role: str = "", **fields: Any) -> Object:
    """An object of the job, called as the job where no ``name`` says otherwise."""
    metadata = {"name": name or workload.name, "labels": labels_of(workload, role)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}


def _config_map(workload: Workload, cluster: ClusterSpec | None) -> Object:
    """The environment of every task. Not in the pods' templates: a Job's cannot be changed, and a worker that is added
    changes the cluster."""
    data = settings_of(workload)
    if cluster is not None:
        data["TF_CONFIG"] = cluster_variable(cluster)
    return object_of(workload, "v1", "ConfigMap", data=dict(sorted(data.items())))


def _volume(workload: Workload) -> Object:
    """Shared, because the chief commits a checkpoint of which every ps writes its part."""
    spec = {
        "accessModes": [workload.access_mode],
        **({"storageClassName": workload.storage_class} if workload.storage_class else {}),
        "resources": {"requests": {"storage": f"{workload.volume_gib}Gi"}},
    }
    return object_of(workload, "v1", "PersistentVolumeClaim", spec=spec)


def _service(workload: Workload) -> Object:
    """Gives each pod a name; also before it is ready, because it is ready only when it has met the others."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector_of(workload),
        "ports": [{"name": "grpc", "port": workload.port, "targetPort": "grpc"}],
    }
    return object_of(workload, "v1", "Service", spec=spec)


def _network_policy(workload: Workload) -> Object:
    """Only the job's own pods may come in, at any port, as lanes take free ones; others where a page is encrypted."""
    page = [{"ports": [{"port": "web"}]}] if shows_page(workload) else []
    spec = {**_pods(workload), "policyTypes": ["Ingress"], "ingress": [{"from": [_pods(workload)]}, *page]}
    return object_of(workload, "networking.k8s.io/v1", "NetworkPolicy", spec=spec)


def _pods(workload: Workload) -> Object:
    return {"podSelector": {"matchLabels": selector_of(workload)}}


def _job(workload: Workload, task: TaskId, exit_codes: bool) -> Object:
    stem = file_stem(str(task))
    variables = [{"name": "STRATAGEM_TASK", "value": str(task)}]
    template = pod_template(workload, task.type, variables, hostname=stem)
    spec: Object = {"backoffLimit": RESTARTS, "template": template}
    if exit_codes:
        spec["podFailurePolicy"] = pod_failure_policy()
        template["spec"]["restartPolicy"] = "Never"  # what podFailurePolicy asks for
    return object_of(workload, "batch/v1", "Job", f"{workload.name}-{stem}", task.type, spec=spec)
