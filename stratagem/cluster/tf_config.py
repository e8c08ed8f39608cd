"""TF_CONFIG, torchrun's and Slurm's variables: read, written, and checked against one another. Pure, no I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from stratagem.cluster.slurm import is_step, read_slurm
from stratagem.cluster.spec import ClusterSpec, join_address, nearest_type, refuse_unknown, split_address
from stratagem.cluster.task import TASK_TYPES, TaskId
from stratagem.errors import ClusterSpecError

TASK_VARIABLE = "STRATAGEM_TASK"
"""The task of this process where TF_CONFIG is the same for all, as in the pods of Kubernetes: "worker:1"."""
_KEYS = ("cluster", "task", "environment", "job", "rpc_layer")
_TASK_KEYS = ("type", "index", "trial", "cloud")
_MAX_DIGITS = 6
"""Of an index, a rank or a port."""


class TaskPlacement(NamedTuple):
    """A cluster and the place of this process in it."""

    cluster: ClusterSpec
    task: TaskId | None
    """None when only the cluster was described."""


def parse_tf_config(text: str) -> TaskPlacement | None:
    """What the JSON of TF_CONFIG says; None for a config without a cluster, which means "not distributed".
    ClusterSpecError: malformed JSON, an unknown role or key, or a task that is not in the cluster."""
    try:
        config = json.loads(text) if text.strip() else {}
    except json.JSONDecodeError as error:
        raise ClusterSpecError(
            f"TF_CONFIG is not JSON: {error.msg} at line {error.lineno} column {error.colno}; "
            f'expected {{"cluster": {{"worker": ["host:port"]}}, "task": {{"type": "worker", "index": 0}}}}, '
            f"got {text[:200]!r}"
        ) from None
    except (RecursionError, ValueError) as error:  # too deep, or a number of thousands of digits
        raise ClusterSpecError(f"TF_CONFIG cannot be read: {error}; got {text[:200]!r}") from None
    if not isinstance(config, dict):
        raise ClusterSpecError(f"expected TF_CONFIG to be a JSON object, got {text[:200]!r}")
    refuse_unknown("key", config, _KEYS, " in TF_CONFIG", ClusterSpecError)
    if config.get("rpc_layer", "grpc") != "grpc":
        raise ClusterSpecError(f"expected rpc_layer 'grpc' in TF_CONFIG, got {config['rpc_layer']!r}")
    task = _parse_task(config["task"]) if "task" in config else None
    if not config.get("cluster"):
        return None
    cluster = ClusterSpec.from_mapping(config["cluster"])
    if task is not None:
        cluster.check_task(task)
        if "index" not in config["task"] and (num := len(cluster.as_dict().get(task.type, ()))) > 1:
            raise ClusterSpecError(
                f'expected the "index" of this {task.type}, 0 to {num - 1}, in the task of TF_CONFIG, got none; where '
                f"TF_CONFIG is the same for all processes, leave the task out and set {TASK_VARIABLE}={task.type}:0"
            )
    return TaskPlacement(cluster, task)


def _parse_task(task: object) -> TaskId:
    if not isinstance(task, dict) or "type" not in task:
        raise ClusterSpecError(f'expected "task": {{"type": "worker", "index": 0}} in TF_CONFIG, got {task!r}')
    fields: dict[str, Any] = task
    refuse_unknown("key", fields, _TASK_KEYS, " in the task of TF_CONFIG", ClusterSpecError)
    if fields["type"] not in TASK_TYPES:
        raise ClusterSpecError(
            f"unknown task type {fields['type']!r} in TF_CONFIG; {nearest_type(str(fields['type']))}"
        )
    index = fields.get("index", 0)
    if isinstance(index, bool) or not str(index).isdecimal() or len(str(index)) > _MAX_DIGITS:
        raise ClusterSpecError(f"expected a task index like 0 in TF_CONFIG, got {repr(index)[:20]}")
    return TaskId(fields["type"], int(index))


def emit_tf_config(cluster: ClusterSpec, task: TaskId) -> str:
    """TF_CONFIG for ``task``; a ClusterSpecError when that is not in the cluster."""
    cluster.check_task(task)
    return json.dumps({"cluster": cluster.as_dict(), "task": {"type": task.type, "index": task.index}})


def torchrun_environment(cluster: ClusterSpec, task: TaskId) -> dict[str, str]:
    """torchrun's variables for a worker; ranks count workers only. Empty for any other task.

    LOCAL_RANK counts the workers on the same host. MASTER_ADDR and MASTER_PORT are worker 0's: a script of
    ``torch.distributed`` opens its store there, which it could not where the chief listens. Worker 0 of a local job has
    no port of its own: what its launcher says counts, else they are the chief's.
    """
    if task.type != "worker":
        return {}
    cluster.check_task(task)
    hosts = [split_address(address)[0] for address in cluster.worker]
    host, port = split_address(cluster.worker[0] if _has_master(cluster) else cluster.chief_address)
    return {
        "RANK": str(task.index),
        "WORLD_SIZE": str(cluster.num_workers),
        "LOCAL_RANK": str(hosts[: task.index].count(hosts[task.index])),
        "LOCAL_WORLD_SIZE": str(hosts.count(hosts[task.index])),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def _has_master(cluster: ClusterSpec) -> bool:
    """Whether the cluster says where worker 0's script can open a store."""
    return split_address(cluster.worker[0])[1] != 0


