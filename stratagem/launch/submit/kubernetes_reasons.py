"""Why a job on Kubernetes makes no progress: what the API server knows about waiting volumes, Jobs and pods."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.errors import SubmitError
from stratagem.launch.submit.kubernetes_client import Cluster, Object

_STARTING = ("ContainerCreating", "PodInitializing")
"""What every container says for a while: an event tells whether something is wrong."""
_NO_REASON = ("WaitForFirstConsumer", "WaitForPodScheduled")
"""Events of a volume that only waits for its first pod."""
_OF_VOLUMES = (
    "kubernetes_access_mode='ReadWriteOnce' (--access-mode) is for storage of one node, "
    "kubernetes_storage_class (--storage-class) names another class"
)
_OF_MACHINES = "chief_config, worker_config and ps_config say what tasks ask for"


def reasons_of(cluster: Cluster, selector: str, jobs: Sequence[Object], pods: Sequence[Object]) -> list[str]:
    """A line for each thing that keeps a job waiting; none while nothing does. ``selector``: labels of its objects."""
    waiting: dict[str, list[str]] = {}
    have_pods = {pod["metadata"]["labels"].get("job-name") for pod in pods}
    for job in jobs:
        waits = job["metadata"]["name"] not in have_pods and not job["status"].get("conditions")
        if waits and (said := _event(cluster, job)):
            waiting.setdefault(f"no pod: {said}", []).append(job["metadata"]["name"])
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
    said = [event for event in events if event.get("reason") not in _NO_REASON]
    last = max(said, key=lambda event: (event.get("type") == "Warning", _time(event)), default=None)
    return "" if last is None else str(last.get("message", ""))


def _time(event: Object) -> str:
    return event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or ""
