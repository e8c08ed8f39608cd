"""Serves metrics and page of a job that runs in the caller's event loop."""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from aiohttp import web

from stratagem.chief.job import ChiefJob
from stratagem.chief.monitoring.recent import JobLog
from stratagem.chief.web.http_server import HttpServer, of_loop
from stratagem.chief.web.page import JobPage
from stratagem.chief.web.page_watch import PageWatch
from stratagem.chief.wire import status_to_proto
from stratagem.cluster.config import ChiefConfig
from stratagem.cluster.spec import split_address
from stratagem.rpc.security import Security
from stratagem.rpc.status_view import StatusView, from_reply

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

logger = logging.getLogger(__name__)


def _looking(job: ChiefJob) -> Callable[[], Awaitable[StatusView]]:
    """What gives the status with measures; the loop of the job only puts it together."""
    ask = of_loop(asyncio.get_running_loop(), job.get_status)

    async def look() -> StatusView:
        return from_reply(status_to_proto(await ask(), with_measures=True))

    return look


def metrics_app(look: Callable[[], Awaitable[Iterable[Metric]]]) -> web.Application:
    """``/metrics``, for Prometheus; ``look`` gives the metrics."""
    from prometheus_client.exposition import choose_encoder

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        found = await look()
        body = encode(types.SimpleNamespace(collect=lambda: found))  # a registry of what this request has found
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    return app


def serve_metrics(config: ChiefConfig, job: ChiefJob, security: Security) -> HttpServer:
    """``/metrics`` at ``metrics_bind``; errors as :class:`HttpServer`."""
    from stratagem.chief.monitoring.metrics import families

    look = _looking(job)

    async def measure() -> Iterable[Metric]:
        return [*families(await look())]

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