def parse_torchrun(environ: Mapping[str, str]) -> TaskPlacement | None:
    """The cluster of workers that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe; None without RANK. Worker 0
    is at MASTER_ADDR:MASTER_PORT (there the chief will serve); the others take free ports. ClusterSpecError: a variable
    is missing or no number, or RANK is not below WORLD_SIZE."""
    if "RANK" not in environ:
        return None
    if missing := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environ]:
        raise ClusterSpecError(f"RANK={environ['RANK']} is set, but not {', '.join(missing)}; set them or unset RANK")
    numbers = {name: environ[name].strip() for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    for name, value in numbers.items():
        if not (value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS):
            raise ClusterSpecError(
                f"expected a whole number of at most {_MAX_DIGITS} digits in {name}, got {environ[name][:20]!r}"
            )
    rank, world_size = int(numbers["RANK"]), int(numbers["WORLD_SIZE"])
    if rank >= world_size:
        raise ClusterSpecError(f"expected RANK below WORLD_SIZE, got RANK={rank} and WORLD_SIZE={world_size}")
    first = join_address(environ["MASTER_ADDR"], int(numbers["MASTER_PORT"]))
    others = ("127.0.0.1:0",) * (world_size - 1)
    return TaskPlacement(ClusterSpec(worker=(first, *others)), TaskId("worker", rank))


def placement_from_environment(environ: Mapping[str, str]) -> TaskPlacement | None:
    """Where this process stands; None: it is not part of a cluster. The cluster is that of TF_CONFIG, and the task its
    "task" or STRATAGEM_TASK. Without TF_CONFIG, torchrun's variables say both, and without those a step of Slurm with
    several tasks. ClusterSpecError: what is written is not valid, or TF_CONFIG disagrees with STRATAGEM_TASK or with
    torchrun's variables."""
    placement = parse_tf_config(environ.get("TF_CONFIG", ""))
    if placement is None:
        if "RANK" not in environ and is_step(environ):
            return TaskPlacement(*read_slurm(environ))
        return parse_torchrun(environ)
    cluster, task = placement
    if name := environ.get(TASK_VARIABLE, ""):
        named = TaskId.parse(name)
        if task not in (None, named):
            raise ClusterSpecError(
                f"TF_CONFIG says this process is {task}, but {TASK_VARIABLE}={name} is set; unset one of the two"
            )
        cluster.check_task(named)
        task = named
    if task is not None:
        _check_agreement(cluster, task, environ)
    return TaskPlacement(cluster, task)


def cluster_variables(environ: Mapping[str, str]) -> str:
    """The variables that :func:`placement_from_environment` takes the cluster from, for people."""
    return "TF_CONFIG" if environ.get("TF_CONFIG") else "RANK" if "RANK" in environ else "SLURM_STEP_NODELIST"


def _check_agreement(cluster: ClusterSpec, task: TaskId, environ: Mapping[str, str]) -> None:
    if task.type != "worker":
        if "RANK" in environ:
            raise ClusterSpecError(
                f"TF_CONFIG says this process is {task}, which has no rank, but RANK={environ['RANK']} is set "
                "(ranks count workers); unset one of the two"
            )
        return
    told = torchrun_environment(cluster, task)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name == "MASTER_PORT" and not _has_master(cluster):
            continue
        if name in environ and _normal(environ[name]) != _normal(told[name]):
            raise ClusterSpecError(
                f"TF_CONFIG and torchrun's variables disagree: by TF_CONFIG ({task} of {cluster.num_workers} workers, "
                f"chief at {cluster.chief_address}) {name} is {told[name]}, but {name}={environ[name]} is set; "
                "unset one of the two"
            )


def _normal(value: str) -> str:
    value = value.strip().removeprefix("[").removesuffix("]")
    return "127.0.0.1" if value == "localhost" else value
