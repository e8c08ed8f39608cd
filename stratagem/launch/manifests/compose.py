"""A job as one docker-compose project: one service for each task. Pure, no I/O."""

from __future__ import annotations

from stratagem.cluster.identity import file_stem
from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.task import TaskId
from stratagem.launch.machines import MachineConfig
from stratagem.launch.manifests.kubernetes import cluster_of, cluster_variable, tasks_of
from stratagem.launch.manifests.pod import GRACE_S, JOB_FOLDER, Object, command_of, labels_of, machine_of, settings_of
from stratagem.launch.manifests.workload import Workload

VOLUME = "job"
RESTARTS = 3
"""Restarts of one task under parameter servers. A ring takes no worker back, and one process has nobody to rejoin."""
SETTINGS = {
    "STRATAGEM_LOG_FORMAT": "text",
    "STRATAGEM_PEER_TIMEOUT_S": "60",
    "STRATAGEM_START_TIMEOUT_S": "300",
    "STRATAGEM_WORKER_TIMEOUT_S": "60",
}
"""What differs from Kubernetes: people read the log, and a container that starts again is back in seconds."""


def render(workload: Workload, num_cores: float | None = None) -> Object:
    """The compose file of a job; ``num_cores``: of the machine, if known, which all tasks share: Docker refuses a limit
    above it."""
    cluster, settings = cluster_of(workload, _host), settings_of(workload)
    return {
        "name": workload.name,
        "services": {_host(task): _service(workload, task, cluster, settings, num_cores) for task in tasks_of(cluster)},
        "volumes": {VOLUME: {"labels": labels_of(workload)}},
    }


def _host(task: TaskId) -> str:
    """The name of a task's service, by which the others find it: "worker-1"."""
    return file_stem(str(task))


def _service(
    workload: Workload,
    task: TaskId,
    cluster: ClusterSpec | None,
    of_all: dict[str, str],
    num_cores: float | None,
) -> Object:
    settings = {**of_all, **SETTINGS, **workload.environment, "STRATAGEM_TASK": str(task)}
    if cluster is not None:
        settings |= {"TF_CONFIG": cluster_variable(cluster), "STRATAGEM_RUN_ID": workload.name}
    page = workload.web if task.type == "chief" else 0
    if page:  # published on the machine's loopback alone
        settings["STRATAGEM_WEB"] = f"0.0.0.0:{page}"
    serves = cluster is not None and task.type != "evaluator"
    machine = machine_of(workload, task.type)
    return {
        "image": workload.image,
        "pull_policy": "missing",
        "command": command_of(workload, task.type),
        # Compose puts variables in where it sees a dollar sign.
        "environment": {name: value.replace("$", "$$") for name, value in sorted(settings.items())},
        "labels": labels_of(workload, task.type),
        "volumes": [f"{VOLUME}:{JOB_FOLDER}"],
        "read_only": True,
        "tmpfs": ["/tmp"],
        "shm_size": "1gb",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "stop_grace_period": f"{GRACE_S}s",
        "restart": f"on-failure:{RESTARTS}" if workload.chosen_strategy == "ps" else "no",
        "deploy": {"resources": _resources(machine, num_cores)},
        **({"ports": [f"127.0.0.1:{page}:{page}"]} if page else {}),
        **({} if serves else {"healthcheck": {"disable": True}}),
    }


def _resources(machine: MachineConfig, num_cores: float | None) -> Object:
    cores = max(machine.cpu_cores, 1)  # Docker reserves no cores, it only limits them
    cores = cores if num_cores is None else min(cores, num_cores)
    limits = {"cpus": f"{cores:g}", "memory": f"{machine.memory_gib * 1024:.0f}m"}
    if not machine.accelerator_count:
        return {"limits": limits}
    gpus = {"driver": "nvidia", "count": machine.accelerator_count, "capabilities": ["gpu"]}
    return {"limits": limits, "reservations": {"devices": [gpus]}}
