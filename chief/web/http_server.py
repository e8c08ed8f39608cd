"""HTTP beside the chief's gRPC: the same rule for where to listen, the same proofs of identity, its own thread."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import logging
import ssl
import threading
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from aiohttp import web

from stratagem.cluster.spec import split_address
from stratagem.errors import ConfigurationError, ForbiddenError, IdentityError
from stratagem.rpc.binding import check_binding, listening
from stratagem.rpc.logs import THROTTLE
from stratagem.rpc.permissions import authorize
from stratagem.rpc.security import Security
from stratagem.rpc.tls_files import identity_of

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""Seconds that a client may take to ask, and the chief to answer."""
IDLE_S = 60.0
"""After which a connection without a request is closed."""
MAX_CONNECTIONS = 128
"""At once; a further one is closed."""
_STATUS_METHOD = "/stratagem.Chief/GetStatus"
"""Who may call it may read what is served here: it says the same."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
T = TypeVar("T")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """Serves GET requests from an event loop in a thread of its own.

    Args:
        what: it serves, for messages.
        bind: host:port; port 0 takes a free one.
        app: answers those who may ask.
        security: what callers have to prove: with TLS a certificate, with a token "Authorization: Bearer …", or, for
            browsers, the token as the password of any user.
        insecure: allow other hosts to ask without TLS.
        names: host names, beside localhost and addresses, by which it may be asked for; None: by any. What a browser
            runs must not reach a page of another origin by a name that it has turned to this address.

    Raises:
        ConfigurationError: the address cannot be had, or is beyond loopback with neither TLS nor ``insecure``.
    """

    def __init__(
        self,
        what: str,
        bind: str,
        app: web.Application,
        security: Security,
        *,
        insecure: bool,
        names: Collection[str] | None = None,
    ) -> None:
        check_binding(bind, insecure, security.tls is not None)
        self._context = security.server_context()
        host, port = split_address(bind)
        try:
            self._socket = listening(host, port)
        except OSError as error:
            raise ConfigurationError(
                f"cannot serve {what} on {bind}: {error.strerror}. Choose another port, or use port 0 for a free one."
            ) from None
        self.address = f"{bind.rpartition(':')[0]}:{self._socket.getsockname()[1]}"
        """host:port really bound."""
        self.url = f"{'https' if security.tls is not None else 'http'}://{self.address}"
        self._security = security
        self._names = None if names is None else {"localhost", *map(str.lower, names)}
        self._silent: set[Any] = set()
        app.middlewares.append(self._guard)
        app.on_response_prepare.append(_harden)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(app,), name="metrics-and-page", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Frees the port and the thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        await asyncio.to_thread(self._thread.join)  # a request that waits for the chief's loop must get its answer

    def _run(self, app: web.Application) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(_log_problem)
        try:
            self._loop.run_until_complete(self._serve(app))
        finally:
            self._socket.close()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _serve(self, app: web.Application) -> None:
        silent = logging.getLogger(f"{__name__}.requests")  # whatever strangers send is no news
        silent.setLevel(logging.CRITICAL)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=silent,
            keepalive_timeout=IDLE_S,
            shutdown_timeout=0.1,
            handler_cancellation=True,
        )
        await runner.setup()
        made = runner.server
        assert made is not None

        def connected() -> asyncio.BaseProtocol:
            if len(made.connections) >= MAX_CONNECTIONS:
                return _Refusing()
            handler = made()
            self._silent.add(handler)
            self._loop.call_later(TIMEOUT_S, self._hurry, handler)
            return handler

        if self._context is not None:
            self._context.sni_callback = self._renew
        server = await self._loop.create_server(
            connected,
            sock=self._socket,
            ssl=self._context,
            ssl_handshake_timeout=None if self._context is None else TIMEOUT_S,
        )
        await self._stopping.wait()
        server.close()
        await runner.cleanup()

    def _renew(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Each connection meets the certificate of now: it may have been renewed."""
        with contextlib.suppress(ConfigurationError):  # somebody is replacing it right now: the old one is still good
            if (now := self._security.server_context()) is not None:
                connection.context = now

    def _hurry(self, handler: Any) -> None:
        if handler in self._silent:
            self._silent.discard(handler)
            if handler.transport is not None:
                handler.transport.abort()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Lets those in who may know the job's status."""
        self._silent.discard(request.protocol)
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, text="this can only be read\n", headers={"Allow": "GET, HEAD"})
        if self._names is not None and not _is_named(request.host, self._names):
            return web.Response(
                status=403,
                text=f"expected one of {', '.join(sorted(self._names))}, or an address, as the host, "
                "because a page of somebody else could have chosen the name\n",
            )
        try:
            self._admit(request)
        except IdentityError as error:
            asks = {"WWW-Authenticate": 'Basic realm="stratagem: any name, and the token", charset="UTF-8"'}
            return web.Response(status=401, text=f"{error}\n", headers=asks if self._security.token else {})
        except ForbiddenError as error:
            return web.Response(status=403, text=f"{error}\n")
        try:
            return await handler(request)
        except web.HTTPException as refusal:
            return web.Response(status=refusal.status, text=f"{refusal.reason}\n")
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            THROTTLE.log(logger, logging.WARNING, "http", "A request could not be answered", exc_info=True)
            return web.Response(status=500, text="the chief could not answer; its log says why\n")

    def _admit(self, request: web.Request) -> None:
        token = self._security.token
        if token is not None and not token.matches(_bearer(request.headers.get("Authorization", ""))):
            raise IdentityError(
                "expected the header Authorization: Bearer, with the token of this job, or the token as a password"
            )
        if self._security.tls is not None:
            certificate = request.transport.get_extra_info("peercert") if request.transport is not None else None
            authorize(identity_of(certificate), _STATUS_METHOD)


def of_loop(loop: asyncio.AbstractEventLoop, look: Callable[[], T]) -> Callable[[], Awaitable[T]]:
    """``look`` as another loop can call it: it runs in ``loop``, where nothing else touches the job's state meanwhile.
    TimeoutError: of the function returned: ``loop`` has no time for it."""

    async def here() -> T:
        return look()

    async def ask() -> T:
        async with asyncio.timeout(TIMEOUT_S):  # `wait_for` of Python 3.11 loses a cancellation
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(here(), loop))

    return ask


class _Refusing(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def _harden(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers["Server"] = "stratagem"  # aiohttp has named itself, Python and their versions


def _is_named(host: str, names: Collection[str]) -> bool:
    """Whether the Host header names one of these, or is an address: nobody can turn an address to another machine."""
    if host.endswith("]"):
        name = host[1:-1]
    else:
        head, colon, port = host.rpartition(":")
        name = (head if colon and port.isdigit() else host).strip("[]").lower().rstrip(".")
    if name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _bearer(header: str) -> str:
    """The same as a bearer's, of a browser that has asked for a name and a password."""
    kind, _, rest = header.partition(" ")
    if kind.lower() != "basic":
        return header
    try:
        return "Bearer " + base64.b64decode(rest, validate=True).decode().partition(":")[2]
    except ValueError:  # no base64, or no text
        return ""


def _log_problem(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    THROTTLE.log(logger, logging.DEBUG, "http-loop", "Of the HTTP server: %s", context.get("message"))
