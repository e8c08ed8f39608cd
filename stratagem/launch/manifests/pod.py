"""The pod of one task: what Jobs, a JobSet and a TrainJob have in common; objects as YAML. Pure, no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from stratagem.cluster.choice import ONE_PROCESS
from stratagem.cluster.exit_codes import EXIT_PREEMPTED, HOPELESS
from stratagem.cluster.sources import gather
from stratagem.cluster.tf_config import TASK_VARIABLE
from stratagem.launch.machines import MachineConfig
from stratagem.launch.manifests.workload import Workload

Object = dict[str, Any]
"""A Kubernetes object, or a part of one, as it stands in YAML."""

GRACE_S = 30
"""From SIGTERM to SIGKILL. A worker gives itself 20 s to end a step and save it, see docs/design/preemption.md."""
JOB_FOLDER = "/var/lib/stratagem"
"""Where every task sees the job's volume: checkpoints, the chief's journal, what the script exports."""
TLS_FOLDER = "/etc/stratagem/tls"
TOKEN_FOLDER = "/etc/stratagem/token"
"""Where a task finds the Secrets."""
USER = 10001
"""Numeric user and group of every container; the volume belongs to the group."""
MAX_TASKS = "1024"
"""Workers, and ps, that may join a job on parameter servers, those that come while it trains included."""
SECRET_MODE = 0o440
"""Files of Secrets: for the container's group alone."""
_RUN = {"name": "STRATAGEM_RUN_ID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['controller-uid']"}}}
"""The uid of the Job: a pod of it that was deleted while it ended well is made again, and what always fails need not
be."""
RESTARTS_S = "600"
"""How long the others wait for a task that Kubernetes starts again, if need be on a new node."""
START_S = "900"
"""How long the tasks wait for the whole cluster: nodes may have to be added, and images pulled."""


def selector_of(workload: Workload, role: str = "") -> dict[str, str]:
    """Labels that the pods of the job (of a role of it) have, and no others."""
    own = {"app.kubernetes.io/name": "stratagem", "app.kubernetes.io/instance": workload.name}
    return own | ({"app.kubernetes.io/component": role} if role else {})


def labels_of(workload: Workload, role: str = "") -> dict[str, str]:
    """Labels of an object of the job: the user's own, and those by which the job finds its pods."""
    return {**workload.labels, **selector_of(workload, role)}


def machine_of(workload: Workload, role: str) -> MachineConfig:
    """What a task of ``role`` asks for; the evaluator asks for what a worker does."""
    return {"chief": workload.chief, "ps": workload.ps}.get(role, workload.worker)


def command_of(workload: Workload, role: str) -> list[str]:
    """The command line of a task, as compose and Kubernetes take it, which put variables in where they see a dollar
    sign; all that it needs to know beside its script is in its environment."""
    script = [workload.script, *workload.args] if role in ("worker", "evaluator") else []
    return ["stratagem", role, *(word.replace("$", "$$") for word in script)]


def settings_of(workload: Workload) -> dict[str, str]:
    """Environment of every task, without the cluster. ConfigurationError: a task would refuse it."""
    settings = {
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        "STRATAGEM_CHECKPOINT_ROOTS": JOB_FOLDER,
        "STRATAGEM_LOG_FORMAT": "json",
        "STRATAGEM_STRATEGY": workload.strategy_name,
    }
    if workload.chosen_strategy not in ONE_PROCESS:
        settings |= {
            "STRATAGEM_BIND": f"0.0.0.0:{workload.port}",
            "STRATAGEM_CHECKPOINT_DIR": f"{JOB_FOLDER}/checkpoints",
            "STRATAGEM_CHECKPOINT_EVERY_S": f"{workload.checkpoint_every_s:g}",
            "STRATAGEM_PEER_TIMEOUT_S": RESTARTS_S,
            "STRATAGEM_START_TIMEOUT_S": START_S,
            "STRATAGEM_WORKER_TIMEOUT_S": RESTARTS_S,
        }
        settings |= {"STRATAGEM_TLS": TLS_FOLDER} if workload.tls_secret else {"STRATAGEM_INSECURE": "true"}
        settings |= {"STRATAGEM_TOKEN_FILE": f"{TOKEN_FOLDER}/token"} if workload.token_secret else {}
        host = "0.0.0.0" if shows_page(workload) else "127.0.0.1"
        settings |= {"STRATAGEM_WEB": f"{host}:{workload.web}"} if workload.web else {}
    if workload.chosen_strategy == "ps":
        # A ring's chief keeps no journal: workers that all begin anew need a chief that does so too.
        settings |= {"STRATAGEM_STALENESS": f"{workload.staleness:g}", "STRATAGEM_STATE_DIR": f"{JOB_FOLDER}/chief"}
        joining = ("STRATAGEM_MAX_WORKERS", "STRATAGEM_MAX_PS") if workload.staleness > 0 else ()
        settings |= dict.fromkeys(joining, MAX_TASKS)
    settings |= workload.environment
    counts = {"num_workers": workload.num_workers, "num_ps": workload.num_ps}
    for role in roles_of(workload):
        gather(role, {**settings, TASK_VARIABLE: f"{role}:0"}, counts if role == "chief" else {})
    return settings


def roles_of(workload: Workload) -> list[str]:
    """Types of the job's tasks; one process is a worker."""
    if workload.chosen_strategy in ONE_PROCESS:
        return ["worker"]
    return ["chief", "worker", *["ps"] * bool(workload.num_ps), *["evaluator"] * workload.evaluator]


def shows_page(workload: Workload) -> bool:
    """Whether others than the chief's pod reach the page: unencrypted it stays there, for `kubectl port-forward`."""
    return bool(workload.web and workload.tls_secret)


