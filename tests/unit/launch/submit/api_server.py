"""A Kubernetes API server in a thread: kmock, which keeps what is posted, on a free port of loopback."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from kmock import KubernetesEmulator, Request, ResourceInfo, Server, action, resource

JOBS, PODS = resource("batch/v1/jobs"), resource("v1/pods")
CLAIMS = resource("v1/persistentvolumeclaims")
NAMESPACE = "team"


class _Emulator(KubernetesEmulator):
    """kmock, which would list everything, with label selectors, and with a memory of what was posted."""

    posted: list[dict[str, Any]]

    async def _handle(self, request: Request) -> Any:
        if request.action == action.CREATE:
            self.posted.append(copy.deepcopy(request.data))
        return await super()._handle(request)

    async def _serve_list(self, request: Request) -> Any:
        listed: Any = await super()._serve_list(request)
        wanted = dict(pair.split("=") for pair in request.params.get("labelSelector", "").split(",") if pair)
        items = [one for one in listed["items"] if wanted.items() <= one["metadata"].get("labels", {}).items()]
        return {**listed, "items": items}


class ApiServer:
    """What a test sees of the server.

    Args:
        kubeconfig: a file that names it.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self.handler = _Emulator()
        self.handler.posted = []
        self.handler.resources[PODS] = ResourceInfo()
        self.handler.resources[JOBS] = ResourceInfo()
        self.handler.resources[CLAIMS] = ResourceInfo()

    @property
    def posted(self) -> list[dict[str, Any]]:
        """What was to be created, in that order."""
        return self.handler.posted

    @property
    def names(self) -> set[tuple[str, str]]:
        """Kind and name of every object that is there now."""
        alive = [one.raw for one in self.handler.objects.values() if not one.deleted]
        return {(one["kind"], one["metadata"]["name"]) for one in alive}

    def add_namespace(self) -> None:
        """There is the one that is used."""
        self.handler[f"get /api/v1/namespaces/{NAMESPACE}"] << {"metadata": {"name": NAMESPACE}}

    def refuse(self, plural: str, message: str) -> None:
        """From now on nothing of this kind can be created."""
        self.handler[f"post /apis/batch/v1/namespaces/{NAMESPACE}/{plural}"] << 403 << {"message": message}

    def set_status(self, kind: resource, name: str, **status: Any) -> None:
        """What a controller would write."""
        self.handler.objects[kind, NAMESPACE, name].patch({"status": status})

    def add_pod(self, job: str, name: str, role: str, instance: str, status: dict[str, Any]) -> None:
        """What the controller of Jobs would make."""
        labels = {"job-name": job, "app.kubernetes.io/instance": instance, "app.kubernetes.io/component": role}
        metadata = {"name": name, "namespace": NAMESPACE, "labels": labels, "uid": name}
        spec = {"hostname": job.removeprefix(f"{instance}-"), "containers": [{"name": "task", "image": "x"}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}
        self.handler.objects[PODS, NAMESPACE, name] = pod

    def set_log(self, pod: str, text: str) -> None:
        """What a pod has written."""
        self.handler[f"get /api/v1/namespaces/{NAMESPACE}/pods/{pod}/log"] << text.encode()


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Runs a server until the end of the block."""
    server = ApiServer(folder / "kubeconfig")
    started: threading.Event = threading.Event()
    stops: list[Callable[[], object]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        stops.append(functools.partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set))
        async with server.handler, Server(server.handler) as listening:
            cluster = {"server": str(listening.url).rstrip("/")}
            context = {"cluster": "kmock", "user": "tester", "namespace": NAMESPACE}
            config = {
                "clusters": [{"name": "kmock", "cluster": cluster}],
                "contexts": [{"name": "test", "context": context}],
                "current-context": "test",
                "users": [{"name": "tester", "user": {}}],
            }
            server.kubeconfig.write_text(yaml.safe_dump(config))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="kmock")
    thread.start()
    try:
        assert started.wait(60)
        yield server
    finally:
        stops[0]()
        thread.join(60)
