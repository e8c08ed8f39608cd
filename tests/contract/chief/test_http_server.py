"""What a chief serves over HTTP: to whom, over real HTTP and HTTPS, with certificates and a token; and its metrics."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stratagem.chief.monitoring.metrics import Family
from stratagem.chief.web import http_server
from stratagem.chief.web.http_server import HttpServer, of_loop
from stratagem.chief.web.serving import metrics_app
from stratagem.errors import ConfigurationError
from stratagem.launch.certificates import make_throw_away
from stratagem.rpc.security import OPEN, Security, make_security

TOKEN = "a-token-of-the-job-0123456789"


def look() -> list[Family]:
    return [gauge("ready", "Whether.", 1.0)]


def gauge(name: str, meaning: str, value: float) -> Family:
    family = Family(name, meaning)
    family.add(value)
    return family


def serve(
    look: Callable[[], list[Family]] = look,
    bind: str = "127.0.0.1:0",
    security: Security = OPEN,
    names: tuple[str, ...] | None = None,
    insecure: bool = False,
) -> HttpServer:
    app = metrics_app(of_loop(asyncio.get_running_loop(), look))
    return HttpServer("metrics", bind, app, security, insecure=insecure, names=names)


@asynccontextmanager
async def serving(
    security: Security = OPEN, look: Callable[[], list[Family]] = look, names: tuple[str, ...] | None = None
) -> AsyncIterator[HttpServer]:
    server = serve(look, security=security, names=names)
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


async def test_it_answers_with_the_status_of_now() -> None:
    asked = []

    def count() -> list[Family]:
        asked.append(asyncio.get_running_loop())  # runs in the loop: nothing else touches the job's state
        return [gauge("asked", "How often.", len(asked))]

    async with serving(look=count) as server:
        assert server.url == f"http://{server.address}"
        for number in (1, 2):
            status, body = await asyncio.to_thread(get, server.address)
            (family,) = text_string_to_metric_families(body)
            assert (status, family.name, family.samples[0].value) == (200, "stratagem_asked", number)


async def test_beyond_loopback_it_needs_tls_or_a_word() -> None:
    with pytest.raises(ConfigurationError, match=r"refusing to listen on 0\.0\.0\.0:0"):
        serve(bind="0.0.0.0:0")
    server = serve(bind="0.0.0.0:0", insecure=True)
    try:
        port = server.address.rpartition(":")[2]
        assert (await asyncio.to_thread(get, f"127.0.0.1:{port}"))[0] == 200
        with pytest.raises(ConfigurationError, match="cannot serve metrics on"):
            serve(bind=f"127.0.0.1:{port}")
    finally:
        await server.stop()


async def test_a_token_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)

    async with serving(make_security("chief:0", "", str(tmp_path / "token"))) as server:
        for headers in ({}, {"Authorization": "Bearer another-token-0123456789"}):
            status, body = await asyncio.to_thread(get, server.address, None, headers)
            assert status == 401 and "stratagem_ready" not in body and TOKEN not in body
        for strange in ("Basic \xe9", "Bearer \xe9", "Basic #"):  # no UTF-8, no base64
            status, body = await asyncio.to_thread(get, server.address, None, {"Authorization": strange})
            assert status == 401, body
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert (await asyncio.to_thread(get, server.address, None, right))[0] == 200


async def test_with_tls_it_is_for_those_who_may_see_the_status(tmp_path: Path) -> None:
    make_throw_away(tmp_path, ["chief:0", "ps:0"])

    def context(who: str) -> ssl.SSLContext:
        found = make_security(who, str(tmp_path), "").client_context()
        assert found is not None
        return found

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


async def test_a_renewed_certificate_is_used_from_the_next_connection_on(tmp_path: Path) -> None:
    make_throw_away(tmp_path / "old", ["chief:0"])
    make_throw_away(tmp_path / "new", ["chief:0"])  # of another authority
    shutil.copytree(tmp_path / "old", tmp_path / "used")

    async with serving(make_security("chief:0", str(tmp_path / "used"), "")) as server:
        for life in ("old", "new"):
            shutil.copytree(tmp_path / life, tmp_path / "used", dirs_exist_ok=True)
            context = make_security("operator", str(tmp_path / life), "").client_context()
            assert (await asyncio.to_thread(get, server.address, context))[0] == 200


async def test_a_connection_too_many_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 2)
    async with serving() as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port))), socket.create_connection((host, int(port))):
            deadline = time.monotonic() + http_server.TIMEOUT_S / 2  # the server may not have heard of both yet
            with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
                while time.monotonic() < deadline:
                    await asyncio.to_thread(get, server.address)


async def test_a_client_that_asks_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 1)

    async with serving() as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port))) as silent:
            silent.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(silent.recv, 1) == b""
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(ConnectionError, http.client.RemoteDisconnected):
                assert (await asyncio.to_thread(get, server.address))[0] == 200
                break
            assert time.monotonic() < deadline


async def test_nothing_can_be_changed_and_a_browser_is_told_what_it_may_do() -> None:
    async with serving() as server:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            status, body = await asyncio.to_thread(get, server.address, None, None, method)
            assert (status, body) == (405, "this can only be read\n")
        host, port = server.address.split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        await asyncio.to_thread(connection.request, "GET", "/nothing")
        answer = await asyncio.to_thread(connection.getresponse)
        assert answer.status == 404 and answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Server"] == "stratagem", "no versions"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
        connection.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:{port}", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:{port}", 200),
        ("[::1]:8080", 200),
        ("10.1.2.3", 200),
        ("chief.example:8080", 200),
        ("evil.example:{port}", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
    ],
)
async def test_a_name_that_somebody_else_chose_is_refused(host: str, status: int) -> None:
    async with serving(names=("Chief.example",)) as server:
        shown = {"Host": host.format(port=server.address.rpartition(":")[2])}
        found, body = await asyncio.to_thread(get, server.address, None, shown)
        assert found == status
        if status == 403:
            assert "stratagem_ready" not in body
            assert body.startswith("expected one of chief.example, localhost, or an address, as the host")


async def test_a_browser_shows_the_token_as_a_password(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)

    def basic(text: str) -> dict[str, str]:
        return {"Authorization": "Basic " + base64.b64encode(text.encode("latin-1")).decode()}

    async with serving(make_security("chief:0", "", str(tmp_path / "token"))) as server:
        wrong = [
            basic("x:no"),
            basic(TOKEN),
            basic("x:é"),
            {"Authorization": "Basic ?"},
            {"Authorization": "Basic"},
        ]
        for headers in wrong:
            assert (await asyncio.to_thread(get, server.address, None, headers))[0] == 401, headers
        assert (await asyncio.to_thread(get, server.address, None, basic(f"anybody:{TOKEN}")))[0] == 200


async def test_whoever_looks_can_be_cancelled_at_any_moment() -> None:
    """A look that came in the moment of the cancellation was given instead: the page's loop went on, and the chief
    waited for it at the end of its job."""
    look = of_loop(asyncio.get_running_loop(), lambda: 1)
    for num_turns in range(20):
        asking = asyncio.ensure_future(look())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if asking.done():
            break
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert num_turns > 2 and asking.result() == 1
