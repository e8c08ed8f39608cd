"""Jobs on a Kubernetes cluster: applies the objects that `stratagem render` shows; a copy is in the job's folder."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from stratagem.cluster.exit_codes import HOPELESS
from stratagem.errors import SubmitError
from stratagem.launch.actions import precedence_of
from stratagem.launch.manifests import kubernetes
from stratagem.launch.manifests.pod import to_yaml
from stratagem.launch.submit.docker_cli import build, forget, push
from stratagem.launch.submit.kubernetes_client import Cluster, Object
from stratagem.launch.submit.patience import POLL_S, TargetPatience
from stratagem.launch.submit.plan import JobPlan
from stratagem.launch.submit.record import JobRecord, JobState, Record

FILE = "kubernetes.yaml"
SETTLE_S = 5.0
"""Seconds that a reason to wait has to last before it is said: most go by themselves."""
CANCEL_S = 120.0
"""Seconds in which the pods of a cancelled job are to be gone; those of a node that is lost stay."""
_INSTANCE, _COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
_STARTING = ("ContainerCreating", "PodInitializing")
"""What every container says for a while: an event tells whether something is wrong."""
_PULLING = ("ErrImagePull", "ImagePullBackOff")
"""An image that is not there, in turns: only an event has the cause in both."""
_NO_REASON = ("WaitForFirstConsumer", "WaitForPodScheduled", "FailedScheduling")
"""Events of a volume that only waits for its first pod, and of a pod before it had a node: until then its status says
why."""
_NO_CAUSE = tuple(f"Error: {reason}" for reason in _PULLING)
"""Events beside the one that has the cause."""
_OF_VOLUMES = (
    "kubernetes_access_mode='ReadWriteOnce' (--access-mode) is for storage of one node, "
    "kubernetes_storage_class (--storage-class) names another class"
)
_OF_MACHINES = "chief_config, worker_config and ps_config say what tasks ask for"


def show(plan: JobPlan) -> str:
    """The objects as YAML, as :func:`submit` creates them."""
    return to_yaml(kubernetes.render(plan.workload()))


def submit(plan: JobPlan, folder: Path, record: Record) -> None:
    """Builds and pushes the image, and creates the objects, all or none; the image is not kept here."""
    assert plan.image is not None
    with contextlib.closing(Cluster(namespace=plan.request.kubernetes_namespace or "")) as cluster:
        cluster.check_namespace()
        cluster.check_rights(kubernetes.render(plan.workload()))
        build(plan.image)
        try:
            image = push(plan.image.name)
            objects = kubernetes.render(plan.workload(image), cluster.is_at_least(26))
            (folder / FILE).write_text(to_yaml(objects))
            where = {"context": cluster.context, "namespace": cluster.namespace, "kubeconfig": cluster.kubeconfig}
            record(image, where)
            cluster.create(objects)
        finally:
            forget(plan.image.name)


def state(record: JobRecord, folder: Path) -> JobState:
    """Where the job stands: it is over when its workers' Jobs are, or when one of its Jobs has failed."""
    with contextlib.closing(Cluster(**record.place)) as cluster:
        jobs = cluster.jobs(_selector(record))
        if not jobs:
            pods = [
                pod for pod in cluster.pods(_selector(record)) if pod["status"].get("phase") in ("Pending", "Running")
            ]
            ending = ", ".join(sorted(map(task_of, pods)))
            words = "its Jobs are gone" + (f"; still there to save and end: {ending}" if ending else "")
            return JobState("cancelled" if record.cancelled else "unknown", None, words)
        failed = sorted((job for job in jobs if _has(job, "Failed")), key=lambda job: precedence_of(_role(job)))
        if failed:
            name = str(failed[0]["metadata"]["name"])
            code, why = _end_of(cluster.pods(f"job-name={name}"))
            words = f"{name.removeprefix(f'{record.id}-')} has failed{why}"
            return JobState("cancelled" if record.cancelled else "failed", code, words)
        workers = [job for job in jobs if _role(job) == "worker"]
        if len(workers) == record.num_workers and all(_has(job, "Complete") for job in workers):
            return JobState("succeeded", 0)
        pods = cluster.pods(_selector(record))
        for pod in sorted(pods, key=lambda pod: precedence_of(_role(pod))):
            if (code := _end_of([pod])[0]) in HOPELESS:  # a cluster older than 1.26 tries it again
                why, what = "a restart would not help", f"`stratagem jobs remove {record.id}` removes what is left"
                words = f"{task_of(pod)} has failed, and {why}: {what}"
                return JobState("cancelled" if record.cancelled else "failed", code, words)
        there = {job["metadata"]["name"] for job in jobs}
        made = (str(one["metadata"]["name"]) for one in _objects(folder) if one["kind"] == "Job")
        gone = (f"the Job {name} is gone: cancel the job" for name in made if name not in there)
        phases = sorted(f"{task_of(pod)} {pod['status'].get('phase')}{_restarts(pod)}" for pod in pods)
        running = any(pod["status"].get("phase") == "Running" for pod in pods)
        detail = "; ".join([", ".join(phases), *gone, *reasons_of(cluster, _selector(record), jobs, pods)])
        return JobState("running" if running else "pending", None, detail)


