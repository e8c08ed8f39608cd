"""/metrics of a chief: over real HTTP, and with certificates and a token over real HTTPS."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from stratagem.chief.monitoring import metrics_server
from stratagem.chief.monitoring.metrics_server import MetricsServer
from stratagem.errors import ConfigurationError
from stratagem.launch.tls import make_throw_away
from stratagem.rpc.security import OPEN, Security, make_security

TOKEN = "a-token-of-the-job-0123456789"


def look() -> list[Metric]:
    return [GaugeMetricFamily("stratagem_ready", "Whether.", value=1.0)]


@asynccontextmanager
async def serving(security: Security = OPEN, look: Callable[[], list[Metric]] = look) -> AsyncIterator[MetricsServer]:
    server = MetricsServer("127.0.0.1:0", look, asyncio.get_running_loop(), security, insecure=False)
    try:
        yield server
    finally:
        await server.stop()


def get(
    address: str, context: ssl.SSLContext | None = None, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, str]:
    """Status and body. The name in the chief's certificate is not the host's, so its name is given to TLS apart."""
    host, port = address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    if context is not None:
        raw = socket.create_connection((host, int(port)), 30)
        connection.sock = context.wrap_socket(raw, server_hostname="chief-0.stratagem.internal")
    try:
        connection.request(method, "/metrics", headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_it_answers_with_the_status_of_now() -> None:
    async def scenario() -> None:
        asked = []

        def count() -> list[Metric]:
            asked.append(asyncio.get_running_loop())  # runs in the loop: nothing else touches the job's state
            return [GaugeMetricFamily("stratagem_asked", "How often.", value=len(asked))]

        async with serving(look=count) as server:
            assert server.url == f"http://{server.address}/metrics"
            for number in (1, 2):
                status, body = await asyncio.to_thread(get, server.address)
                (family,) = text_string_to_metric_families(body)
                assert (status, family.name, family.samples[0].value) == (200, "stratagem_asked", number)

    asyncio.run(scenario())


def test_beyond_loopback_it_needs_tls_or_a_word() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(ConfigurationError, match=r"refusing to listen on 0\.0\.0\.0:0"):
            MetricsServer("0.0.0.0:0", look, loop, OPEN, insecure=False)
        server = MetricsServer("0.0.0.0:0", look, loop, OPEN, insecure=True)
        try:
            port = server.address.rpartition(":")[2]
            assert (await asyncio.to_thread(get, f"127.0.0.1:{port}"))[0] == 200
            with pytest.raises(ConfigurationError, match="cannot serve metrics on"):
                MetricsServer(f"127.0.0.1:{port}", look, loop, OPEN, insecure=False)
        finally:
            await server.stop()

    asyncio.run(scenario())


def test_a_token_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)

    async def scenario() -> None:
        async with serving(make_security("chief:0", "", str(tmp_path / "token"))) as server:
            for headers in ({}, {"Authorization": "Bearer another-token-0123456789"}):
                status, body = await asyncio.to_thread(get, server.address, None, headers)
                assert status == 401 and "stratagem_ready" not in body and TOKEN not in body
            right = {"Authorization": f"Bearer {TOKEN}"}
            assert (await asyncio.to_thread(get, server.address, None, right))[0] == 200

    asyncio.run(scenario())


def test_with_tls_it_is_for_those_who_may_see_the_status(tmp_path: Path) -> None:
    make_throw_away(tmp_path, ["chief:0", "ps:0"])

    def context(who: str) -> ssl.SSLContext:
        found = make_security(who, str(tmp_path), "").client_context()
        assert found is not None
        return found

    async def scenario() -> None:
        async with serving(make_security("chief:0", str(tmp_path), "")) as server:
            assert server.url.startswith("https://")
            status, body = await asyncio.to_thread(get, server.address, context("operator"))
            assert status == 200 and "stratagem_ready 1.0" in body
            status, body = await asyncio.to_thread(get, server.address, context("ps:0"))
            assert status == 403 and "ps:0 may not call GetStatus" in body
            stranger = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
            with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
                await asyncio.to_thread(get, server.address, stranger)
            with pytest.raises((ConnectionError, http.client.HTTPException)):
                await asyncio.to_thread(get, server.address)  # no TLS at all
            assert (await asyncio.to_thread(get, server.address, context("operator")))[0] == 200

    asyncio.run(scenario())


def test_a_client_that_asks_nothing_holds_up_the_others_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.2)

    async def scenario() -> None:
        async with serving() as server:
            host, port = server.address.split(":")
            with socket.create_connection((host, int(port))):
                assert (await asyncio.to_thread(get, server.address))[0] == 200

    asyncio.run(scenario())
