"""Metrics and page of a job, served beside the job, which runs in the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import mimetypes
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from importlib import resources
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING

from aiohttp import web

from stratagem.chief.job import ChiefJob
from stratagem.chief.monitoring.recent import JobLog
from stratagem.chief.monitoring.why.reading import reading_of
from stratagem.chief.monitoring.why.verdict import judge
from stratagem.chief.web.http_server import HttpServer, of_loop
from stratagem.chief.web.page_watch import PageWatch
from stratagem.chief.wire import status_to_proto
from stratagem.cluster.config import ChiefConfig
from stratagem.cluster.spec import split_address
from stratagem.rpc.logs import PACKAGE
from stratagem.rpc.plain_json import to_json
from stratagem.rpc.security import Security
from stratagem.rpc.status_view import StatusView, from_reply

if TYPE_CHECKING:
    from stratagem.chief.monitoring.metrics import Family

logger = logging.getLogger(__name__)

READ_S = 30.0
"""Seconds that a page may take to read a message."""
RETRY_MS = 1000
"""After which a page that lost its stream comes back."""


class JobPage:
    """The page: its files, what it shows as JSON, and the stream that keeps it live."""

    def __init__(self, watch: PageWatch, log: JobLog) -> None:
        self._watch = watch
        self._log = log
        self._files = dict(_files(resources.files("stratagem.chief.web") / "static"))

        self.app = web.Application()
        self.app.router.add_get("/", self._file)
        self.app.router.add_get("/static/{path:.+}", self._file)
        self.app.router.add_get("/api/status", self._status)
        self.app.router.add_get("/api/why", self._why)
        self.app.router.add_get("/api/live", self._live, allow_head=False)  # it has no end
        self.app.cleanup_ctx.append(self._background)
        self.app.on_shutdown.append(self._at_end)

    async def _background(self, _: web.Application) -> AsyncIterator[None]:
        PACKAGE.addHandler(self._log)
        looking = asyncio.create_task(self._watch.run())
        yield
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
        PACKAGE.removeHandler(self._log)

    async def _at_end(self, _: web.Application) -> None:
        """Who watches sees how the job ends: the last second is over sooner than the next look."""
        with contextlib.suppress(TimeoutError):
            await self._watch.look_once()

    async def _file(self, request: web.Request) -> web.Response:
        path = request.match_info.get("path", "index.html")
        if path not in self._files:
            raise web.HTTPNotFound
        body = self._files[path]
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        kind = mimetypes.guess_type(path)[0] or "text/plain"
        return web.Response(body=body, headers=headers, content_type=kind, charset="utf-8")

    async def _status(self, request: web.Request) -> web.Response:
        return _json(await self._watch.look())

    async def _why(self, request: web.Request) -> web.Response:
        return _json(judge(reading_of(await self._watch.look())).as_json())

    async def _live(self, request: web.Request) -> web.StreamResponse:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._watch.watching())
            except OverflowError as error:
                return web.Response(status=503, text=f"{error}\n", headers={"Retry-After": "10"})
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
            await response.prepare(request)
            await response.write(f"retry: {RETRY_MS}\n\n".encode())
            try:
                async for name, data in self._watch.messages():
                    async with asyncio.timeout(READ_S):
                        await response.write(f"event: {name}\ndata: {data}\n\n".encode())
            except TimeoutError:  # it sleeps, say; when it wakes it comes back
                if request.transport is not None:
                    request.transport.abort()
        return response


def _json(content: object) -> web.Response:
    return web.Response(text=to_json(content), content_type="application/json")


def _files(folder: Traversable, prefix: str = "") -> list[tuple[str, bytes]]:
    """Everything below: nothing else can be asked for, whatever a path looks like."""
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _files(entry, f"{prefix}{entry.name}/")
        else:
            found.append((prefix + entry.name, entry.read_bytes()))
    return found


def _looking(job: ChiefJob, with_earlier: bool = True) -> Callable[[], Awaitable[StatusView]]:
    """What gives the status with measures; the loop of the job only puts it together."""
    ask = of_loop(asyncio.get_running_loop(), job.get_status)

    async def look() -> StatusView:
        return from_reply(status_to_proto(await ask(), with_measures=True, with_earlier=with_earlier))

    return look


def metrics_app(look: Callable[[], Awaitable[Iterable[Family]]]) -> web.Application:
    """``/metrics``, for Prometheus; ``look`` gives the metrics."""
    from prometheus_client.exposition import choose_encoder

    from stratagem.chief.monitoring.metrics import exposition

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=exposition(await look(), encode), headers={"Content-Type": content_type})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    return app


def serve_metrics(config: ChiefConfig, job: ChiefJob, security: Security) -> HttpServer:
    """``/metrics`` at ``metrics_bind``; errors as :class:`HttpServer`."""
    from stratagem.chief.monitoring.metrics import families

    look = _looking(job, with_earlier=False)

    async def measure() -> Iterable[Family]:
        return families(await look())

    server = HttpServer("metrics", config.metrics_bind, metrics_app(measure), security, insecure=config.insecure)
    logger.info("Metrics at %s/metrics", server.url)
    return server


def serve_page(config: ChiefConfig, job: ChiefJob, security: Security) -> HttpServer:
    """The page at ``web``; errors as :class:`HttpServer`."""
    log = job.streams.log = JobLog()
    app = JobPage(PageWatch(_looking(job), log), log).app
    names = [split_address(address)[0] for address in (config.web, config.advertise) if address]
    server = HttpServer("the page", config.web, app, security, insecure=config.insecure, names=names)
    logger.info("The page of the job is at %s", server.url)
    return server
