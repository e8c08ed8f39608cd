"""Asks a chief, and the tasks of its job, what they do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TypeVar

import grpc

from stratagem.cluster.identity import CHIEF
from stratagem.cluster.tf_config import placement_from_environment
from stratagem.errors import ClusterSpecError, PeerUnavailableError
from stratagem.rpc.asking import asking
from stratagem.rpc.channels import connect
from stratagem.rpc.chief_address import ChiefAddress
from stratagem.rpc.errors import error_from_rpc
from stratagem.rpc.generated import chief_pb2, chief_pb2_grpc, observer_pb2, observer_pb2_grpc
from stratagem.rpc.security import OPEN, Security
from stratagem.rpc.status_view import StatusView, from_reply

_Reply = TypeVar("_Reply")


def chief_from_environment(named: str | None, otherwise: str = "") -> str:
    """The chief's address: the one that is named, else that of the environment, else ``otherwise``.

    Raises:
        ClusterSpecError: nobody names it.
    """
    if named:
        ChiefAddress(named)
        return named
    if (placement := placement_from_environment(os.environ)) is not None:
        return placement.cluster.chief_address
    if found := os.environ.get("STRATAGEM_CHIEF") or otherwise:
        return found
    raise ClusterSpecError("which job? Name its chief: --chief host:port, --cluster FILE or TF_CONFIG")


def fetch_status(address: str, timeout_s: float, security: Security = OPEN) -> StatusView:
    """Asks the chief at ``address``, which may be whatever ``--chief`` takes.

    Raises:
        IdentityError: TLS does not come about, or the chief does not know us.
        PeerUnavailableError: it does not answer within ``timeout_s`` seconds, and none that stands by has taken over.
    """
    request = chief_pb2.GetStatusRequest(measures=True)
    return from_reply(_ask_chief(address, security, lambda stub: stub.GetStatus(request, timeout=timeout_s)))


def _ask_chief(address: str, security: Security, ask: Callable[[chief_pb2_grpc.ChiefStub], _Reply]) -> _Reply:
    """Asks each that ``address`` may mean, until one answers."""
    *others, last = ChiefAddress(address).candidates
    for each in others:
        with contextlib.suppress(PeerUnavailableError):
            return _ask(each, security, ask)
    return _ask(last, security, ask)


def _ask(address: str, security: Security, ask: Callable[[chief_pb2_grpc.ChiefStub], _Reply]) -> _Reply:
    with asking(address, CHIEF, security, f"the chief at {address}") as channel:
        return ask(chief_pb2_grpc.ChiefStub(channel))


def ask_to_scale(address: str, num_workers: int, num_ps: int, timeout_s: float, security: Security = OPEN) -> None:
    """Says to the chief how many workers and ps there are to be; 0: as many as there are.

    Raises:
        ConfigurationError: the job cannot have another number.
        PeerUnavailableError: the chief does not answer within ``timeout_s`` seconds.
    """
    request = chief_pb2.ScaleRequest(num_workers=num_workers, num_ps=num_ps)
    _ask_chief(address, security, lambda stub: stub.Scale(request, timeout=timeout_s))


def fetch_stack(address: str, task: str, timeout_s: float, security: Security = OPEN) -> tuple[str, ...]:
    """The stacks of the threads of a worker or ps, one text per thread, and its last collectives and commits.

    Raises:
        PeerUnavailableError: it does not answer within ``timeout_s`` seconds.
    """
    channel = connect(address, task, security)
    try:
        reply = observer_pb2_grpc.ObserverStub(channel).GetStack(observer_pb2.GetStackRequest(), timeout=timeout_s)
        flight = "\n".join(["last collectives and commits", *(f"  {line}" for line in reply.flight)])
        return (*reply.threads, *([flight] if reply.flight else []))
    except grpc.RpcError as error:
        raise error_from_rpc(error, f"{task} at {address}") from None
    finally:
        channel.close()
