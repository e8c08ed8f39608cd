"""The calls to a Kubernetes API server that a job needs, and the server's reasons for refusing them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from stratagem.errors import ConfigurationError, SubmitError

TIMEOUT_S = 30.0
QUIET_S = 15.0
_NO_KUBECONFIG = (OSError, ValueError, TypeError, AttributeError, RecursionError)
"""What the library raises beside its own, where a file holds something else."""
Object = dict[str, Any]


class Cluster:
    """A namespace of a cluster (empty: that of the context) by the ``context`` of a kubeconfig (empty: the current one,
    or inside a pod the pod's own service account); ``kubeconfig``: its path (empty: KUBECONFIG, else ~/.kube/config).
    ConfigurationError: the client is not installed, or there is no configuration for it."""

    def __init__(self, context: str = "", namespace: str = "", kubeconfig: str = "") -> None:
        try:
            import kubernetes
        except ImportError:
            raise ConfigurationError(
                "target='kubernetes' needs the kubernetes client: pip install 'stratagem[kubernetes]'"
            ) from None
        self._library: Any = kubernetes
        files = (kubeconfig or os.environ.get("KUBECONFIG", "")).split(os.pathsep)
        absolute = (os.path.abspath(os.path.expanduser(file)) for file in files if file)
        self.kubeconfig = os.pathsep.join(absolute)  # a job is asked for from other folders too
        with _failed_login():
            self.context, found = self._find(context)
        self.namespace = namespace or found or "default"

    def _find(self, context: str) -> tuple[str, str]:
        """Connects; returns the context's name and namespace."""
        config = self._library.config
        try:
            if not self.kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config()
                self._api = self._library.client.ApiClient()
                return "", ""
            found = ""
            if not context:  # the library lists none where the current one is missing, which a job may do without
                current = config.list_kube_config_contexts(config_file=self.kubeconfig or None)[1]
                context, found = str(current["name"]), str(current["context"].get("namespace", ""))
            self._api = config.new_client_from_config(
                config_file=self.kubeconfig or None, context=context, persist_config=False
            )
            if not self._api.configuration.verify_ssl:  # that was meant: no warning at each call
                import urllib3

                urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
            return context, found
        except (config.ConfigException, yaml.YAMLError, KeyError, *_NO_KUBECONFIG) as error:
            file = self.kubeconfig or os.path.expanduser("~/.kube/config")
            if not any(map(os.path.exists, file.split(os.pathsep))):
                words = f"there is no kubeconfig {file}: put it there, or for a new job set KUBECONFIG to another"
            else:
                said = " ".join(str(error).split())
                words = f"the kubeconfig {file} cannot be used ({said}); `kubectl config view` shows what is read of it"
                words += ", and `kubectl config use-context NAME` chooses among its contexts"
            raise ConfigurationError(words) from None

    def close(self) -> None:
        pools = self._api.rest_client.pool_manager.pools
        for pool in map(pools.get, pools.keys()):
            pool.close()  # clear() leaves it to the collector, and the library keeps the last answer of all
        pools.clear()
        self._api.close()

    def check_namespace(self) -> None:
        """Refuses (SubmitError) a namespace that is not there, earlier than :meth:`create` would; whoever may not look
        at one (403) hears it then."""
        with self._refusals(f"use the namespace {self.namespace} (`kubectl create namespace` makes one)", unless=403):
            v1 = self._group("v1")
            v1.read_namespace(self.namespace, _preload_content=False, _request_timeout=TIMEOUT_S).release_conn()

    def check_rights(self, objects: Sequence[Object]) -> None:
        """Refuses (SubmitError) to go on where the server says that the caller may not create one of the objects."""
        for version, kind in dict.fromkeys((one["apiVersion"], one["kind"]) for one in objects):
            plural = kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")
            asked = {"namespace": self.namespace, "verb": "create", "group": version.rpartition("/")[0]}
            body = {"spec": {"resourceAttributes": {**asked, "resource": plural}}}
            with contextlib.suppress(SubmitError), self._refusals("say what you may create"):
                api = self._library.client.AuthorizationV1Api(self._api)
                said = api.create_self_subject_access_review(body, _request_timeout=TIMEOUT_S).status
                if said is not None and not said.allowed:
                    break
        else:
            return
        raise SubmitError(
            f"the cluster does not let you create {plural} in the namespace {self.namespace}, which the job needs: ask "
            f"whoever gives rights in it (`kubectl --namespace {self.namespace} auth can-i --list` shows yours), or "
            "submit to another --namespace"
        )

    def is_at_least(self, minor: int) -> bool:
        """Whether the server is of Kubernetes 1.``minor`` or newer, as far as it says."""
        try:
            with self._refusals("say its version"):
                said = self._library.client.VersionApi(self._api).get_code(_request_timeout=TIMEOUT_S)
        except SubmitError:
            return False
        return int(re.sub(r"\D.*", "", said.minor) or 0) >= minor

    def create(self, objects: Sequence[Object]) -> None:
        """Creates the objects, all or none: when the server refuses one (SubmitError), those before it are deleted
        again."""
        made: list[Object] = []
        try:
            for one in objects:
                with self._refusals(f"create {_name(one)}"):
                    self._call("create", one["apiVersion"], one["kind"], body=one)
                made.append(one)
        except BaseException as error:
            if not isinstance(error, SubmitError):  # Ctrl-C: this one may be there, too
                made.append(one)
            left = [_name(one) for one in reversed(made) if not self._takes_back(one)]
            if left and isinstance(error, SubmitError):
                named = " ".join(name.replace(" ", "/") for name in left)
                raise SubmitError(
                    f"{error}; and it would not delete what had been created before: someone with permission must run "
                    f"`kubectl --namespace {self.namespace} delete {named}`"
                ) from None
            raise

    def _takes_back(self, one: Object) -> bool:
        """Deletes an object; whether the server let it."""
        try:
            self.delete([one])
        except SubmitError:
            return False
        return True

    def delete(self, objects: Sequence[Object]) -> None:
        """Deletes the objects and what they own; those that are gone do not matter. SubmitError: the server refused."""
        for one in objects:
            with self._refusals(f"delete {_name(one)}", unless=404):
                name = one["metadata"]["name"]
                self._call("delete", one["apiVersion"], one["kind"], name=name, propagation_policy="Background")

    def find(self, api_version: str, kind: str, selector: str) -> list[Object]:
        """Objects of a kind with these labels, the oldest first."""
        with self._refusals(f"list objects of the kind {kind}"):
            items: list[Object] = self._call("list", api_version, kind, label_selector=selector)["items"]
        for one in items:
            one.setdefault("status", {})  # what no controller has seen yet may have none
        return sorted(items, key=lambda one: str(one["metadata"].get("creationTimestamp")))

    def jobs(self, selector: str) -> list[Object]:
        return self.find("batch/v1", "Job", selector)

    def pods(self, selector: str) -> list[Object]:
        return self.find("v1", "Pod", selector)

    def events(self, selector: str) -> list[Object]:
        with self._refusals("list events"):
            return list(self._call("list", "v1", "Event", field_selector=selector)["items"])

    def log(self, pod: str, follow: bool, previous: bool = False) -> Iterator[str]:
        """Lines of a pod's log; if ``follow``, to its end, or until the connection breaks or has been quiet for
        ``QUIET_S``. ``previous``: of the container before the one that runs."""
        import urllib3

        with self._refusals(f"read the log of {pod}"):
            answer = self._group("v1").read_namespaced_pod_log(
                pod,
                self.namespace,
                follow=follow,
                previous=previous,
                _preload_content=False,
                _request_timeout=(TIMEOUT_S, QUIET_S) if follow else TIMEOUT_S,
            )
            try:
                for line in answer:
                    yield line.decode(errors="replace").removesuffix("\n")
            except (urllib3.exceptions.ReadTimeoutError, urllib3.exceptions.ProtocolError):
                if not follow:
                    raise
            finally:
                answer.release_conn()

    def _call(self, verb: str, api_version: str, kind: str, **arguments: Any) -> Object:
        """The server's answer as it came: what an older one says does not fit the library's classes."""
        snake = re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower()
        call = getattr(self._group(api_version), f"{verb}_namespaced_{snake}")
        answer = call(namespace=self.namespace, _preload_content=False, _request_timeout=TIMEOUT_S, **arguments)
        try:
            return dict(json.loads(answer.data))
        finally:
            answer.release_conn()

    def _group(self, api_version: str) -> Any:
        """The client's class for a group: "batch/v1" is BatchV1Api, "v1" CoreV1Api."""
        group, _, version = api_version.rpartition("/")
        stem = group.removesuffix(".k8s.io").replace(".", " ").title().replace(" ", "") or "Core"
        return getattr(self._library.client, f"{stem}{version.title()}Api")(self._api)

    @contextlib.contextmanager
    def _refusals(self, what: str, unless: int = 0) -> Iterator[None]:
        import urllib3

        library = self._library
        try:
            yield
        except library.client.ApiException as error:
            said = _said(error)
            stranger = error.status == 401 or "system:anonymous" in said
            if error.status != unless or stranger:
                again = "; the login in the kubeconfig is missing or not accepted: log in again" if stranger else ""
                raise SubmitError(f"the cluster would not {what}: {said}{again}") from None
        except urllib3.exceptions.HTTPError as error:
            host = self._api.configuration.host
            raise SubmitError(
                f"the cluster at {host} could not be asked to {what}: {_cause(error)}. `kubectl cluster-info` shows "
                "whether it runs and is reached from here"
            ) from None


@contextlib.contextmanager
def _failed_login() -> Iterator[None]:
    """Refuses (ConfigurationError) a login that fails, of a program that is not installed for example: the library only
    logs that, and goes on without one."""
    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        is_ours = record.levelno >= logging.ERROR and record.thread == threading.get_ident()
        if is_ours:
            said.append(" ".join(record.getMessage().split()))
        return not is_ours

    logging.getLogger().addFilter(keep)
    try:
        yield
    finally:
        logging.getLogger().removeFilter(keep)
    if said:
        raise ConfigurationError(
            f"the login in the kubeconfig fails ({'; '.join(said)}): install the program that it starts, or log in "
            "again; `kubectl get jobs` tries it"
        )


def _cause(error: BaseException) -> str:
    """What the system said, below what the library wraps around it: "Connection refused"."""
    while isinstance(deeper := getattr(error, "reason", None) or error.__cause__, BaseException):
        error = deeper
    return getattr(error, "strerror", None) or str(error)


def _said(error: Any) -> str:
    found = re.search(r'"message":\s*"((?:[^"\\]|\\.)*)"', str(error.body or ""))
    message = json.loads(f'"{found.group(1)}"') if found else error.reason
    return f"{error.status} {message}"


def _name(one: Object) -> str:
    return f"{one['kind']} {one['metadata']['name']}"