def logs(record: JobRecord, folder: Path, follow: bool) -> Iterator[str]:
    """Lines of every pod with the name of its task, also of the container before the one that runs; ``follow``
    is for worker 0, to the end of the job. What keeps the job waiting is said as well."""
    with contextlib.closing(Cluster(**record.place)) as cluster:
        if not follow:
            pods = cluster.pods(_selector(record))
            for pod in filter(_has_started, pods):
                name, task = pod["metadata"]["name"], task_of(pod)
                if _runs_again(pod):
                    with contextlib.suppress(SubmitError):  # the node may have removed it
                        yield from (f"{task} | {line}" for line in cluster.log(name, False, previous=True))
                yield from (f"{task} | {line}" for line in cluster.log(name, False))
            waits = reasons_of(cluster, _selector(record), cluster.jobs(_selector(record)), pods)
            yield from (f"stratagem: {line}" for line in waits)
            return
        shown: dict[tuple[str, int], int] = {}  # lines of each life of a container
        since: dict[str, float] = {}  # reasons to wait
        patience = TargetPatience()
        while True:
            over = patience.ask(lambda: state(record, folder)).is_over
            pods = patience.ask(lambda: cluster.pods(f"job-name={record.id}-worker-0"))
            for pod in filter(_has_started, pods):
                restarts = sum(int(one["restartCount"]) for one in _containers(pod))
                life = (pod["metadata"]["uid"], restarts)
                for number, line in enumerate(cluster.log(pod["metadata"]["name"], not over), 1):
                    if number > shown.get(life, 0):
                        shown[life] = number
                        yield line
            if over:
                return
            yield from patience.ask(lambda: list(_news(cluster, record, since)))
            time.sleep(POLL_S)


def _news(cluster: Cluster, record: JobRecord, since: dict[str, float]) -> Iterator[str]:
    """Reasons to wait that have lasted for ``SETTLE_S``, each once; ``since`` is when each was first seen."""
    selector, now = _selector(record), time.monotonic()
    reasons = reasons_of(cluster, selector, cluster.jobs(selector), cluster.pods(selector))
    for gone in since.keys() - set(reasons):
        del since[gone]
    for reason in reasons:
        if now - since.setdefault(reason, now) >= SETTLE_S:
            since[reason] = math.inf
            yield f"stratagem: {reason}"


def cancel(record: JobRecord, folder: Path) -> None:
    """Deletes the Jobs; their pods get SIGTERM, save and end, which is waited for. The volume stays."""
    with contextlib.closing(Cluster(**record.place)) as cluster:
        cluster.delete([one for one in _objects(folder) if one["kind"] == "Job"])
        deadline = time.monotonic() + CANCEL_S
        while cluster.pods(_selector(record)) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def remove(record: JobRecord, folder: Path) -> None:
    """Deletes every object of the job, the volume too; the image stays in its registry."""
    with contextlib.closing(Cluster(**record.place)) as cluster:
        cluster.delete(list(reversed(_objects(folder))))


def _objects(folder: Path) -> list[Object]:
    return list(yaml.safe_load_all((folder / FILE).read_text()))


def _selector(record: JobRecord) -> str:
    return f"{_INSTANCE}={record.id}"


def _has(job: Object, condition: str) -> bool:
    conditions = job["status"].get("conditions", ())
    return any(one["type"] == condition and one["status"] == "True" for one in conditions)


def _role(job: Object) -> str:
    return str(job["metadata"].get("labels", {}).get(_COMPONENT, ""))


def _containers(pod: Object) -> list[Object]:
    return list(pod["status"].get("containerStatuses", ()))


def _has_started(pod: Object) -> bool:
    return any(one["restartCount"] or {"running", "terminated"} & one["state"].keys() for one in _containers(pod))


