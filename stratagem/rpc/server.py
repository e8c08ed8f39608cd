"""gRPC servers of all roles: binding rules, health, reflection, the interceptor."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from stratagem.cluster.config import ServerConfig
from stratagem.errors import ConfigurationError
from stratagem.rpc import channels
from stratagem.rpc.binding import check_binding, warn_of_loopback
from stratagem.rpc.interceptors import AioInterceptor, Interceptor
from stratagem.rpc.limits import SPARE_CALLS
from stratagem.rpc.security import OPEN, Security, server_credentials

logger = logging.getLogger(__name__)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

HANDSHAKE_TIMEOUT_MS = 10_000
"""Until a new connection has to speak TLS and HTTP/2."""
IDLE_MS = 600_000
"""After which a connection without calls is closed; channels connect again by themselves."""
STOP_S = 5.0
"""Seconds beyond the grace that stopping a server may take."""


class _Threads(futures.ThreadPoolExecutor):
    """Where there is no thread for a call, it waits for that of another one: gRPC's own thread, which takes all calls,
    would end by the error, and nobody be answered any more."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            logger.warning("A call is not answered until something is free here: %s", error)


@dataclasses.dataclass
class RunningServer:
    server: grpc.Server
    address: str
    """host:port really bound."""
    health: health.HealthServicer
    services: Sequence[str]
    pool: futures.ThreadPoolExecutor

    def set_serving(self, serving: bool) -> None:
        """Readiness of every service, as ``grpc.health.v1`` tells it; the server as a whole ("") is live at once."""
        for service in self.services:
            self.health.set(service, _SERVING if serving else _NOT_SERVING)

    def stop(self, grace_s: float = 1.0) -> None:
        """Refuses new calls, ends the running ones after ``grace_s`` seconds, frees the port."""
        self.health.enter_graceful_shutdown()
        # A call that came when the pool was closed already has killed gRPC's serving thread: it would never end.
        self.server.stop(grace_s).wait(grace_s + STOP_S)
        self.pool.shutdown(wait=False)


@dataclasses.dataclass
class RunningAioServer:
    server: grpc.aio.Server
    address: str
    """host:port really bound."""
    health: Any
    services: Sequence[str]

    async def set_serving(self, serving: bool) -> None:
        for service in self.services:
            await self.health.set(service, _SERVING if serving else _NOT_SERVING)

    async def stop(self, grace_s: float = 1.0) -> None:
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_s)
        # Calls that it has broken off end in turns of the loop to come; one without them prints what it cuts short.
        calls = {task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == _OF_A_CALL}
        if calls:
            await asyncio.wait(calls, timeout=grace_s)


_OF_A_CALL = "_schedule_rpc_coro"
"""grpc.aio's name of what runs a call."""


def serve(
    config: ServerConfig,
    register: Callable[[grpc.Server], None],
    *,
    services: Sequence[str],
    security: Security = OPEN,
) -> RunningServer:
    """Starts a sync server.

    Args:
        config: where to listen and what to refuse; every open stream and waiting call takes a thread.
        services: full names of the services, for health and reflection.
        security: whom callers meet, and what they have to prove.

    Raises:
        ConfigurationError: the port is taken, the certificates cannot be used, or binding beyond loopback with
            neither TLS nor ``insecure``.
    """
    check_binding(config.bind, config.insecure, security.tls is not None)
    pool = _Threads(config.max_calls + SPARE_CALLS, thread_name_prefix="rpc")
    server = grpc.server(pool, **_arguments(config, Interceptor(config, security)))
    register(server)
    servicer = health.HealthServicer()
    address = _listen(server, servicer, config.bind, services, security)
    server.start()
    running = RunningServer(server, address, servicer, services, pool)
    running.set_serving(False)
    return running


async def serve_aio(
    config: ServerConfig,
    register: Callable[[grpc.aio.Server], None],
    *,
    services: Sequence[str],
    security: Security = OPEN,
) -> RunningAioServer:
    """Starts a ``grpc.aio`` server; arguments and errors as :func:`serve`."""
    check_binding(config.bind, config.insecure, security.tls is not None)
    server = grpc.aio.server(**_arguments(config, AioInterceptor(config, security)))
    register(server)
    servicer: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
    address = _listen(server, servicer, config.bind, services, security)
    await server.start()
    running = RunningAioServer(server, address, servicer, services)
    await running.set_serving(False)
    return running


def _listen(
    server: grpc.Server | grpc.aio.Server, servicer: Any, bind: str, services: Sequence[str], security: Security
) -> str:
    """Adds health (``servicer``) and reflection, and binds; returns the address really bound."""
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    credentials = server_credentials(security.tls) if security.tls is not None else None
    try:
        port = server.add_insecure_port(bind) if credentials is None else server.add_secure_port(bind, credentials)
    except RuntimeError:
        port = 0
    if not port:
        raise ConfigurationError(
            f"cannot listen on {bind}: the port is in use or the address does not belong to this "
            "machine. Stop the other process, choose another port, or use port 0 for a free one."
        )
    warn_of_loopback(bind)
    return f"{bind.rpartition(':')[0]}:{port}"


def _arguments(config: ServerConfig, interceptor: object) -> dict[str, Any]:
    options = [
        *channels.channel_options(config.max_message_bytes),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        # Replies that nobody reads are kept for as long as their stream is open. Twice the number of calls that are
        # served: an ordinary client holds back what is beyond this one, and would never hear of the other limit.
        ("grpc.max_concurrent_streams", 2 * config.max_calls_per_peer),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]
    return {
        "interceptors": [interceptor],
        "options": options,
        "maximum_concurrent_rpcs": config.max_calls + SPARE_CALLS,
    }


def add_servicer(service: ServiceDescriptor, servicer: object, server: grpc.Server) -> None:
    """Registers the servicer of a service with frames in it. Not the generated function: the frames of its streaming
    methods must pass as the bytes they are."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        behaviour = getattr(servicer, method.name)
        if method.client_streaming:
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(behaviour)
        else:
            request: Any = message_factory.GetMessageClass(method.input_type)
            reply: Any = message_factory.GetMessageClass(method.output_type)
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                behaviour, request.FromString, reply.SerializeToString
            )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
