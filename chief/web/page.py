"""The page of a job: its files, what it shows as JSON, and the stream that keeps it live."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import mimetypes
from collections.abc import AsyncIterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable

from aiohttp import web

from stratagem.chief.monitoring.recent import JobLog
from stratagem.chief.monitoring.why.reading import reading_of
from stratagem.chief.monitoring.why.verdict import judge
from stratagem.chief.web.page_watch import PageWatch
from stratagem.rpc.logs import PACKAGE
from stratagem.rpc.plain_json import to_json

READ_S = 30.0
"""Seconds that a page may take to read a message."""
RETRY_MS = 1000
"""After which a page that lost its stream comes back."""


class JobPage:
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
        return _json(dataclasses.asdict(await self._watch.look()))

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
                    await asyncio.wait_for(response.write(f"event: {name}\ndata: {data}\n\n".encode()), READ_S)
            except TimeoutError:  # it sleeps, say; when it wakes it comes back
                if request.transport is not None:
                    request.transport.abort()
        return response


def _json(content: Mapping[str, object]) -> web.Response:
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