def pod_template(workload: Workload, role: str, variables: Sequence[Object], hostname: str = "") -> Object:
    """The template of a pod. ``variables``: ``env`` of the container, beside what the job's ConfigMap gives every task:
    which task it is. ``hostname``: of the pod below the job's Service; empty: the controller that makes the pod says
    it."""
    place: Object = {"hostname": hostname, "subdomain": workload.name} if hostname else {}
    secrets = _secrets(workload, hostname)
    return {
        "metadata": {"labels": labels_of(workload, role)},
        "spec": {
            **place,
            "serviceAccountName": workload.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "OnFailure",
            "terminationGracePeriodSeconds": GRACE_S,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": selector_of(workload, role)},
                }
            ],
            **_node(machine_of(workload, role)),
            "containers": [_container(workload, role, variables, secrets)],
            "volumes": [
                {"name": "job", "persistentVolumeClaim": {"claimName": workload.name}},
                {"name": "tmp", "emptyDir": {}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
                *({"name": name, "secret": secret} for name, _, secret in secrets),
            ],
        },
    }


def _secrets(workload: Workload, stem: str) -> list[tuple[str, str, Object]]:
    """Name, place and source of each secret volume. A task sees no other's key, where its name is known beforehand."""
    secrets = []
    if workload.tls_secret:
        files = ["ca.crt", f"{stem}.crt", f"{stem}.key"] if stem else []
        items = {"items": [{"key": file, "path": file} for file in files]} if files else {}
        secrets.append(("tls", TLS_FOLDER, {"secretName": workload.tls_secret, "defaultMode": SECRET_MODE, **items}))
    if workload.token_secret:
        secrets.append(("token", TOKEN_FOLDER, {"secretName": workload.token_secret, "defaultMode": SECRET_MODE}))
    return secrets


def _container(
    workload: Workload, role: str, variables: Sequence[Object], secrets: Sequence[tuple[str, str, Object]]
) -> Object:
    serves = workload.chosen_strategy not in ONE_PROCESS and role != "evaluator"
    return {
        "name": "task",
        "image": workload.image,
        "imagePullPolicy": "IfNotPresent",
        "command": command_of(workload, role),
        "envFrom": [{"configMapRef": {"name": workload.name}}],
        "env": [*variables, _RUN, *_threads(workload, role)],
        **(_probes(workload, role) if serves else {}),
        "resources": _resources(machine_of(workload, role)),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "job", "mountPath": JOB_FOLDER},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": name, "mountPath": folder, "readOnly": True} for name, folder, _ in secrets),
        ],
    }


def _probes(workload: Workload, role: str) -> Object:
    """Live is not ready: a worker lives while it waits for the others, and is ready when the cluster is complete."""
    every_s = {"periodSeconds": 30, "timeoutSeconds": 15}
    return {
        "ports": [
            {"name": "grpc", "containerPort": workload.port},
            *([{"name": "web", "containerPort": workload.web}] if role == "chief" and shows_page(workload) else []),
        ],
        "startupProbe": {**_ask(), "periodSeconds": 5, "timeoutSeconds": 15, "failureThreshold": 180},
        "livenessProbe": {**_ask(), **every_s, "failureThreshold": 6},
        "readinessProbe": {**_ask("--ready"), **every_s},
    }


def _ask(*flags: str) -> Object:
    """``timeout``: kubelets over Docker leave a probe that is too slow running, and begin the next beside it."""
    return {"exec": {"command": ["timeout", "15", "stratagem", "health", *flags]}}


def _threads(workload: Workload, role: str) -> list[Object]:
    """As many as cores; what the user says, the ConfigMap has, and ``env`` would win over it."""
    cores = str(max(1, int(machine_of(workload, role).cpu_cores)))
    names = ("OMP_NUM_THREADS", "STRATAGEM_NUM_THREADS")
    return [{"name": name, "value": cores} for name in names if name not in workload.environment]


def _resources(machine: MachineConfig) -> Object:
    """Memory is reserved and limited; cores are reserved, what others leave may be used too."""
    memory = f"{machine.memory_gib * 1024:.0f}Mi"
    gpus = {"nvidia.com/gpu": str(machine.accelerator_count)} if machine.accelerator_count else {}
    return {
        "requests": {"cpu": f"{machine.cpu_cores * 1000:.0f}m", "memory": memory},
        "limits": {"memory": memory, **gpus},
    }


def _node(machine: MachineConfig) -> Object:
    if not machine.accelerator_count:
        return {}
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    selector = {"nodeSelector": {"accelerator": machine.accelerator_type}} if machine.accelerator_type else {}
    return {"tolerations": [toleration], **selector}


def pod_failure_policy() -> Object:
    """What exit codes mean: 143 is no failure, and 2 and 42 are not tried again."""

    def on_exit(action: str, *codes: int) -> Object:
        # Up to Kubernetes 1.28 its schema asks for conditions in every rule.
        return {"action": action, "onExitCodes": {"operator": "In", "values": [*codes]}, "onPodConditions": []}

    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {"rules": [evicted, on_exit("Ignore", EXIT_PREEMPTED), on_exit("FailJob", *HOPELESS)]}


class _Dumper(yaml.SafeDumper):
    """Quotes also what is text to PyYAML alone: kubectl and compose take 1e-4, 12e4567 and 0o17 for numbers, y for
    true."""


_NUMBER = re.compile(r"[-+.]*\d[\da-fobx_.+-]*$", re.IGNORECASE)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("[yYnN]$"), list("yYnN"))


def to_yaml(documents: Sequence[Object]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)
