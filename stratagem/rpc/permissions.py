"""Which role may call which RPC: the one table. An RPC that is not in it is closed to all."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.cluster.identity import ROLES, Role, role_of
from stratagem.errors import ForbiddenError, IdentityError

_CHIEF: frozenset[Role] = frozenset({"chief"})
_WORKER: frozenset[Role] = frozenset({"worker"})
_FOLLOWER: frozenset[Role] = frozenset({"worker", "ps"})
_MEMBER: frozenset[Role] = frozenset({"worker", "ps", "evaluator"})
_LOOKS: frozenset[Role] = frozenset({"worker", "evaluator", "operator"})
_OPERATOR: frozenset[Role] = frozenset({"operator"})
_KNOWN: frozenset[Role] = frozenset(ROLES)

_BY_SERVICE: Mapping[str, Mapping[str, frozenset[Role]]] = {
    "stratagem.Chief": {
        "Session": _MEMBER,
        "OpenDataset": _WORKER,
        "NextUnits": _WORKER,
        "StartStep": _WORKER,
        "GetMetricStates": _WORKER,
        "RecordLogs": _WORKER,
        "Agree": _WORKER,
        "TakeIn": _WORKER,
        "Scale": _OPERATOR,
        "SaveCheckpoint": _WORKER,
        "GetStatus": _LOOKS,
    },
    "stratagem.ParameterServer": {
        "Hello": _FOLLOWER,
        "Transfer": _FOLLOWER,
        "OpenLane": _FOLLOWER,
        "CreateVariables": _WORKER,
        "AssignValues": _WORKER,
        "PrepareUpdate": _WORKER,
        "CommitUpdate": _WORKER,
        "CloseUnits": _WORKER,
        "PullWeights": _WORKER,
        "Fence": _CHIEF,
        "CloseStep": _CHIEF,
        "DescribeUnits": _CHIEF,
        "HoldCommits": _CHIEF,
        "AdmitUpdates": _CHIEF,
        "SaveShards": _CHIEF,
        "ReleaseCommits": _CHIEF,
        "RestoreShards": _CHIEF,
        "MarkLost": _CHIEF,
        "TakeOver": _CHIEF,
    },
    "stratagem.Worker": {
        "Meet": _WORKER,
        "OpenLane": _WORKER,
        "Exchange": _WORKER,
        "Abort": _WORKER,
        "GetPosition": _WORKER,
    },
    "stratagem.Observer": {"GetStack": _OPERATOR, "StartTrace": _OPERATOR, "StopTrace": _OPERATOR},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _KNOWN},
}

PERMISSIONS: Mapping[str, frozenset[Role]] = {
    f"/{service}/{method}": roles for service, methods in _BY_SERVICE.items() for method, roles in methods.items()
}
"""Full name of each method to the roles that may call it."""
OPEN_METHODS = frozenset({f"/grpc.health.v1.Health/{method}" for method in ("Check", "Watch", "List")})
"""Callable without an identity, so that probes need no token. They tell whether a service is ready, no more."""


def authorize(identity: str, method: str) -> None:
    """Refuses a call that the table does not allow. ``identity``: proven; empty: none. ``method``: its full name,
    "/stratagem.Chief/GetStatus" say. IdentityError: the method needs an identity, and there is none. ForbiddenError:
    the caller's role may not call it."""
    name = method.rpartition("/")[2]
    if not identity:
        raise IdentityError(f"{name} needs a caller that identifies itself, and this one did not: give --token-file")
    allowed = PERMISSIONS.get(method, frozenset())
    if role_of(identity) not in allowed:
        whom = f"it is for {', '.join(sorted(allowed))}" if allowed else "nobody may"
        raise ForbiddenError(f"{identity} may not call {name}: {whom}")
