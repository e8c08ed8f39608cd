"""Cluster resolvers with TensorFlow's names: where a strategy learns its cluster and its own place in it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from stratagem.arguments import checked
from stratagem.cluster.slurm import read_slurm
from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import placement_from_environment
from stratagem.errors import ClusterSpecError
from stratagem.tensorflow_names import WithWaysOut


@runtime_checkable
class ClusterResolver(Protocol):
    """What a strategy asks a resolver."""

    @property
    def task(self) -> TaskId | None:
        """This process, or None when it has no place in a cluster."""

    def cluster_spec(self) -> ClusterSpec | None:
        """The cluster, or None when this process trains alone."""


def _override(task: TaskId | None, task_type: str | None, task_id: int | None) -> TaskId | None:
    if task_type is None and task_id is None:
        return task
    kind = task_type if task_type is not None else task.type if task is not None else None
    if kind is None:
        raise ClusterSpecError(f"expected a task_type with task_id={task_id}, got none")
    index = task_id if task_id is not None else task.index if task is not None else 0
    return TaskId.parse(f"{kind}:{index}")


class _Resolved(WithWaysOut):
    """A known cluster and a known place in it."""

    rpc_layer = "grpc"
    """Control messages between tasks use it; gradients take faster lanes where available."""

    def __init__(self, cluster: ClusterSpec | None, task: TaskId | None) -> None:
        self._cluster = cluster
        self._task = task
        if cluster is not None and task is not None:
            cluster.check_task(task)

    def cluster_spec(self) -> ClusterSpec | None:
        """The cluster; None when this process trains alone."""
        return self._cluster

    @property
    def task(self) -> TaskId | None:
        """This process."""
        return self._task

    @property
    def task_type(self) -> str | None:
        """Role of this process."""
        return self._task.type if self._task else None

    @property
    def task_id(self) -> int | None:
        """Index of this process in its role."""
        return self._task.index if self._task else None


@checked
class SimpleClusterResolver(_Resolved):
    """A cluster given by the caller.

    Args:
        cluster_spec: a :class:`ClusterSpec`, or ``{role: ["host:port", …]}``.
        task_type: role of this process; None if unknown.
        task_id: index of this process in its role.

    Raises:
        ClusterSpecError: the cluster is invalid, or does not have the task.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, Sequence[str]],
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            cluster_spec = ClusterSpec.from_mapping(cluster_spec)
        super().__init__(cluster_spec, _override(None, task_type, task_id))


@checked
class TFConfigClusterResolver(_Resolved):
    """The cluster of TF_CONFIG, of torchrun's variables, or of a Slurm step: the default of every script.

    Args:
        task_type: replaces the role given by the environment.
        task_id: replaces the index given by the environment.
        environ: the environment; None: ``os.environ``.

    Raises:
        ClusterSpecError: the environment describes no valid cluster, or contradicts itself.
    """

    def __init__(
        self, task_type: str | None = None, task_id: int | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        placement = placement_from_environment(os.environ if environ is None else environ)
        cluster, task = placement if placement is not None else (None, None)
        super().__init__(cluster, _override(task, task_type, task_id))


@checked
class KubernetesClusterResolver(_Resolved):
    """The cluster and the task of a pod, from its environment; it does not ask the API server.

    TF_CONFIG gives the cluster, the same in every pod. The task is STRATAGEM_TASK or the "task" of TF_CONFIG, where the
    pod's template sets one. (Pods made by ``stratagem render`` need no resolver: scripts read these by default.)
    In other pods it is the pod's index: JOB_COMPLETION_INDEX of an Indexed Job, or the ordinal at the end of
    the name of a StatefulSet's pod (HOSTNAME).

    Args:
        task_type: role of the pods of an Indexed Job or StatefulSet.
        environ: the environment; None: ``os.environ``.

    Raises:
        ClusterSpecError: no cluster, no index, or two different ones.
    """

    def __init__(self, task_type: str = "worker", environ: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environ is None else environ
        if not variables.get("TF_CONFIG"):
            raise ClusterSpecError(
                "expected the cluster in TF_CONFIG, got none: give every pod the same one, without a task "
                "(`stratagem render --target kubernetes` writes it)"
            )
        placement = placement_from_environment(variables)
        if placement is None:
            raise ClusterSpecError(f"expected a cluster in TF_CONFIG, got {variables['TF_CONFIG'][:200]!r}")
        super().__init__(placement.cluster, _task_of_pod(placement.task, task_type, variables))


def _task_of_pod(task: TaskId | None, task_type: str, environ: Mapping[str, str]) -> TaskId:
    completion = environ.get("JOB_COMPLETION_INDEX", "")
    if task is not None:
        if completion not in ("", str(task.index)):
            raise ClusterSpecError(
                f"the environment says this pod is {task}, but JOB_COMPLETION_INDEX={completion} is set; "
                "unset STRATAGEM_TASK, or the task in TF_CONFIG"
            )
        return task
    host = environ.get("HOSTNAME", "")
    index = completion or host.rpartition("-")[2]
    if not (index.isascii() and index.isdigit()):
        raise ClusterSpecError(
            f"expected the index of this {task_type} in STRATAGEM_TASK, in JOB_COMPLETION_INDEX (an Indexed Job) or at "
            f"the end of HOSTNAME (a StatefulSet), got HOSTNAME={host!r}"
        )
    return TaskId.parse(f"{task_type}:{int(index)}")


@checked
class SlurmClusterResolver(_Resolved):
    """The cluster of a step that ``srun`` started: one task per process, the chief beside worker 0.

    Args:
        jobs: tasks of each role, in the order of their ranks, for example ``{"worker": 3, "ps": 1}``; None: workers,
            of which the last STRATAGEM_NUM_PS are parameter servers.
        port_base: port of the chief; None: derived from the job and step ids. Every other task takes a free one.
        environ: the environment; None: ``os.environ``.

    Raises:
        ClusterSpecError: this is not a Slurm step, or its variables contradict each other.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(*read_slurm(os.environ if environ is None else environ, jobs, port_base))
