"""`stratagem health`: what a probe asks a task, in a container or by hand. Needs no torch and starts quickly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stratagem.cli.options import SECONDS, cluster_option, read_cluster_file
from stratagem.cluster.config import RoleConfig
from stratagem.cluster.sources import ENV_PREFIX, gather
from stratagem.cluster.spec import join_address, split_address
from stratagem.cluster.task import TaskId
from stratagem.cluster.tf_config import placement_from_environment
from stratagem.errors import ClusterSpecError, ConfigurationError
from stratagem.launch.replica import own_environment
from stratagem.rpc.asking import asking
from stratagem.rpc.security import Security, security_of

EXIT_HEALTHY, EXIT_UNHEALTHY = 0, 1

SERVICES: Mapping[str, str] = {
    "chief": "stratagem.Chief",
    "ps": "stratagem.ParameterServer",
    "worker": "stratagem.Worker",
}
"""What a task of each type serves; an evaluator serves nothing."""
_EVERYWHERE: Mapping[str, str] = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses to listen on, and where what listens on all of them is reached from the same machine."""


def own_config(
    environ: Mapping[str, str], flags: Mapping[str, Any], document: Mapping[str, Any], file: str
) -> RoleConfig:
    """What the task says that has these sources: its id, where it listens, how it proves who it is.

    The sources are those of :func:`stratagem.cluster.sources.gather`, but a chief need not say here how many workers
    it waits for.

    Raises:
        ConfigurationError: a source is not valid, or nobody says which task it is.
    """
    told = placement_from_environment(environ)
    name = flags.get("task") or environ.get(f"{ENV_PREFIX}TASK") or (told.task if told is not None else None)
    if name is None:
        raise ClusterSpecError(
            f"which task? Name it: --task ps:0, or {ENV_PREFIX}TASK or TF_CONFIG as the task itself has them"
        )
    task = TaskId.parse(str(name))
    resolved, _ = gather(task.type, environ, {**flags, "task": str(task)}, document, file, of_every_role=True)
    return resolved.config


def address_to_ask(config: RoleConfig) -> str:
    """host:port where a probe beside the task reaches it.

    Raises:
        ConfigurationError: the task takes a free port, which nobody can know.
    """
    host, port = split_address(config.bind)
    if not port:
        raise ConfigurationError(
            f"{config.task} listens on {config.bind}, a free port that a probe cannot know: give it a fixed one "
            f"(--bind 0.0.0.0:2222, {ENV_PREFIX}BIND or TF_CONFIG), or say where it listens with --address host:port"
        )
    return join_address(_EVERYWHERE.get(host, host), port)


def ask(address: str, task: str, service: str, timeout_s: float, security: Security) -> str:
    """What ``grpc.health.v1`` of the task at ``address`` says about ``service``: "SERVING", "NOT_SERVING", ….

    Raises:
        IdentityError: TLS does not come about.
        PeerUnavailableError: nobody answers within ``timeout_s`` seconds.
    """
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
    flags = {"task": task, "bind": address, "tls": tls, "token_file": token_file}
    config = own_config(own_environment(os.environ), flags, read_cluster_file(cluster_file), str(cluster_file))
    kind = TaskId.parse(config.task).type
    if kind not in SERVICES:
        raise ConfigurationError(f"{config.task} serves nothing that could be asked: take its process for its health")
    state = ask(address_to_ask(config), config.task, SERVICES[kind] if ready else "", timeout_s, security_of(config))
    click.echo(f"{config.task}: {state}")
    return EXIT_HEALTHY if state == "SERVING" else EXIT_UNHEALTHY
