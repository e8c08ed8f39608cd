"""What a strategy's constructor does in each kind of task, and how a script's end reaches the chief."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from types import NoneType, TracebackType
from typing import Any, cast

from stratagem.arguments import check_kind
from stratagem.checkpoint.ended import note_leaving, take_away_at_exit
from stratagem.cluster.config import ChiefConfig, PsConfig, RoleConfig, WorkerConfig
from stratagem.cluster.exit_codes import EXIT_PREEMPTED
from stratagem.cluster.resolvers import ClusterResolver
from stratagem.cluster.sources import cluster_layer, environment_layer, gather, resolve
from stratagem.cluster.spec import ClusterSpec
from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import placement_from_environment
from stratagem.errors import ConfigurationError, JobStoppedError
from stratagem.rpc.logs import configure_logging, show_until_configured
from stratagem.worker.interrupts import preemption
from stratagem.worker.runtime import WorkerRuntime, active_runtime
from stratagem.worker.script_runner import before_sudden_exit, follows, watch_exit, words_of

logger = logging.getLogger(__name__)


def join_as(resolver: ClusterResolver | None) -> tuple[WorkerConfig, ClusterSpec]:
    """The configuration of this worker. In a chief or a ps: serves until the job ends, then exits. A ConfigurationError
    where there is no cluster to join."""
    task, cluster = _told(resolver)
    if cluster is None:
        raise ConfigurationError(
            "there is no cluster to join: neither TF_CONFIG nor RANK is set, nor is this a Slurm step. Start the "
            "script with `stratagem run --workers 2 --ps 2 SCRIPT`, or set TF_CONFIG for each task"
        )
    if task is None:
        raise ConfigurationError(
            'which task is this? Set "task" in TF_CONFIG, or STRATAGEM_TASK, or task_type and task_id of the resolver'
        )
    if task.type in ("chief", "ps"):
        raise SystemExit(_serve(task, cluster, resolver))
    show_until_configured(str(task))
    _end_as_told(task)
    config: WorkerConfig = _config(task, cluster, resolver)
    is_by_torchrun = "RANK" in os.environ and not os.environ.get("TF_CONFIG")
    if is_by_torchrun and cluster == _told(None)[1]:
        from stratagem.strategy.torchrun import with_addresses  # loads the backend of torch.distributed

        cluster = with_addresses(cluster, config, os.environ)
        config = _resolved(task, cluster, "torchrun")
    return config, cluster


def join_or_alone(resolver: ClusterResolver | None) -> tuple[WorkerConfig, ClusterSpec | None]:
    """As :func:`join_as`, of a cluster without ps, which a ps itself says, too: it would wait for a chief that has
    failed. Without a cluster the configuration of the only worker, and None."""
    cluster = _told(resolver)[1]
    if cluster is not None and cluster.num_ps:
        raise ConfigurationError(
            f"MultiWorkerMirroredStrategy trains without parameter servers, but the cluster has {cluster.num_ps} "
            "ps; use ParameterServerStrategy (--strategy ps) or leave the ps out"
        )
    if cluster is not None:
        return join_as(resolver)
    return cast(WorkerConfig, gather("worker", os.environ)[0].config), None


def is_evaluator(resolver: ClusterResolver | None = None) -> bool:
    """Whether this process is the evaluator of a cluster, by the resolver; None: by TF_CONFIG."""
    task, _ = _told(resolver)
    return task is not None and task.type == "evaluator"


def _told(resolver: ClusterResolver | None) -> tuple[TaskId | None, ClusterSpec | None]:
    check_kind(resolver, ClusterResolver, NoneType)
    if resolver is not None:
        return resolver.task, resolver.cluster_spec()
    placement = placement_from_environment(os.environ)
    return (None, None) if placement is None else (placement.task, placement.cluster)


def _config(task: TaskId, cluster: ClusterSpec, resolver: ClusterResolver | None) -> Any:
    """Of the class for this kind of task."""
    if resolver is None:
        return gather(task.type, os.environ)[0].config
    return _resolved(task, cluster, "cluster_resolver")


def _resolved(task: TaskId, cluster: ClusterSpec, origin: str) -> Any:
    models: dict[str, type[RoleConfig]] = {"chief": ChiefConfig, "ps": PsConfig}
    model = models.get(task.type, WorkerConfig)
    layers = [environment_layer(model, os.environ), cluster_layer(cluster, task, origin)]
    return resolve(model, layers).config


def _serve(task: TaskId, cluster: ClusterSpec, resolver: ClusterResolver | None) -> int:
    configure_logging(str(task))
    config = _config(task, cluster, resolver)
    take_away_at_exit(config.checkpoint_dir, config.task)
    if isinstance(config, ChiefConfig):
        from stratagem.chief.__main__ import run as run_chief  # no worker needs what it loads

        logger.info("the chief is not a replica: the cluster trains with %d workers", cluster.num_workers)
        return run_chief(config)
    from stratagem.ps.__main__ import run as run_ps  # nor this

    return run_ps(config)


def _end_as_told(task: TaskId) -> None:
    """Where the job is over for a script that Python itself runs, it ends as one that `stratagem worker` runs: with the
    job's exit code and without a traceback."""
    previous = sys.excepthook

    def on_exception(cls: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, JobStoppedError):
            print(f"{task}: {error}", file=sys.stderr)
            raise SystemExit(error.exit_code)
        previous(cls, error, traceback)

    sys.excepthook = on_exception


def say_goodbye_at_exit(runtime: WorkerRuntime) -> None:
    """Tells the chief how the script ended when this process ends by itself (``python train.py``)."""
    failure: list[tuple[int, str, bool]] = []
    previous = sys.excepthook

    def on_exception(cls: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        code = error.exit_code if isinstance(error, JobStoppedError) else 1
        failure.append((code, words_of(error), follows(error)))
        previous(cls, error, traceback)

    sys.excepthook = on_exception
    exit_code = watch_exit()  # a SystemExit does not come by the hook

    def goodbye() -> None:
        code, words, follows = failure[0] if failure else (*exit_code(), False)
        if preemption.is_leaving and not failure:
            code, words = EXIT_PREEMPTED, ""
        if code == 0 and active_runtime() is runtime:  # else `stratagem worker` has noted it, and said goodbye
            take_away_at_exit(runtime.config.checkpoint_dir, runtime.config.task)
            note_leaving(runtime.config.checkpoint_dir, runtime.config.task, "its script is done")
        runtime.goodbye(code, words, follows)

    _before_pools_close(goodbye)
    before_sudden_exit(runtime.goodbye)


def _before_pools_close(work: Callable[[], None]) -> None:
    """Runs ``work`` at the end of this process, while gRPC's server can still answer.

    ``atexit`` is too late: before it, ``concurrent.futures`` stops every pool, a call that comes after that kills the
    server's thread, and stopping the server waits for that thread. ``concurrent.futures`` itself uses this function.
    The end of a forked child (a DataLoader's worker) comes by here too; it has nothing to say.
    """
    process = os.getpid()

    def run_here() -> None:
        if os.getpid() == process:
            work()

    threading._register_atexit(run_here)  # type: ignore[attr-defined]
