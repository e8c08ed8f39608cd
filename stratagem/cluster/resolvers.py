"""Cluster resolvers with TensorFlow's names: where a strategy learns its cluster and its own place in it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import placement_from_environment
from stratagem.errors import ClusterSpecError


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


class SimpleClusterResolver:
    """A cluster given by the caller.

    Args:
        cluster_spec: a :class:`ClusterSpec`, or ``{role: ["host:port", …]}``.
        task_type: role of this process; None when it is not known.
        task_id: index of this process in its role.

    Raises:
        ClusterSpecError: the cluster is not valid, or does not have the task.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, Sequence[str]],
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            cluster_spec = ClusterSpec.from_mapping(cluster_spec)
        self._cluster = cluster_spec
        self._task = _override(None, task_type, task_id)
        if self._task is not None:
            self._cluster.check_task(self._task)

    def cluster_spec(self) -> ClusterSpec:
        """The cluster."""
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


class TFConfigClusterResolver:
    """The cluster of TF_CONFIG, or of torchrun's variables.

    Args:
        task_type: replaces the role that the environment says.
        task_id: replaces the index that the environment says.
        environ: the environment; None is ``os.environ``.

    Raises:
        ClusterSpecError: the environment describes no valid cluster, or contradicts itself.
    """

    def __init__(
        self, task_type: str | None = None, task_id: int | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        placement = placement_from_environment(os.environ if environ is None else environ)
        self._cluster = placement.cluster if placement else None
        self._task = _override(placement.task if placement else None, task_type, task_id)
        if self._cluster is not None and self._task is not None:
            self._cluster.check_task(self._task)

    def cluster_spec(self) -> ClusterSpec | None:
        """The cluster; None when the environment names none."""
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
