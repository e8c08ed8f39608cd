"""Who may be at the other end of a connection: the tasks of a cluster, and the operator. Names only, no I/O."""

from __future__ import annotations

from typing import Literal, cast, get_args

from stratagem.cluster.task import TASK_TYPES, TaskId
from stratagem.errors import ClusterSpecError

Role = Literal["chief", "worker", "ps", "evaluator", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)
OPERATOR = "operator"
"""The person at the terminal: `stratagem status`, and the launcher that watches its job. Not a task."""
CHIEF = "chief:0"
URI_PREFIX = "stratagem:"
"""A certificate names its owner as the URI "stratagem:worker:1"."""
DNS_SUFFIX = ".stratagem.internal"
"""A client expects the server's certificate to name "ps-0.stratagem.internal", wherever the server runs."""


def check_identity(name: str) -> str:
    """``name``, if it is a task id or the operator, else a ClusterSpecError."""
    try:
        return OPERATOR if name == OPERATOR else str(TaskId.parse(name))
    except ClusterSpecError:
        types = ", ".join(TASK_TYPES)
        raise ClusterSpecError(
            f"expected a task like 'worker:0' (types: {types}) or {OPERATOR!r}, got {name!r}"
        ) from None


def role_of(name: str) -> Role:
    return cast(Role, name.partition(":")[0])


def file_stem(name: str) -> str:
    """``"worker-1"``: what the files of ``worker:1`` are called."""
    return name.replace(":", "-")


def server_name(name: str) -> str:
    """The name that the certificate of ``name`` carries for TLS."""
    return file_stem(name) + DNS_SUFFIX


def identity_uri(name: str) -> str:
    return URI_PREFIX + name


def identity_from_uris(uris: list[str]) -> str:
    """The one identity among the URIs of a certificate; empty when there is none, or more than one."""
    names = [uri.removeprefix(URI_PREFIX) for uri in uris if uri.startswith(URI_PREFIX)]
    try:
        return check_identity(names[0]) if len(names) == 1 else ""
    except ClusterSpecError:
        return ""
