"""``/metrics``, for Prometheus."""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric


def metrics_routes(look: Callable[[], Awaitable[Iterable[Metric]]]) -> list[web.RouteDef]:
    """The one route; ``look`` gives the metrics."""

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        found = await look()
        body = encode(types.SimpleNamespace(collect=lambda: found))  # a registry of what this request has found
        return web.Response(body=body, headers={"Content-Type": content_type})

    return [web.get("/metrics", metrics)]
