"""gRPC servers of all roles: binding rules, health, reflection, the error interceptor."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from stratagem.errors import ConfigurationError
from stratagem.rpc import channels
from stratagem.rpc.errors import AioErrorInterceptor, ErrorInterceptor

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


STOP_S = 5.0
"""Seconds beyond the grace that stopping a server may take."""


@dataclasses.dataclass
class RunningServer:
    """A sync server that listens."""

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
    """A ``grpc.aio`` server that listens."""

    server: grpc.aio.Server
    address: str
    """host:port really bound."""
    health: Any
    services: Sequence[str]

    async def set_serving(self, serving: bool) -> None:
        """As :meth:`RunningServer.set_serving`."""
        for service in self.services:
            await self.health.set(service, _SERVING if serving else _NOT_SERVING)

    async def stop(self, grace_s: float = 1.0) -> None:
        """As :meth:`RunningServer.stop`."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def serve(
    bind: str,
    register: Callable[[grpc.Server], None],
    *,
    services: Sequence[str],
    max_threads: int,
    max_message_bytes: int,
    insecure: bool,
) -> RunningServer:
    """Starts a sync server.

    Args:
        bind: host:port; port 0 takes a free one.
        register: adds the servicers.
        services: full names of the services, for health and reflection.
        max_threads: threads for calls; every open stream and waiting call takes one.
        max_message_bytes: largest message accepted.
        insecure: allow other hosts than this one to connect without TLS.

    Raises:
        ConfigurationError: the port is taken, or binding beyond loopback without ``insecure``.
    """
    check_binding(bind, insecure)
    pool = futures.ThreadPoolExecutor(max_threads, thread_name_prefix="rpc")
    server = grpc.server(
        pool,
        interceptors=[ErrorInterceptor()],
        options=_server_options(max_message_bytes),
    )
    register(server)
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        port = server.add_insecure_port(bind)
    except RuntimeError:
        raise _port_taken(bind) from None
    if not port:
        raise _port_taken(bind)
    server.start()
    running = RunningServer(server, _with_port(bind, port), servicer, services, pool)
    running.set_serving(False)
    return running


async def serve_aio(
    bind: str,
    register: Callable[[grpc.aio.Server], None],
    *,
    services: Sequence[str],
    max_message_bytes: int,
    insecure: bool,
) -> RunningAioServer:
    """Starts a ``grpc.aio`` server; arguments and errors as :func:`serve`."""
    check_binding(bind, insecure)
    server = grpc.aio.server(interceptors=[AioErrorInterceptor()], options=_server_options(max_message_bytes))
    register(server)
    servicer: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        port = server.add_insecure_port(bind)
    except RuntimeError:
        raise _port_taken(bind) from None
    if not port:
        raise _port_taken(bind)
    await server.start()
    running = RunningAioServer(server, _with_port(bind, port), servicer, services)
    await running.set_serving(False)
    return running


def check_binding(bind: str, insecure: bool) -> None:
    """Refuses to listen beyond loopback in the clear.

    Raises:
        ConfigurationError: with both ways out.
    """
    host, colon, port = bind.rpartition(":")
    if not colon or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ConfigurationError(f"expected host:port to listen on, got {bind!r}")
    if insecure or is_loopback(host):
        return
    raise ConfigurationError(
        f"refusing to listen on {bind}: anybody who reaches that address could read and change the model. "
        "Bind to 127.0.0.1 (one machine), or give --insecure if the network is yours alone."
    )


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address or localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _server_options(max_message_bytes: int) -> list[tuple[str, int | str]]:
    return [
        *channels.channel_options(max_message_bytes),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


def _port_taken(bind: str) -> ConfigurationError:
    return ConfigurationError(
        f"cannot listen on {bind}: the port is in use or the address is not of this machine. "
        "Stop the other process, choose another port, or take port 0 for a free one."
    )


def _with_port(bind: str, port: int) -> str:
    return f"{bind.rpartition(':')[0]}:{port}"


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