def _runs_again(pod: Object) -> bool:
    return any("running" in one["state"] and "terminated" in one.get("lastState", {}) for one in _containers(pod))


def _restarts(pod: Object) -> str:
    """In words, how often a pod's container was started again, and whether it had too little memory."""
    again = sum(int(one["restartCount"]) for one in _containers(pod))
    return (f" (restarts: {again})" if again else "") + _end_of([pod])[1]


def _end_of(pods: list[Object]) -> tuple[int | None, str]:
    """Exit code of the newest container that has ended, and words where more is known: it had too little memory."""
    for pod in reversed(pods):
        for status in _containers(pod):
            ended = status["state"].get("terminated") or status.get("lastState", {}).get("terminated")
            if ended is not None:
                why = " (OOMKilled: it needs more memory)" if ended.get("reason") == "OOMKilled" else ""
                return int(ended["exitCode"]), why
    return None, ""


def reasons_of(cluster: Cluster, selector: str, jobs: Sequence[Object], pods: Sequence[Object]) -> list[str]:
    """A line for each thing that keeps a job waiting; none while nothing does. ``selector``: labels of its objects."""
    waiting: dict[str, list[str]] = {}
    have_pods = {pod["metadata"]["labels"].get("job-name") for pod in pods}
    for job in jobs:
        name = job["metadata"]["name"]
        waits = name not in have_pods and not job["status"].get("conditions")
        if waits and (said := _event(cluster, job)):
            said = re.sub(rf'"{name}-\w+" ', "", said)  # of the pod: another one each time
            task = task_of({**job["spec"]["template"], "metadata": job["metadata"]})
            waiting.setdefault(f"no pod: {said}", []).append(task)
    for pod in pods:
        if "deletionTimestamp" not in pod["metadata"] and (said := _of_pod(cluster, pod)):
            waiting.setdefault(said, []).append(task_of(pod))
    if not waiting and all(pod["status"].get("phase") != "Pending" for pod in pods):
        return []
    return [
        *_of_claims(cluster, selector),
        *(f"{', '.join(sorted(tasks))}: {said}" for said, tasks in sorted(waiting.items())),
    ]


def task_of(pod: Object) -> str:
    """The name of a pod's task: "worker-1"."""
    return str(pod["spec"].get("hostname") or pod["metadata"]["name"])


def _of_pod(cluster: Cluster, pod: Object) -> str:
    status = pod["status"]
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            said = f"not scheduled: {condition.get('message', condition.get('reason', ''))}"
            return f"{said} ({_OF_MACHINES})" if "Insufficient" in said else said
    for container in status.get("containerStatuses", ()):
        waits = container["state"].get("waiting")
        if waits is None:
            continue
        if waits.get("reason") in _STARTING:
            return _event(cluster, pod)
        if waits.get("reason") in _PULLING and (said := _event(cluster, pod)):
            return f"{_PULLING[0]}: {said}"
        ended = container.get("lastState", {}).get("terminated")
        last = f"; it ended with {ended.get('reason')}, exit code {ended['exitCode']}" if ended else ""
        last += f": {ended['message']}" if ended and ended.get("message") else ""  # it has no such program
        return f"{waits.get('reason')}: {waits.get('message', '')}{last}"
    return ""


def _of_claims(cluster: Cluster, selector: str) -> list[str]:
    said = []
    for claim in cluster.find("v1", "PersistentVolumeClaim", selector):
        if claim["status"].get("phase") == "Pending" and (why := _event(cluster, claim, warnings=False)):
            spec = claim["spec"]
            wanted = f"{', '.join(spec['accessModes'])}, class {spec.get('storageClassName') or '(none)'}"
            said.append(f"the volume {claim['metadata']['name']} ({wanted}) is not bound: {why} ({_OF_VOLUMES})")
    return said


def _event(cluster: Cluster, one: Object, warnings: bool = True) -> str:
    """What was said last about an object; empty: nothing, or it is not ours to read."""
    selector = f"involvedObject.uid={one['metadata'].get('uid')}" + (",type=Warning" if warnings else "")
    try:
        events = cluster.events(selector)
    except SubmitError:
        return ""
    said = [one for one in events if one.get("reason") not in _NO_REASON]
    said = [one for one in said if one.get("message") not in _NO_CAUSE]
    last = max(said, key=lambda event: (event.get("type") == "Warning", _time(event)), default=None)
    return "" if last is None else str(last.get("message", ""))


def _time(event: Object) -> str:
    return event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or ""
