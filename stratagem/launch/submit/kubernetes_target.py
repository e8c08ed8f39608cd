"""Jobs on a Kubernetes cluster: the objects that `stratagem render` shows, applied."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from stratagem.launch.manifests import kubernetes
from stratagem.launch.submit.docker_cli import build, forget, push
from stratagem.launch.submit.kubernetes_client import Cluster
from stratagem.launch.submit.plan import JobPlan
from stratagem.launch.submit.record import JobRecord
from stratagem.launch.submit.state import JobState

FILE = "kubernetes.yaml"
POLL_S = 1.0
_INSTANCE, _COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
_ORDER = ("worker", "evaluator", "ps", "chief")
"""Whose failure counts first: the others end because of the first."""


class KubernetesTarget:
    """The objects of each job carry its name; a copy of them lies in the job's folder."""

    def show(self, plan: JobPlan) -> str:
        """The objects."""
        assert plan.image is not None
        return _yaml(kubernetes.render(plan.workload(plan.image.name)))

    def submit(self, plan: JobPlan, folder: Path) -> tuple[str, dict[str, str]]:
        """Builds and pushes the image, and creates the objects, all or none; the image is not kept here."""
        assert plan.image is not None
        with _cluster(namespace=plan.request.kubernetes_namespace or "") as cluster:
            build(plan.image)
            image = push(plan.image.name)
            objects = kubernetes.render(plan.workload(image))
            (folder / FILE).write_text(_yaml(objects))
            cluster.create(objects)
            forget(plan.image.name)
            where = {"context": cluster.context, "namespace": cluster.namespace, "kubeconfig": cluster.kubeconfig}
        return image, where

    def state(self, record: JobRecord, folder: Path) -> JobState:
        """Where the job stands: it is over when its workers' Jobs are, or when one of its Jobs has failed."""
        with _cluster(**record.place) as cluster:
            jobs = cluster.jobs(_selector(record))
            if not jobs:
                return JobState("cancelled" if record.cancelled else "unknown", None, "its Jobs are gone")
            failed = sorted((job for job in jobs if _has(job, "Failed")), key=_rank)
            if failed:
                task = str(failed[0].metadata.name).removeprefix(f"{record.id}-")
                code = _exit_code(cluster.pods(f"job-name={failed[0].metadata.name}"))
                return JobState("cancelled" if record.cancelled else "failed", code, f"{task} has failed")
            if all(_has(job, "Complete") for job in jobs if _role(job) == "worker"):
                return JobState("succeeded", 0)
            pods = cluster.pods(_selector(record))
            phases = sorted(f"{_task(pod)} {pod.status.phase}" for pod in pods)
            running = any(pod.status.phase == "Running" for pod in pods)
            return JobState("running" if running else "pending", None, ", ".join(phases))

    def logs(self, record: JobRecord, folder: Path, follow: bool) -> Iterator[str]:
        """Lines of every pod with the name of its task; ``follow`` is for worker 0, to the end of the job."""
        with _cluster(**record.place) as cluster:
            if not follow:
                for pod in cluster.pods(_selector(record)):
                    if _has_started(pod):
                        yield from (f"{_task(pod)} | {line}" for line in cluster.log(pod.metadata.name, False))
                return
            shown: dict[tuple[str, int], int] = {}  # lines of each life of a container
            while True:
                over = self.state(record, folder).is_over
                for pod in filter(_has_started, cluster.pods(f"job-name={record.id}-worker-0")):
                    life = (pod.metadata.uid, _restarts(pod))
                    for number, line in enumerate(cluster.log(pod.metadata.name, not over), 1):
                        if number > shown.get(life, 0):
                            shown[life] = number
                            yield line
                if over:
                    return
                time.sleep(POLL_S)

    def cancel(self, record: JobRecord, folder: Path) -> None:
        """Deletes the Jobs; their pods get SIGTERM, save and end. The volume stays."""
        with _cluster(**record.place) as cluster:
            cluster.delete([one for one in _objects(folder) if one["kind"] == "Job"])

    def remove(self, record: JobRecord, folder: Path) -> None:
        """Deletes every object of the job, the volume too; the image stays in its registry."""
        with _cluster(**record.place) as cluster:
            cluster.delete(list(reversed(_objects(folder))))


@contextlib.contextmanager
def _cluster(**where: str) -> Iterator[Cluster]:
    cluster = Cluster(**where)
    try:
        yield cluster
    finally:
        cluster.close()


def _objects(folder: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((folder / FILE).read_text()))


def _selector(record: JobRecord) -> str:
    return f"{_INSTANCE}={record.id}"


def _has(job: Any, condition: str) -> bool:
    conditions = job.status.conditions if job.status is not None else None
    return any(one.type == condition and one.status == "True" for one in conditions or ())


def _role(job: Any) -> str:
    return str((job.metadata.labels or {}).get(_COMPONENT, ""))


def _rank(job: Any) -> int:
    return _ORDER.index(_role(job)) if _role(job) in _ORDER else len(_ORDER)


def _task(pod: Any) -> str:
    return str(pod.spec.hostname or pod.metadata.name)


def _has_started(pod: Any) -> bool:
    statuses = pod.status.container_statuses or ()
    return any(one.state.running or one.state.terminated or one.restart_count for one in statuses)


def _restarts(pod: Any) -> int:
    return sum(one.restart_count for one in pod.status.container_statuses or ())


def _exit_code(pods: list[Any]) -> int | None:
    """Of the newest container that has ended."""
    for pod in reversed(pods):
        for status in pod.status.container_statuses or ():
            ended = status.state.terminated or status.last_state.terminated
            if ended is not None:
                return int(ended.exit_code)
    return None


def _yaml(documents: list[dict[str, Any]]) -> str:
    return yaml.safe_dump_all(documents, sort_keys=False, width=120)
