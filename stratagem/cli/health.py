"""`stratagem health`: what a probe asks a task, in a container or by hand. Needs no torch and starts quickly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stratagem.cli.options import SECONDS, cluster_option, configure
from stratagem.cluster.config import RoleConfig
from stratagem.cluster.sources import ENV_PREFIX
from stratagem.cluster.spec import join_address, split_address
from stratagem.cluster.task import TaskId
from stratagem.errors import ConfigurationError
from stratagem.rpc.channels import asking
from stratagem.rpc.security import Security, security_of

SERVICES: Mapping[str, str] = {
    "chief": "stratagem.Chief",
    "ps": "stratagem.ParameterServer",
    "worker": "stratagem.Worker",
}
"""What a task of each type serves; an evaluator serves nothing."""
_EVERYWHERE: Mapping[str, str] = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses to listen on, and where what listens on all of them is reached from the same machine."""


def address_to_ask(config: RoleConfig) -> str:
    """host:port where a probe beside the task reaches it. ConfigurationError: it takes a free port, which nobody can
    know."""
    host, port = split_address(config.bind)
    if not port:
        raise ConfigurationError(
            f"{config.task} listens on {config.bind}, a free port that a probe cannot know: give it a fixed one "
            f"(--bind 0.0.0.0:2222, {ENV_PREFIX}BIND or TF_CONFIG), or say where it listens with --address host:port"
        )
    return join_address(_EVERYWHERE.get(host, host), port)


def ask(address: str, task: str, service: str, timeout_s: float, security: Security) -> str:
    """What ``grpc.health.v1`` of the task at ``address`` says about ``service``: "SERVING", "NOT_SERVING", ….
    IdentityError: TLS does not come about. PeerUnavailableError: nobody answers within ``timeout_s`` seconds."""
    with asking(address, task, security, f"{task} at {address}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the stubs lack its methods
        reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


@click.command("health")
@click.option("--ready", is_flag=True, help="Ask for readiness too: registered, restored, the cluster complete.")
@click.option("--task", help="Which task; without it what STRATAGEM_TASK, TF_CONFIG or the cluster file say.")
@click.option("--address", help="host:port to ask; without it where the task listens by the same sources.")
@cluster_option
@click.option("--timeout-s", type=SECONDS, default=3.0, show_default=True, help="Seconds to wait for the answer.")
@click.option("--tls", help="Folder with ca.crt and the task's own certificate.")
@click.option("--token-file", help="File with the token of the job.")
def health_command(
    ready: bool,
    task: str | None,
    address: str | None,
    cluster_file: Path | None,
    timeout_s: float,
    tls: str | None,
    token_file: str | None,
) -> int:
    """Ask a task of this machine how it is: exit code 0 when it serves (with --ready: when it is ready), else 1.

    It finds the task as the task finds itself: --cluster, TF_CONFIG and the variables STRATAGEM_TASK, STRATAGEM_BIND,
    STRATAGEM_TLS and STRATAGEM_TOKEN_FILE.
    """
    flags = {"task": task or None, "bind": address, "tls": tls, "token_file": token_file}
    config = configure(None, cluster_file, flags)[0].config  # a chief need not say here for how many workers it waits
    kind = TaskId.parse(config.task).type
    if kind not in SERVICES:
        raise ConfigurationError(f"{config.task} serves nothing that can be probed: check its process instead")
    state = ask(address_to_ask(config), config.task, SERVICES[kind] if ready else "", timeout_s, security_of(config))
    click.echo(f"{config.task}: {state}")
    return int(state != "SERVING")
