"""``/metrics`` over HTTP, beside the chief's gRPC: the same rule for where to listen, the same proofs of who asks."""

from __future__ import annotations

import asyncio
import logging
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from stratagem.cluster.spec import split_address
from stratagem.errors import ConfigurationError, ForbiddenError, IdentityError
from stratagem.rpc.binding import check_binding
from stratagem.rpc.permissions import authorize
from stratagem.rpc.security import Security
from stratagem.rpc.throttle import THROTTLE
from stratagem.rpc.tls_files import identity_of

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""Seconds that a client may take to ask or to read, and the event loop to answer."""
_CALLER = "stratagem.caller"
_STATUS_METHOD = "/stratagem.Chief/GetStatus"
"""Who may call it may read the metrics: they say the same."""


class MetricsServer:
    """Serves metrics from a thread of its own, one request at a time: strangers cannot take more than that.

    Args:
        bind: host:port; port 0 takes a free one.
        look: gives the metrics; runs in ``loop``.
        loop: the chief's, which must be running.
        security: what callers have to prove: with TLS a certificate, with a token "Authorization: Bearer …".
        insecure: allow other hosts to ask without TLS.

    Raises:
        ConfigurationError: the address cannot be had, or is beyond loopback with neither TLS nor ``insecure``.
    """

    def __init__(
        self,
        bind: str,
        look: Callable[[], Iterable[Metric]],
        loop: asyncio.AbstractEventLoop,
        security: Security,
        insecure: bool,
    ) -> None:
        check_binding(bind, insecure, security.tls is not None)
        registry = CollectorRegistry()
        registry.register(_Status(look, loop))
        host, port = split_address(bind)
        try:
            self._server = _Server(host, port, _guarded(make_wsgi_app(registry), security), security)
        except OSError as error:
            raise ConfigurationError(
                f"cannot serve metrics on {bind}: {error.strerror}. Choose another port, or take port 0 for a free one."
            ) from None
        self.address = f"{bind.rpartition(':')[0]}:{self._server.server_port}"
        """host:port really bound."""
        self.url = f"{'https' if security.tls is not None else 'http'}://{self.address}/metrics"
        """Where to ask."""
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Frees the port and the thread."""
        await asyncio.to_thread(self._stop)  # a request that waits for the loop must get its answer

    def _stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Status(Collector):
    def __init__(self, look: Callable[[], Iterable[Metric]], loop: asyncio.AbstractEventLoop) -> None:
        self._look = look
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        async def look() -> list[Metric]:
            return list(self._look())

        return asyncio.run_coroutine_threadsafe(look(), self._loop).result(TIMEOUT_S)

    def describe(self) -> Iterable[Metric]:
        return []  # the names are not needed before the first request


class _Server(WSGIServer):
    def __init__(self, host: str, port: int, app: Any, security: Security) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._security = security
        super().__init__((host, port), _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        # HTTPServer's own asks the name server for this machine's full name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, peer = super().get_request()
        # Made anew each time, so that a renewed certificate is used. The handshake waits for the handler's timeout.
        context = self._security.server_context()
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, peer

    def handle_error(self, request: Any, client_address: Any) -> None:
        THROTTLE.log(logger, logging.WARNING, "metrics", "A request for metrics failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def get_environ(self) -> dict[str, Any]:
        certificate: Any = self.connection.getpeercert() if isinstance(self.connection, ssl.SSLSocket) else None
        return {**super().get_environ(), _CALLER: identity_of(certificate)}

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def _guarded(app: Callable[..., Any], security: Security) -> Callable[..., Any]:
    """``app`` for those who may know the job's status."""

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        try:
            if security.token is not None and not security.token.matches(environ.get("HTTP_AUTHORIZATION", "")):
                raise IdentityError("expected the header Authorization: Bearer, with the token of this job")
            if security.tls is not None:
                authorize(environ[_CALLER], _STATUS_METHOD)
        except (IdentityError, ForbiddenError) as error:
            status = "401 Unauthorized" if isinstance(error, IdentityError) else "403 Forbidden"
            start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{error}\n".encode()]
        return app(environ, start_response)

    return guarded
