"""The cluster of a task that knows its chief and nothing else: the chief says who belongs to it."""

from __future__ import annotations

import time

from stratagem.cluster.config import EvaluatorConfig, WorkerConfig
from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import TaskPlacement
from stratagem.errors import ClusterTimeoutError, PeerUnavailableError
from stratagem.launch.status import fetch_status
from stratagem.rpc.chief_address import ChiefAddress
from stratagem.rpc.security import security_of
from stratagem.rpc.status_view import StatusView

ASK_S = 5.0
"""Seconds for one answer."""
AGAIN_S = 0.5
"""Seconds between two tries."""


def ask_for_cluster(config: WorkerConfig | EvaluatorConfig) -> TaskPlacement:
    """The cluster that the chief at ``config.chief`` coordinates, and this task's place in it.

    Raises:
        ClusterTimeoutError: it did not answer within ``start_timeout_s``.
        IdentityError: TLS does not come about, or the chief does not know us.
    """
    security = security_of(config)
    deadline = time.monotonic() + config.start_timeout_s
    while True:
        try:
            status = fetch_status(config.chief, min(ASK_S, config.start_timeout_s), security)
        except PeerUnavailableError as error:
            if time.monotonic() > deadline:
                raise ClusterTimeoutError(
                    f"{config.task} asked its chief for the cluster for {config.start_timeout_s:.0f} s: {error}"
                ) from None
            time.sleep(AGAIN_S)
        else:
            return placement_of(config, status)


def placement_of(config: WorkerConfig | EvaluatorConfig, status: StatusView) -> TaskPlacement:
    """The cluster of a status page; a worker that joins a running job may be beyond those it began with.

    The others stand in it to be counted: where they are, the chief tells when they join. They count as workers of this
    host (LOCAL_RANK, and so the GPU); a cluster over several hosts with several GPUs each is to be written down.
    """
    task = TaskId.parse(config.task)
    num_workers = sum(each.task.startswith("worker:") for each in status.tasks)
    somewhere = f"{config.bind.rpartition(':')[0]}:0"
    workers = [somewhere] * num_workers
    if task.type == "worker":
        workers += [somewhere] * (task.index + 1 - len(workers))
        workers[task.index] = config.bind
    ps = [somewhere] * status.num_ps
    chief = ChiefAddress(config.chief).current
    return TaskPlacement(ClusterSpec(chief=(chief,), worker=tuple(workers), ps=tuple(ps)), task)
